"""MPI: the launchers' variables, the runtime, groups of ranks, and agreement among ranks."""
