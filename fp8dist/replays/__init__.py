"""Replays of a batch, by hand or when an event asks for one."""
