"""What the job measures and writes down: metrics.jsonl and summary.json."""
