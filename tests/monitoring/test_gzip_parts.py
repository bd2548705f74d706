"""A gzip file that ranks make together."""

from __future__ import annotations

import errno
import gzip
import os
import subprocess
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_train import files
from hpc_train.monitoring.gzip_parts import joined_crc, write_parts
from hpc_train.mpi.group import Group


@given(st.binary(), st.binary())
def test_the_checksum_of_two_parts_is_that_of_both_together(first, second):
    joined = joined_crc(zlib.crc32(first), zlib.crc32(second), len(second))
    assert joined == zlib.crc32(first + second)


@given(st.integers(0, 100_000))
def test_parts_may_be_long(size):
    zeros = bytes(size)
    assert joined_crc(zlib.crc32(b"begin"), zlib.crc32(zeros), size) == zlib.crc32(b"begin" + zeros)


def part(rank):
    return b"" if rank == 1 else os.urandom(1000 * rank) + f"rank {rank}\n".encode() * 5000 * rank


@pytest.mark.ranks(1, 2, 4)
def test_the_file_has_the_parts_in_the_order_of_ranks(group, together):
    path, mine = together / "folder/parts.gz", part(group.rank)
    failure = write_parts(group, path, lambda: mine, b"begin,", b",end")
    every = group.gathered(mine)
    assert failure is None
    if group.rank == 0:
        expected = b"begin," + b"".join(every) + b",end"
        assert gzip.decompress(path.read_bytes()) == expected
        one_member = zlib.decompressobj(wbits=31)
        assert one_member.decompress(path.read_bytes()) == expected, "one member, for all readers"
        assert one_member.eof
        assert not one_member.unused_data
        subprocess.run(["gzip", "-t", path], check=True)
        assert [found.name for found in path.parent.iterdir()] == ["parts.gz"]


@pytest.mark.ranks(1, 4)
@pytest.mark.parametrize("number", [0, 1, 3])
def test_a_full_disk_is_told_and_no_rank_waits(group, together, monkeypatch, number):
    left = [number]

    def full(name, function, *arguments):
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return function(*arguments)

    monkeypatch.setattr(files, "call", full)
    failure = write_parts(group, together / "parts.gz", lambda: b"mine", b"begin", b"end")
    if group.rank == 0:
        assert failure.errno == errno.ENOSPC
        assert list(together.iterdir()) == []
    else:
        assert failure is None


@pytest.mark.ranks(4)
def test_a_rank_without_a_part_is_told_and_no_rank_waits(group, together):
    def make():
        if group.rank == 2:
            raise MemoryError("no memory for the part")
        return f"{group.rank}".encode()

    failure = write_parts(group, together / "parts.gz", make, b"<", b">")
    assert isinstance(failure, MemoryError) == (group.rank == 2)
    group.barrier()
    assert gzip.decompress((together / "parts.gz").read_bytes()) == b"<013>"


def test_a_folder_that_cannot_be_made_is_told(tmp_path):
    (tmp_path / "file").touch()
    failure = write_parts(Group(), tmp_path / "file/parts.gz", bytes, b"", b"")
    assert isinstance(failure, OSError)
