"""Compares what ranks and checkpoints have as their data set, by a few samples."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from typing import Any

from hpc_train.checkpoint.state import ExtraState
from hpc_train.data.fingerprint import Fingerprint, alike, fingerprint
from hpc_train.data.reader import Reader
from hpc_train.errors import UserError
from hpc_train.mpi.agreement import agreed, settle
from hpc_train.mpi.group import Group

logger = logging.getLogger(__name__)

DATA_SET = "data_set"


def compared(group: Group, reader: Reader, what: str, *, copied: bool = False) -> Fingerprint:
    """Check that all ranks have the same data set. Collective.

    Args:
        group: the ranks that compare.
        reader: reads the data set.
        what: names the data set, for the message.
        copied: as for `fingerprint`.

    Returns:
        The data set's fingerprint, the same on all ranks. It is empty if two reads of a sample
        differ. The reader warns of that.

    Raises:
        UserError: a rank's samples differ from those of rank 0.
    """
    look = partial(fingerprint, reader, copied=copied)
    with agreed(group):
        mine = look()
    first = group.from_first(lambda: mine)
    differs = not alike(mine, first)
    if not group.largest(int(differs)):
        return first
    with agreed(group):
        again = look()
    if group.largest(int(not alike(mine, again))):
        return []
    error = UserError(
        f"the samples of {what} differ from those of rank 0, though there are as many",
        "seed the split, or give all ranks the same data set",
    )
    settle(group, error if differs else None)
    return first


class SameData(ExtraState):
    """Saves the fingerprint of a loop's data set, and warns if a checkpoint has another one.

    Args:
        group: all ranks.
    """

    def __init__(self, group: Group) -> None:
        self.group = group
        self._reader: Reader | None = None
        self._copied = False
        self._now: Fingerprint = []

    def compare(self, reader: Reader, *, copied: bool) -> None:
        """Check that all ranks train on the same data set. Collective.

        Args:
            reader: reads the data set.
            copied: as for `fingerprint`.

        Raises:
            UserError: a rank's samples differ from those of rank 0.
        """
        self._reader, self._copied = reader, copied
        self._now = compared(self.group, reader, "the data set", copied=copied)

    def values(self) -> dict[str, Any]:
        """The fingerprint."""
        return {DATA_SET: self._now} if self._now else {}

    def take(self, values: Mapping[str, Any]) -> None:
        """Warn on rank 0 if the checkpoint's data set is another one."""
        saved = values.get(DATA_SET, [])
        if self.group.rank or self._reader is None or alike(saved, self._now):
            return
        if alike(self._now, fingerprint(self._reader, copied=self._copied)):
            logger.warning(
                "the data set gives other samples than when the checkpoint was made: if you have "
                "not changed it on purpose, seed its split, or give the same data set as before"
            )
