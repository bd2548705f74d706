"""Reports on runs: one HTML file from what they have written, without torch and MPI.

metrics.py     reads metrics.jsonl, and keeps a bounded number of values
decimation.py  keeps curves of any length in bounded memory
story.py       reads what happened to a run
layout.py      reads where its ranks were
options.py     reads its configuration
phases.py      how the time of a step is divided
sources.py     gathers all of that for one run directory
curves.py      the curves that a page draws
comparison.py  compares several runs, or the tasks of a sweep
page.py        makes the page
serve.py       shows the page of a running job
"""
