"""The life of a user's own loop: wherever the user leaves it, all ranks end it together."""

from __future__ import annotations

import logging
import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Self

from torch.utils.hooks import RemovableHandle

from hpc_train.checkpoint import Checkpoints
from hpc_train.errors import (
    OF_DATA,
    CheckpointError,
    ClaimError,
    DivergenceError,
    HpcTrainError,
    NotFiniteError,
    UserError,
)
from hpc_train.job.leaving import LeftBySome, leave_together
from hpc_train.models.gate import Gate
from hpc_train.mpi.group import Group
from hpc_train.mpi.runtime import Runtime
from hpc_train.mpi.watchdog import Watchdog
from hpc_train.training.options import LoopOptions

logger = logging.getLogger(__name__)

UNSAVED = (CheckpointError, DivergenceError, NotFiniteError)
"""Errors of a save, which all ranks raise."""


def raise_at_end(error: Exception, failed: bool) -> None:
    """Raise an error at the end of the program unless that has failed: for `Runtime.at_end`."""
    if not failed:
        raise error


class LoopLife:
    """Ends a loop that was left, at the next call that all ranks make.

    A loop runs while `_running` is the generator of `epochs`. The program may leave it by `break`,
    or by an error, perhaps on this rank alone. No other rank can know this. So it is only noted
    (`_is_left`), and the loop ends where all ranks come: in the next call of this loop, where
    another loop is made, or at the end of the program. A loop may also lose its parameters to
    another one (`_is_replaced`). After `close` it can do nothing more (`_closed`).

    Args:
        runtime: the runtime of the job.
        options: the loop's options.
    """

    checkpoints: Checkpoints

    def __init__(self, runtime: Runtime, options: LoopOptions) -> None:
        self.group: Group = runtime.world
        self._runtime, self.options = runtime, options
        self._running: Generator[tuple[int, Iterator[Any]]] | None = None
        self._is_left = False  # it was left on this rank, and has not ended
        self._to_close = False  # an error has left the `with` block, perhaps on this rank alone
        self._is_over = False  # all ranks know that some of them have left it
        self._is_replaced = False  # another loop averages the optimizer's gradients now
        self._failed = False  # the program has failed, so no last checkpoint is written
        self._raised = False  # an error, not sys.exit(), has left the `with` block on this rank
        self._closed = False
        self._leaves_block = False  # all ranks leave the `with` block, perhaps by an error
        self._hooks: list[RemovableHandle | Gate] = []
        self._watchdog: Watchdog | None = None

    def close(self) -> None:
        """Release what the loop holds. Collective."""
        raise NotImplementedError

    def _close(self) -> None:
        """Do what `close` does, once. Collective."""
        if self._closed:
            return
        self._closed = True
        try:
            with self._watched():
                try:
                    self._end()
                except LeftBySome:
                    # Ranks that were in the loop leave the block by this error, and release, too.
                    if self._leaves_block:
                        self._failed = True
                        self._release()
                    raise
                self._release()
        except BaseException:
            self._stop_watchdog()
            raise
        if self._watchdog is not None:
            self._watchdog.close()
        self._forget_watchdog()

    def _release(self) -> None:
        """Release what the loop holds, after its end. Collective."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> None:
        self._raised |= not isinstance(error, SystemExit | None)
        if leave_together(self.group, error):
            self._leaves_block = True
            self._failed |= isinstance(error, HpcTrainError) and not isinstance(error, OF_DATA)
            try:
                self.close()
            except UNSAVED as unsaved:
                if not self._raised:
                    raise
                logger.warning("%s", unsaved)  # the error that has left the block says more
            return
        # The other ranks may not come here. All come where the next loop is made.
        self._is_left = self._to_close = True
        if self._at_end not in self._runtime.at_end:
            self._runtime.at_end.append(self._at_end)

    @staticmethod
    def end_left_loops(runtime: Runtime) -> None:
        """End the loops of a job that were left, as the end of the program would. Collective."""
        for function in [*runtime.at_end]:
            other = getattr(function, "__self__", None)
            if isinstance(other, LoopLife) and other._is_left:
                to_close = other._to_close
                try:
                    other._end_left()
                except ClaimError as error:  # of all ranks: its directory is another loop's
                    logger.warning("%s", error)
                except UNSAVED as error:  # of all ranks
                    where = other.checkpoints.directory
                    error.cause = (
                        f"the end of an earlier loop, in {where}, is not saved: {error.cause}"
                    )
                    if not to_close:
                        raise
                    logger.warning("%s", error)  # the program knows that this loop has failed

    def _end_left(self) -> None:
        """End a loop that was left, and close it if an error has left its block. Collective."""
        with suppress(ValueError):
            self._runtime.at_end.remove(self._at_end)
        if not self._to_close:
            self._end()
            return
        with self:  # after an error of all ranks, the others close it in their own block's end
            self._end()
            self._failed = True  # so nothing is gathered: the ranks may be in different layers

    def _settle(self) -> None:
        """End a loop that was left before this call. Collective."""
        if self._is_left:
            self._end()

    def _end(self) -> None:
        """End a loop that was left. Collective."""
        running, self._running, self._is_left = self._running, None, False
        if running is not None:
            running.close()

    @contextmanager
    def _until_end(self) -> Iterator[None]:
        """Let the end of the program end this loop if the user has left it open."""
        self._is_over = False
        self._runtime.at_end.append(self._at_end)
        try:
            yield
        finally:
            if self._at_end in self._runtime.at_end:
                self._runtime.at_end.remove(self._at_end)

    def _at_end(self, failed: bool) -> None:
        """End the loop with the program, and save the last step unless that failed. Collective."""
        self._failed = failed
        if failed:
            self._end()
        else:
            self._end_left()

    def _dropped(self, running: object) -> None:
        """End the loop when nobody refers to the iterator from `epochs` any more.

        The loop is over or was left, perhaps by an exception on this rank alone. So a job of
        several ranks ends it later, where all ranks meet: in the next call of this loop, or at the
        end of the program.
        """
        if running is not self._running:
            return  # `epochs` was called again since then
        if self.group.comm is not None or sys.is_finalizing():
            self._is_left = True
            return
        try:
            self._end()
        except Exception as error:  # noqa: BLE001  # __del__ calls this, and cannot raise
            logger.error("%s", error)
            self._runtime.at_end.append(partial(raise_at_end, error))

    def _unhook(self) -> None:
        """Remove the hooks and gates, because the averager is closed."""
        self._is_replaced = True
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _check_open(self) -> None:
        """Refuse a call after `close`."""
        if self._closed:
            raise UserError("the loop is closed", "make another loop, or close this one later")

    def _check_not_replaced(self) -> None:
        """Refuse a step once another loop has taken the parameters."""
        if self._is_replaced:
            raise UserError(
                "another loop was made for this one's parameters, and averages their gradients",
                "iterate over the loop that was made last, or close this one before you make it",
            )

    def _start_watchdog(self) -> None:
        """Start a watchdog over waits inside `_watched`. It runs until `close`. Collective."""
        if self.group.size > 1 and self.options.hang_timeout > 0:
            self._watchdog = Watchdog(self.group, self.options.hang_timeout)
            self._watchdog.armed = False
            self._watchdog.start()
            self._runtime.at_end.append(self._stop_watchdog)

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """End the job with an error if a wait for a rank in this block is too long."""
        watchdog = self._watchdog  # the block may stop and forget it
        if watchdog is None:
            yield
            return
        before, watchdog.armed = watchdog.armed, True
        try:
            yield
        finally:
            watchdog.armed = before

    def _stop_watchdog(self, failed: bool = False) -> None:
        """Stop the watchdog on this rank alone."""
        if self._watchdog is not None:
            self._watchdog.stop()
        self._forget_watchdog()

    def _forget_watchdog(self) -> None:
        """Drop a watchdog that has been stopped or closed."""
        self._watchdog = None
        with suppress(ValueError):
            self._runtime.at_end.remove(self._stop_watchdog)
