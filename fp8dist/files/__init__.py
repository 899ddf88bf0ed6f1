"""Checkpoints and exports: written for inference servers, read without a job. Nothing in a file is executed."""
