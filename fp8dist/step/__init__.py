"""The optimizer step, from its first forward to its boundary, and the attachment of a manager to a job."""
