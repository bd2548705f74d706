# The tests of hpc_train/mpi. Not tests/mpi: pytest-mpi takes that name for its marker.
