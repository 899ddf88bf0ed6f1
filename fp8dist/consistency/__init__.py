"""The consistency checker: what is replicated, whether it is equal, where it is not, and mending it."""
