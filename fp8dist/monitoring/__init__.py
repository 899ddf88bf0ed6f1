"""Monitoring of slot statistics and of the loss."""
