"""Checkpoints of the example job and their folders."""
