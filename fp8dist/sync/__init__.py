"""Who shares state, the one collective per step, and which rank is missing when it fails."""
