"""Hooks into DDP, FSDP1 and FSDP2, and queries about models that they wrap."""
