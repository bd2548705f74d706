"""Each module measures one claim, beside peers and a limit: `python -m benchmarks.NAME` runs it."""
