"""The flags of the job and the checks of their combinations. Nothing here imports torch."""
