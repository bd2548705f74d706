"""One module per claim, each beside a peer and the limit: `python -m benchmarks.NAME`."""
