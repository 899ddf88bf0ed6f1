"""Recipes and settings, slots and arenas, and the groups that share them: one collective per step; who is missing."""
