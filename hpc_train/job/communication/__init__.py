"""Times the collectives of a machine, for `hpc-train info collectives`.

trials.py    the operations, and who carries them out
timing.py    the measurement on the ranks of a job
budget.py    divides the time among the measurements
figures.py   what was measured: bandwidths, JSON, CSV
cores.py     whether the ranks have cores of their own
chart.py     the figures as a drawing
"""
