"""Calls to the file system that fail, that end the process, or that are written down."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from hpc_train import files

Call = Callable[..., Any]
ERRORS = {"create": errno.EACCES, "reserve": errno.ENOSPC, "write": errno.ENOSPC}


class Faults:
    """Counts calls; the one with the number `at` does something else than it should.

    Args:
        fault: given the call's name, function and arguments.
        at: counted from 0; -1: none.
    """

    def __init__(self, fault: Call, at: int) -> None:
        self.fault, self.at = fault, at
        self.names: list[str] = []

    def __call__(self, name: str, function: Call, *arguments: Any) -> Any:
        self.names.append(name)
        if len(self.names) == self.at + 1:
            return self.fault(name, function, *arguments)
        return function(*arguments)


def fail(name: str, function: Call, *arguments: Any) -> None:
    """As a full or a broken disk does."""
    number = ERRORS.get(name.removeprefix("mpi_"), errno.EIO)
    raise OSError(number, os.strerror(number))


def fail_late(name: str, function: Call, *arguments: Any) -> None:
    """What was asked for is done, and reported as failed: close and sync on a network do so."""
    function(*arguments)
    fail(name, function)


def write_less(name: str, function: Call, *arguments: Any) -> Any:
    """Write only a part; other calls as they are."""
    if name == "write":
        descriptor, data, offset = arguments
        return function(descriptor, data[: max(1, len(data) // 2)], offset)
    if name == "mpi_write":
        offset, (data, kind), status = arguments
        return function(offset, [memoryview(data)[: len(data) // 2], kind], status)
    return function(*arguments)


def write_nothing(name: str, function: Call, *arguments: Any) -> Any:
    """Report that all was written, as OMPIO does on a full disk; other calls as they are."""
    if name == "write":
        return len(arguments[1])
    if name == "mpi_write":
        _, (data, kind), status = arguments
        return status.Set_elements(kind, len(data))
    return function(*arguments)


def kill(name: str, function: Call, *arguments: Any) -> None:
    """End this process without warning."""
    os.kill(os.getpid(), signal.SIGKILL)


@contextmanager
def faults(fault: Call = fail, at: int = -1) -> Iterator[Faults]:
    """Let a call of the block go wrong."""
    made = Faults(fault, at)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "call", made)
        yield made
