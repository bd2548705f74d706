"""Damage to the bytes of a file, most of it random."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random

Damage = Callable[[bytearray, Random], bytes | bytearray]


def flip_bit(path: Path, place: int) -> None:
    """The lowest bit of the byte at a place of a file."""
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def flip(data: bytearray, random: Random) -> bytearray:
    """Some bits."""
    for _ in range(random.choice([1, 1, 1, 2, 8])):
        data[random.randrange(len(data))] ^= 1 << random.randrange(8)
    return data


def cut_off(data: bytearray, random: Random) -> bytearray:
    """The end is missing."""
    return data[: random.randrange(len(data))]


def append(data: bytearray, random: Random) -> bytearray:
    """There is more than was written."""
    return data + random.randbytes(random.randint(1, 5000))


def block(data: bytearray, random: Random) -> slice:
    """Some bytes of the file, often at a sector's begin."""
    size = min(random.choice([1, 16, 512, 1024, 4096]), len(data))
    begin = random.randrange(len(data) - size + 1)
    begin -= begin % size if random.random() < 0.7 else 0
    return slice(begin, begin + size)


def zero(data: bytearray, random: Random) -> bytearray:
    """A hole."""
    where = block(data, random)
    data[where] = bytes(where.stop - where.start)
    return data


def swap(data: bytearray, random: Random) -> bytearray:
    """Two blocks have changed places, or one has been written twice."""
    one = block(data, random)
    size = one.stop - one.start
    begin = random.randrange(0, len(data) - size + 1)
    other = slice(begin, begin + size)
    first, second = data[one], data[other]
    data[other] = first
    if random.random() < 0.5:
        data[one] = second
    return data


def noise(data: bytearray, random: Random) -> bytearray:
    """A block of something else."""
    where = block(data, random)
    data[where] = random.randbytes(where.stop - where.start)
    return data
