"""The flags of the job, and what they mean together. Nothing here imports torch."""
