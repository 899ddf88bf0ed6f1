"""FP8Linear and FP8Experts, their slots, and the choice of which of their GEMMs run in FP8."""
