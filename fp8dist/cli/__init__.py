"""The command line. Larger commands have a file of their own."""
