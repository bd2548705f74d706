"""Logging of a job: a file for every rank, and the console for rank 0.

Modules log with `logging.getLogger(__name__)` and never print. Nothing is set up at import; the
training program calls `to_console` at its start and `to_file` once there is a run directory.
"""

from __future__ import annotations

import logging
import socket
import sys
from contextlib import suppress
from pathlib import Path

from hpc_train.errors import HpcTrainError, file_error, first_line, print_line

ROOT = "hpc_train"

logger = logging.getLogger(__name__)


class ConsoleHandler(logging.Handler):
    """Prints messages to standard output."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print one message."""
        # This looks up sys.stdout at each call, because a live display replaces it for a while.
        print_line(self.format(record))


class RankFileHandler(logging.FileHandler):
    """Writes messages to a file. A file that cannot be written does not end the run.

    There is one warning on the console. Lines that find no room come later, as far as the file's
    buffer keeps them.
    """

    warned = False

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  # overrides logging's
        """Warn once that the file cannot be written."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self.warned:
            self.warned = True
            text = "%s cannot be written (%s); the run goes on"
            logger.warning(text, self.baseFilename, error.strerror)

    def close(self) -> None:
        """Close the file. An error of the run must not be hidden by one of its log."""
        with suppress(OSError):
            super().close()


def to_console(rank: int) -> logging.Handler:
    """Show messages on standard output: all messages of rank 0, only errors of other ranks."""
    logger = logging.getLogger(ROOT)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    handler = ConsoleHandler(logging.INFO if rank == 0 else logging.ERROR)
    logger.addHandler(handler)
    return handler


def to_file(directory: Path, rank: int, size: int) -> logging.Handler:
    """Write this rank's messages to a file as well, with time, rank and host.

    The file of rank 0 is DIRECTORY/rank-000.log. A run that is resumed appends to its files.
    """
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"rank-{rank:03d}.log"
    # A path of bytes that are no text has characters that UTF-8 lacks.
    handler = RankFileHandler(path, encoding="utf-8", errors="backslashreplace")
    line = f"%(asctime)s [{rank}/{size} {socket.gethostname()}] %(levelname)s %(message)s"
    handler.setFormatter(logging.Formatter(line))
    logger = logging.getLogger(ROOT)
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    return handler


def error_to(handler: logging.Handler, error: BaseException) -> None:
    """Write an error to one handler only, with its traceback if it is no line for the user."""
    told = error if isinstance(error, HpcTrainError) else file_error(error)
    trace = None if told else (type(error), error, error.__traceback__)
    text = str(told or first_line(error))
    handler.handle(logging.LogRecord(ROOT, logging.ERROR, __file__, 0, text, None, trace))


def destination() -> str:
    """What a rank's messages go to at this moment, for a line that refers to them."""
    handlers = logging.getLogger(ROOT).handlers
    return "log" if any(isinstance(one, RankFileHandler) for one in handlers) else "output"


def stop(*handlers: logging.Handler) -> None:
    """Detach and close handlers."""
    for handler in handlers:
        logging.getLogger(ROOT).removeHandler(handler)
        handler.close()
