"""Checkpoints read without a job: no process group, no GPU, no code from the file."""
