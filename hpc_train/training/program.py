"""The frame around a program on many ranks: start, errors as one line, the same exit code."""

from __future__ import annotations

import faulthandler
import logging
import os
import traceback
from collections.abc import Callable

from hpc_train import log
from hpc_train.errors import EXIT_FAILURE, HpcTrainError, Stopped, print_error
from hpc_train.mpi import environment
from hpc_train.mpi.group import Group
from hpc_train.mpi.runtime import Runtime, start

logger = logging.getLogger(__name__)


def run(program: Callable[[Runtime], None]) -> int:
    """Run a program on all ranks of the job; every rank gets the same exit code.

    An error that the ranks have agreed on is printed once, by rank 0. Any other exception prints
    its traceback and ends the job at once, because the other ranks may wait for this one.

    Args:
        program: is given the runtime; all ranks run it.

    Returns:
        0 finished, 75 stopped with a checkpoint, 2 the user's mistake, 1 any other error.
    """
    faulthandler.enable()
    try:
        runtime = start()
    except HpcTrainError as error:  # before MPI runs nobody can wait: each rank ends by itself
        if _launched_rank() == 0:
            print_error(error)
        return error.exit_code
    handler = log.to_console(runtime.world.rank)
    try:
        return _run(program, runtime)
    finally:
        log.stop(handler)


def _run(program: Callable[[Runtime], None], runtime: Runtime) -> int:
    code = 0
    try:
        program(runtime)
    except Stopped as stopped:
        logger.info("%s; the same command goes on from there", stopped)
        code = stopped.exit_code
    except HpcTrainError as error:
        if not (error.agreed or runtime.world.comm is None):
            _abort(runtime.world, error)
        if runtime.world.rank == 0:
            print_error(error)
        code = error.exit_code
    except BaseException as error:
        if runtime.world.comm is None:
            raise
        _abort(runtime.world, error)
    runtime.close()
    return code


def _abort(world: Group, error: BaseException) -> None:
    """End all ranks of the job."""
    text = "".join(traceback.format_exception(error))
    logger.error("rank %d (%s) failed:\n%s", world.rank, world.host, text)
    if world.comm is not None:
        world.comm.Abort(getattr(error, "exit_code", EXIT_FAILURE))


def _launched_rank() -> int:
    try:
        launch = environment.read(os.environ)
    except HpcTrainError:
        return 0
    return launch.rank if launch else 0
