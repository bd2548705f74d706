"""A rank: where it and the others are. Rank 0 prints of each its host and the ranks there."""

import socket

from mpi4py import MPI


def main() -> None:
    node = MPI.COMM_WORLD.Split_type(MPI.COMM_TYPE_SHARED)
    places = MPI.COMM_WORLD.gather((socket.gethostname(), node.size))
    if MPI.COMM_WORLD.rank == 0:
        print(places)


if __name__ == "__main__":
    main()
