"""Start a process beside a rank. The server that has forked the rank forks it.

A rank cannot start it, as a process that uses MPI must not start others. The server uses no MPI.
"""

from __future__ import annotations

import select
import socket
import sys
from collections.abc import Mapping, Sequence

from hpc_train.warm import stand_in
from hpc_train.warm.meeting import Cold, is_open

FORK_PATIENCE = 10.0  # seconds to wait for the server's answer


def start_beside(
    program: Sequence[str],
    *,
    mask: set[int],
    numbers: Sequence[int],
    environ: Mapping[bytes, bytes],
) -> socket.socket:
    """Run a program as `python` does, in a process that the server forks.

    The process has this rank's directory, limits, processors and standard streams.

    Args:
        program: -m and a module, or a script, with arguments.
        mask: signals that are blocked in the process.
        numbers: descriptors that the process gets, under the same numbers.
        environ: the process's environment variables.

    Returns:
        A connection that can be read once the process has ended. When it closes, at the latest with
        this rank, the process is killed, and so are those that it has started.

    Raises:
        Cold: no server has forked this rank, or the server did not fork the process.
    """
    if not stand_in.forked_by:
        raise Cold("no server has forked this rank")
    server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        server.connect(f"{stand_in.forked_by}/socket")
        numbers = [*filter(is_open, (0, 1, 2)), *numbers]
        stand_in.hand_over(
            server, program, sys.path[0], mask=mask, numbers=numbers, environ=environ, beside=True
        )
        if not select.select([server], [], [], FORK_PATIENCE)[0]:
            raise Cold("the server does not answer")
        stand_in.started(server)
    except (Cold, OSError, ValueError) as error:
        server.close()
        raise Cold(str(error)) from None
    return server
