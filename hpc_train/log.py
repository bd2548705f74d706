"""Logging that knows its rank: a file for every rank, the console for rank 0.

Modules log with `logging.getLogger(__name__)` and never print. Nothing is set up at import; the
training program calls `to_console` at its start and `to_file` once there is a run directory.
"""

from __future__ import annotations

import logging
import socket
from pathlib import Path

ROOT = "hpc_train"


class ConsoleHandler(logging.Handler):
    """Prints to whatever standard output is at the time: a live display redirects it."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print one message."""
        print(self.format(record), flush=True)


def to_console(rank: int) -> logging.Handler:
    """Show messages on standard output: all of rank 0's, of other ranks only errors."""
    logger = logging.getLogger(ROOT)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    handler = ConsoleHandler(logging.INFO if rank == 0 else logging.ERROR)
    logger.addHandler(handler)
    return handler


def to_file(directory: Path, rank: int, size: int) -> logging.Handler:
    """Write this rank's messages to DIRECTORY/rank-000.log as well, with time, rank and host.

    A run that goes on appends to its files.
    """
    directory.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(directory / f"rank-{rank:03d}.log")
    line = f"%(asctime)s [{rank}/{size} {socket.gethostname()}] %(levelname)s %(message)s"
    handler.setFormatter(logging.Formatter(line))
    logger = logging.getLogger(ROOT)
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    return handler


def stop(*handlers: logging.Handler) -> None:
    """Detach and close handlers."""
    for handler in handlers:
        logging.getLogger(ROOT).removeHandler(handler)
        handler.close()
