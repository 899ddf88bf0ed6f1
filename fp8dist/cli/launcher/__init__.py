"""``fp8dist launch`` on one node: read the environment, plan, run torchrun. Only ``agent`` imports torch."""
