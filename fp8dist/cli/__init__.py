"""The command line, one file per verb that has more than a few lines."""
