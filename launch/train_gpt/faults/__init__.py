"""Injected faults (--inject), and the handling of real failures."""
