"""What casts and multiplies: FP8Linear, the slots of one Linear, and which of its GEMMs run in FP8."""
