"""Runs a program on many ranks: starts MPI, prints errors as one line, agrees on the exit code."""

from __future__ import annotations

import faulthandler
import logging
import os
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import nullcontext, suppress

from hpc_train import log
from hpc_train.errors import (
    EXIT_FAILURE,
    HpcTrainError,
    Stopped,
    file_error,
    print_error,
    told_interrupted,
)
from hpc_train.host.process import seconds_since_begin
from hpc_train.job.exhausted import note_remedy
from hpc_train.job.preemption import signals_kept
from hpc_train.mpi import environment
from hpc_train.mpi.agreement import all_arrive
from hpc_train.mpi.group import Group
from hpc_train.mpi.runtime import Runtime, start_runtime

logger = logging.getLogger(__name__)

SAME_ERROR_PATIENCE = 3.0  # seconds in which the other ranks must meet the same error


def run(program: Callable[[Runtime], None], *, ask_scheduler: bool = True) -> int:
    """Run a program on all ranks of the job; every rank gets the same exit code.

    An error that the ranks have agreed on, or that all of them meet, is printed once, by rank 0.
    So is a file that the system refuses to this package, and not to the program's own code. Any
    other exception prints its traceback and ends the job, because the other ranks may wait for this
    one. All ranks must call.

    Args:
        program: the function that all ranks run; its argument is the runtime.
        ask_scheduler: ask for the job's end and for the user's other jobs, before MPI starts, and
            keep signals that ask the job to stop (`signals_kept`).

    Returns:
        0 finished, 75 stopped with a checkpoint, 2 the user's mistake, 130 interrupted by Ctrl-C,
        1 any other error.
    """
    faulthandler.enable()
    try:
        with signals_kept() if ask_scheduler else nullcontext():
            return _started(program, ask_scheduler=ask_scheduler)
    except KeyboardInterrupt:
        return told_interrupted()


def _started(program: Callable[[Runtime], None], *, ask_scheduler: bool) -> int:
    if (
        ask_scheduler
        and environment.launched_rank(os.environ) == 0
        and "mpi4py.MPI" not in sys.modules
    ):
        from hpc_train.job import deadline, jobs  # they load libraries that few programs need

        deadline.note_end()
        jobs.note_jobs()
    try:
        runtime = start_runtime()
    except HpcTrainError as error:  # no rank waits for another before MPI runs
        if environment.launched_rank(os.environ) == 0:
            print_error(error)
        return error.exit_code
    runtime.start_up.began = time.monotonic() - seconds_since_begin()
    handler = log.to_console(runtime.world.rank)
    try:
        return _run(program, runtime)
    finally:
        log.stop(handler)


def _run(program: Callable[[Runtime], None], runtime: Runtime) -> int:
    world = runtime.world
    code, failed = 0, True
    leaving: SystemExit | None = None
    try:
        leaving = _exit_of(program, runtime)
        runtime.end(failed=False)
        failed = False
    except Stopped as stopped:
        logger.info("%s; %s", stopped, stopped.remedy("the same command"))
        code = stopped.exit_code
    except HpcTrainError as error:
        code = error.exit_code
        if error.agreed_by(world.size) or all_arrive(world, SAME_ERROR_PATIENCE):
            if world.rank == 0:
                print_error(error)
        else:
            where = "" if error.agreed_ranks else f"rank {world.rank} ({world.host}): "
            print_error(type(error)(f"{where}{error.cause}", error.remedy))
            _abort(world, code)
    except BaseException as error:
        note_remedy(error)
        if world.comm is None:
            _end_failed(runtime)
            raise
        code = EXIT_FAILURE
        text = traceback.format_exc()
        if all_arrive(
            world, SAME_ERROR_PATIENCE
        ):  # the first rank's traceback, on the console, is enough
            logger.info(
                "all ranks failed; this is the traceback of rank %d (%s):\n%s",
                world.rank,
                world.host,
                text,
            )
        else:
            logger.error("rank %d (%s) failed:\n%s", world.rank, world.host, text)
            _abort(world, code)
    if failed:
        _end_failed(runtime)
    runtime.close()
    if leaving is not None and not code:
        raise leaving
    return code


def _exit_of(program: Callable[[Runtime], None], runtime: Runtime) -> SystemExit | None:
    """Run the program; returns the SystemExit by which all ranks have left it."""
    world = runtime.world
    try:
        program(runtime)
    except SystemExit as leaving:
        if not all_arrive(world, SAME_ERROR_PATIENCE):
            logger.error(
                "rank %d (%s) left the program by %r, but other ranks did not",
                world.rank,
                world.host,
                leaving,
            )
            _abort(world, EXIT_FAILURE)
        return leaving
    except OSError as error:
        if told := file_error(error):
            raise told from error
        raise
    return None


def _end_failed(runtime: Runtime) -> None:
    with suppress(HpcTrainError):  # the error that is being reported says more
        runtime.end(failed=True)


def _abort(world: Group, code: int) -> None:
    """End all ranks of the job."""
    if world.comm is not None:
        world.comm.Abort(code)
