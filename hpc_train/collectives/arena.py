"""A few pieces of memory that the ranks of a node share, seen at many addresses.

A range of addresses belongs to a thing, such as the parameters of a block. Several ranges lie on
the same piece of memory, so only the things that are in use need memory. Yet each of them always
has the same addresses: tensors that refer to it stay right whenever it has its memory again. No
page is mapped, copied or zeroed when a piece changes hands.
"""

from __future__ import annotations

import mmap
import os
import secrets
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from hpc_train.collectives.node import check_room
from hpc_train.errors import SetupError
from hpc_train.mpi.agreement import agreed
from hpc_train.mpi.group import Group

SHARED_FOLDER = Path("/dev/shm")  # a file system in memory, on every Linux


class Arena:
    """Ranges of addresses on shared pieces of memory. Collective to make.

    Args:
        node: the ranks that share the memory.
        pieces: the sizes of the pieces, in bytes.
        ranges: for each range of addresses, the number of its piece and its size in bytes. Ranges
            with the same piece must not be used at the same time.

    Attributes:
        ranges: the ranges, as uint8 tensors of one dimension, aligned to pages.

    Raises:
        SetupError: there is too little shared memory, or the ranks cannot share it; raised on all
            ranks of the node.
    """

    def __init__(
        self, node: Group, pieces: Sequence[int], ranges: Sequence[tuple[int, int]]
    ) -> None:
        page = mmap.PAGESIZE
        begins = [0]
        for nbytes in pieces:
            begins.append(begins[-1] + max(page, -(-nbytes // page) * page))
        with agreed(node):
            if node.rank == 0:
                check_room(begins[-1])
        name = node.from_first(lambda: _make_file(begins[-1]))
        try:
            with agreed(node):
                file = _open(Path(name))
        finally:
            if node.rank == 0:
                Path(name).unlink(missing_ok=True)
        self.ranges = [_mapped(file, begins[piece], nbytes) for piece, nbytes in ranges]
        os.close(file)

    def close(self) -> None:
        """Release the ranges. The memory is freed when no tensor refers to it any more."""
        self.ranges = []


def _make_file(nbytes: int) -> str:
    path = SHARED_FOLDER / f"hpc_train-{os.getpid()}-{secrets.token_hex(4)}"
    try:
        file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        os.ftruncate(file, nbytes)
        os.close(file)
    except OSError as error:
        with suppress(OSError):
            path.unlink()
        raise SetupError(
            f"no shared memory can be made in {SHARED_FOLDER}: {error.strerror}",
            "mount a file system in memory there (in containers --shm-size)",
        ) from None
    return str(path)


def _open(path: Path) -> int:
    try:
        return os.open(path, os.O_RDWR)
    except OSError as error:
        raise SetupError(
            f"the ranks of a node do not see the same {SHARED_FOLDER}: {error.strerror}",
            "start all ranks of a node in one container, or share /dev/shm between containers",
        ) from None


def _mapped(file: int, begin: int, nbytes: int) -> Tensor:
    memory = mmap.mmap(file, max(1, nbytes), offset=begin)
    return torch.frombuffer(memory, dtype=torch.uint8)[:nbytes]
