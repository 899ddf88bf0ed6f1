"""Exports, checkpoints and traces: written by a job, read without one. Nothing in a file is executed."""
