"""The runtime of a program that fits estimators, and never asks for one.

The first fit of a process starts it, and the end of the program shuts it down. Under a launcher
each rank runs the whole program, so a rank could end it while the others fit. Therefore each fit,
and the end of the program, begins with a meeting of all ranks.
"""

from __future__ import annotations

import atexit
import logging
import multiprocessing
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from types import TracebackType
from typing import Any

import torch
from torch import get_num_threads, set_num_threads

from hpc_train.data.generators import of_gpu, of_process
from hpc_train.errors import (
    EXIT_FAILURE,
    HpcTrainError,
    SetupError,
    Stopped,
    UserError,
    print_error,
)
from hpc_train.job.program import SAME_ERROR_PATIENCE
from hpc_train.mpi.agreement import agreed, all_arrive
from hpc_train.mpi.environment import read_launch
from hpc_train.mpi.group import Group
from hpc_train.mpi.runtime import Runtime, start_runtime
from hpc_train.mpi.watchdog import named
from hpc_train.tabular.fitted import BUILDING

logger = logging.getLogger(__name__)


class Session:
    """The runtime of this process, and its meetings.

    Args:
        runtime: from `start_runtime`.
    """

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self._meetings = runtime.world.duplicate()
        self._left = False
        atexit.register(self._end)

    def begin(self) -> None:
        """Meet the other ranks at the start of a fit. Collective.

        There is no limit to the wait, because nobody knows what programs do between their fits.

        Raises:
            UserError: some ranks have come to the end of the program; on all others.
        """
        if gone := self._met(leaving=False):
            error = UserError(
                f"{gone} came to the end of the program, but this rank to a fit",
                "let all ranks fit the same estimators in the same order",
            )
            error.agreed = True
            raise error

    def _met(self, *, leaving: bool) -> str:
        """The ranks that are leaving the program, with their hosts. Collective."""
        world = self.runtime.world
        found = self._meetings.gathered((leaving, world.host), "fit, or the end of the program")
        ranks = [rank for rank, (gone, _) in enumerate(found) if gone]
        if len(ranks) == world.size:
            return ""
        return named(ranks, [host for _, host in found]) if ranks else ""

    def _end(self) -> None:
        """Meet the other ranks at the end of the program, and shut the runtime down."""
        if self._left:
            return
        self._left = True
        if gone := self._met(leaving=True):
            print_error(f"{gone} ended the program before the others")
            return
        self._meetings.close()
        self.runtime.close()

    def fail(self, error: BaseException, told: str, tell: Callable[[], None]) -> None:
        """Tell the error by which this rank leaves the program, and end the job.

        An error that all ranks have is told once. If some of them do not leave, the job is aborted.

        Args:
            error: the error.
            told: all that would be told of it.
            tell: tells it.
        """
        self._left = True
        world = self.runtime.world
        together = isinstance(error, HpcTrainError) and error.agreed_by(world.size)
        if together and world.rank == 0:
            tell()
        if all_arrive(world, SAME_ERROR_PATIENCE):
            texts = [""] if together else world.gathered(told)
            if not together and (world.rank == 0 or told != texts[0]):
                tell()
        elif world.comm is not None:
            if not together:
                tell()
                print_error(
                    f"rank {world.rank} ({world.host}) left the program by "
                    f"{type(error).__name__}, and the others did not"
                )
            world.comm.Abort(error.exit_code if isinstance(error, HpcTrainError) else EXIT_FAILURE)


_current: list[Session] = []  # the session of this process, from its first fit on
_hooks: list[Callable[..., Any]] = []  # what told errors before `heed_errors`


@contextmanager
def fitting_runtime(given: Runtime | None, *, files: bool) -> Iterator[Runtime]:
    """The runtime for a fit. Collective. Threads of a process fit one after another.

    The random generators of the process, and the number of torch's threads, are afterwards as they
    were before. Gradients are on, and autocast is off.

    Args:
        given: the user's own; None: that of this process, which is started if it is not there.
        files: whether the fit writes to a run directory, and so heeds signals.

    Raises:
        SetupError: this process, or this thread, cannot take part in a fit.
        UserError: some ranks have come to the end of the program.
        SystemExit: a signal or the time limit stopped the fit, and no runtime was given: the exit
            code is 75, as that of all programs which stopped early with a checkpoint.
    """
    with BUILDING, _same_afterwards():
        if given is not None:
            with _own_gradients():
                yield given
            return
        session = _started(files=files)
        session.begin()
        try:
            with _own_gradients():
                yield session.runtime
        except Stopped as stopped:
            session.runtime.print(f"{stopped}; {stopped.remedy('the same program')}")
            raise SystemExit(stopped.exit_code) from None


@contextmanager
def _same_afterwards() -> Iterator[None]:
    """Leave the random generators and the number of torch's threads as they were."""
    before, threads = [(one, one.get()) for one in [*of_process(), *of_gpu()]], get_num_threads()
    try:
        yield
    finally:
        for one, state in before:
            one.put(state)
        set_num_threads(threads)


@contextmanager
def _own_gradients() -> Iterator[None]:
    """Train as if the program had switched nothing about gradients or number formats."""
    with ExitStack() as held:
        held.enter_context(torch.inference_mode(False))
        held.enter_context(torch.enable_grad())
        for device in ("cpu", "cuda"):
            held.enter_context(torch.autocast(device, enabled=False))
        yield


@contextmanager
def checking(world: Group) -> Iterator[None]:
    """Run a block that checks arguments; all ranks fail or none does. Collective.

    Raises:
        ValueError, TypeError: as the block, in a process alone.
        UserError: the same on all ranks, if there are several.
    """
    with agreed(world):
        try:
            yield
        except (ValueError, TypeError) as error:
            if world.comm is None:
                raise
            raise UserError(str(error)) from error


def heed_errors() -> None:
    """From now on, tell an error that ends the programs of all ranks once.

    What an estimator says of its arguments is then one line. In a process alone nothing changes.
    """
    launch = None
    with suppress(SetupError):
        launch = read_launch(os.environ)
    if not _hooks and launch is not None and launch.size != 1:
        _hooks.append(sys.excepthook)
        sys.excepthook = _failed


def _failed(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Tell the error that ends the program."""
    mistake = _mistake(error, trace)

    def tell() -> None:
        if mistake is None:
            _hooks[0](kind, error, trace)
        else:
            print_error(mistake)

    if _current:
        told = "".join(traceback.format_exception(kind, error, trace))
        _current[0].fail(error, str(mistake or told), tell)
    else:
        launch = read_launch(os.environ)
        if launch is not None and launch.rank > 0:
            # The launcher ends this rank if the first one has failed, too.
            time.sleep(SAME_ERROR_PATIENCE)
        tell()
    if mistake is not None:
        raise SystemExit(mistake.exit_code)  # Python heeds it here, too


def _mistake(error: BaseException, trace: TracebackType | None) -> HpcTrainError | None:
    """An error that is told in one line: the package's own, and what estimators refuse."""
    if isinstance(error, HpcTrainError):
        return error
    called = (frame.f_locals.get("self") for frame, _ in traceback.walk_tb(trace))
    kinds = [kind.__module__ for one in called for kind in type(one).__mro__]
    refused = isinstance(error, (ValueError, TypeError))
    return UserError(str(error)) if refused and f"{__package__}.base" in kinds else None


def _started(*, files: bool) -> Session:
    launch = read_launch(os.environ)
    several = launch is not None and launch.size != 1
    process = multiprocessing.current_process().name
    if several and process != "MainProcess":
        raise SetupError(
            f"fit was called in {process}, a process that a rank of the job has started",
            "give n_jobs=1: all ranks fit each model together",
        )
    if threading.current_thread() is not threading.main_thread() and (several or files):
        raise SetupError(
            "fit was called in a thread beside the main one, where "
            + ("ranks cannot meet" if several else "signals cannot be heeded"),
            "call it in the main thread, with n_jobs=1" if several else "leave out run_dir",
        )
    if not _current:
        heed_errors()
        _current.append(Session(start_runtime()))
    return _current[0]
