"""Measurements of the job, for metrics.jsonl and summary.json."""
