"""Groups that share state, the one collective per step, and the search for missing ranks when it fails."""
