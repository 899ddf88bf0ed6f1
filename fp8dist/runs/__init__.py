"""Runs: the recorder of a run's folder, the loss guard, reports, the live view, exporters into other tools."""
