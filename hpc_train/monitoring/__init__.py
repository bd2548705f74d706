"""What a run tells: metrics in a file, progress on the console."""
