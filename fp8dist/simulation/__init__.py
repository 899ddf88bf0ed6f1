"""Predict the cost of a sync on many ranks: formulas and random stragglers. See docs/design/simulation.md."""
