"""Slots, arenas, manifests, and their storage."""
