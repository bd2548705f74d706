"""The portions of `hpc-train prepare`, which all ranks make together."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from hpc_train.data.prepare.partial import Dealing, Preparation
    from hpc_train.mpi.group import Group

WAIT_SECONDS = 0.05  # seconds between two looks of a rank that waits for the others


def share_portions(
    world: Group, preparation: Preparation[Any], work: Callable[[Dealing], None]
) -> None:
    """Work on all ranks until all portions of a preparation are made. Collective.

    Args:
        world: the ranks.
        preparation: the preparation.
        work: makes portions until this rank gets no more.

    Raises:
        HpcTrainError: a rank has failed; on all ranks.
    """
    from hpc_train.data.prepare.partial import Dealing
    from hpc_train.mpi.agreement import settle

    dealing = Dealing(preparation, world.rank, world.size)
    failure: Exception | None = None
    try:
        work(dealing)
    except Exception as error:  # noqa: BLE001  # all ranks raise it
        failure = error
    if world.comm is not None:
        everyone = world.comm.Ibarrier()
        with world.waiting("the portions of the other ranks"):
            while not everyone.Test():
                dealing.look()
                time.sleep(WAIT_SECONDS)
    settle(world, failure)
