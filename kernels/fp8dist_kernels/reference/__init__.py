"""Each kernel in plain torch. Runs on any device and defines the correct result."""
