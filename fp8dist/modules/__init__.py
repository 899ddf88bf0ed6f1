"""FP8Linear, the slots of one Linear, and the choice of which of its GEMMs run in FP8."""
