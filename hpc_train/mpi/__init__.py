"""MPI: launchers' variables, the runtime with its group of ranks, agreement among ranks."""
