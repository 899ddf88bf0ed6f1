"""FP8 state in the trainers that people use: one module for each, imported only when it is asked for."""
