"""Checkpoints of the job and their folders."""
