"""Consistency checker: compare state across ranks, locate differences, repair. See docs/design/checker.md."""
