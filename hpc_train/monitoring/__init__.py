"""Reports on a run: metrics in a file, progress on the console."""
