"""Save and load FP8 state, and import FP8 state that TransformerEngine has saved."""
