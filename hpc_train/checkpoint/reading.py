"""Read a checkpoint in spite of a file system that fails for a moment.

What cannot be read now is not damaged: going back to an older checkpoint for it would lose work.
"""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from hpc_train import files
from hpc_train.errors import CheckpointUnreadable

T = TypeVar("T")
logger = logging.getLogger(__name__)

PAUSES = (0.5, 1.0, 2.0, 4.0, 8.0)  # seconds before each further attempt
LASTING = frozenset(  # a further attempt ends as the first one did
    {errno.ENOENT, errno.EACCES, errno.EPERM, errno.EISDIR, errno.ENOTDIR, errno.ELOOP}
)


def patiently(path: Path, work: Callable[[int], T]) -> T:
    """What `work` makes of a descriptor of a file, which is opened anew for each attempt.

    Args:
        path: the file, opened to be read.
        work: reads it; called again after an OSError that may pass, such as a stale handle.

    Raises:
        CheckpointUnreadable: the file cannot be read, after all attempts.
    """
    pauses = list(PAUSES)
    while True:
        try:
            with files.opened(path) as descriptor:
                return work(descriptor)
        except OSError as error:
            if error.errno in LASTING or not pauses:
                raise CheckpointUnreadable(
                    f"checkpoint {path} cannot be read ({error.strerror or error})",
                    "it need not be damaged: look after the file system, and start again",
                ) from error
            pause = pauses.pop(0)
            cause = error.strerror or error
            logger.warning("%s: %s; it is read again in %g s", path, cause, pause)
            time.sleep(pause)
