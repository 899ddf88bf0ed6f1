"""What every room uses: texts, names and their checks, findings as plain data, hooks on torch's optimizers."""
