"""Launching and submitting jobs."""
