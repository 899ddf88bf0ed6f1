"""What ``fp8dist launch`` does on one node: environment, plan, agent. Only ``agent`` imports torch."""
