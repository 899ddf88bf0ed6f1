"""One optimizer step, from its first forward to its boundary, and what ties a manager to a job."""
