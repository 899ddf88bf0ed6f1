"""Replays of batches that a training loop keeps, when an event asks for one."""
