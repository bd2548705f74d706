"""Damages checkpoints at random: each is refused by name, unless nothing has changed.

    python -m tests.system.checkpoint.corruption --count 100000 --seed 0

Some have a header that somebody made up, with hashes that fit it: those may be read, if that makes
sense, but must not crash the reader or make it ask for much memory. Prints how many of each kind
there were, and how many of them were refused.
"""

from __future__ import annotations

import argparse
import resource
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path
from random import Random

import torch
from torch import Tensor

from hpc_train.checkpoint import fileformat
from hpc_train.checkpoint.fileformat import Entry, FileMap, LocalTensor
from hpc_train.checkpoint.restore import CheckpointReader, Tensors
from hpc_train.errors import CheckpointError, CheckpointMismatch
from hpc_train.mpi.group import Group
from tests.checkpoint.states import SMALL, save_tensors
from tests.damages import Damage, append, cut_off, flip, noise, swap, zero

SPARE = 256 << 20  # bytes of memory that damaged files may make a reader ask for
NUMBERS = (-1, 0, 1, 7, 1 << 31, 1 << 40, (1 << 63) - 1, 1 << 64, 1.5, "1", None, [], True)


def forge(data: bytearray, random: Random) -> bytes:
    """A header that says something else, with the hashes that belong to it."""
    length = int.from_bytes(data[:8], "little")
    layout, table_hash = fileformat.parse_header(bytes(data[8 : 8 + length]), len(data))
    entries = list(layout.entries)
    for _ in range(random.randint(1, 3)):
        number = random.randrange(len(entries))
        entries[number] = forged(entries[number], random)
    if random.random() < 0.2:
        random.shuffle(entries)
    made = FileMap(tuple(entries), layout.data_start, fileformat._description(entries))
    head = fileformat._header(made, table_hash)
    return len(head).to_bytes(8, "little") + head + data[8 + length :]


def forged(entry: Entry, random: Random) -> Entry:
    """With one thing changed."""
    number = random.choice(NUMBERS)
    return random.choice(
        [
            replace(entry, shape=(number,)),
            replace(entry, shape=(number, *entry.shape)),
            replace(entry, begin=number),
            replace(entry, end=number),
            replace(entry, dtype=random.choice([*fileformat.DTYPE_BYTES, "F8", "", number])),
            replace(entry, name=random.choice(["", "a", fileformat.STATE, fileformat.HASHES])),
        ]
    )


DAMAGES: tuple[Damage, ...] = (flip, flip, flip, cut_off, append, zero, swap, noise, forge)


def state_of(random: Random) -> dict[str, Tensor]:
    """Tensors of several types."""
    generator = torch.Generator().manual_seed(random.randrange(1 << 30))
    return {
        "a": torch.randn(40, 16, generator=generator),
        "b": torch.randn(33, generator=generator).bfloat16(),
        "c.flags": torch.randn(50, generator=generator) > 0,
        "empty": torch.zeros(0, 3),
        "scalar": torch.randn((), generator=generator, dtype=torch.float64),
    }


def refused(path: Path) -> bool:
    """Whether a file is refused as a user would be told, and by nothing else than that."""
    try:
        found = Tensors(path)
        for name in found.names:
            found[name]
        found.state()
    except (CheckpointError, CheckpointMismatch) as error:
        assert str(path) in str(error)
        return True
    return False


def damage_many(folder: Path, count: int, seed: int) -> dict[str, Counter[bool]]:
    """Damage so many files; how many of each kind were refused."""
    random = Random(seed)
    named, path = state_of(random), folder / "c.safetensors"
    save_tensors(
        path, {n: LocalTensor.whole(tensor) for n, tensor in named.items()}, b'{"step":1}', Group()
    )
    sound = path.read_bytes()
    assert not refused(path)
    assert CheckpointReader.open(path).layout.extents > 2
    found: dict[str, Counter[bool]] = {damage.__name__: Counter() for damage in DAMAGES}
    for _ in range(count):
        damage = random.choice(DAMAGES)
        content = bytes(damage(bytearray(sound), random))
        path.write_bytes(content)
        is_refused = refused(path)
        assert is_refused or content == sound or damage is forge, f"{damage.__name__}: not noticed"
        found[damage.__name__][is_refused] += 1
    return found


def main() -> None:
    """Damage and count."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    vars(fileformat).update(SMALL)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + SPARE, used + SPARE))
    with tempfile.TemporaryDirectory() as folder:
        found = damage_many(Path(folder), options.count, options.seed)
    for name, counts in found.items():
        print(f"{name}: {counts[True]} refused, {counts[False]} harmless")
    print(sum(counts.total() for counts in found.values()), "in all")


if __name__ == "__main__":
    main()
