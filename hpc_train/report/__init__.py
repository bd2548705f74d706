"""Reports on runs: one HTML file from what they have written, without torch and MPI.

`metrics.py` reads metrics.jsonl and keeps a bounded number of values, `story.py` reads what
happened to a run, `layout.py` its ranks, `options.py` its configuration. `sources.py` gathers all
of that for one run directory, and `page.py` makes the page from it.
"""
