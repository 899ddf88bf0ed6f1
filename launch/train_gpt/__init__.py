"""The example job: a small GPT on real text, in FP8, under DDP, FSDP1, FSDP2 or HSDP."""
