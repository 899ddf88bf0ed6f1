"""Faults that are planted (--inject), and failures that happen."""
