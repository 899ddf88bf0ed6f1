"""Runs read from their folders, and drawn."""
