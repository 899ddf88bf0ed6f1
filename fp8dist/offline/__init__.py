"""Read checkpoints without a job: no process group, no GPU, and no code from the file is run."""
