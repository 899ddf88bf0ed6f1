"""Hooks into DDP, FSDP1 and FSDP2, and what these have made of a model."""
