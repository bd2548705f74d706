"""Scaling studies: a series of short runs on more and more nodes, a model of their times, a page.

It runs on login nodes, without torch and MPI. `hpc-train scale` is its command line.
"""
