"""Damages shards and manifests at random: each damage is told, or the samples are the right ones.

    python -m tests.data.corruption --count 20000 --seed 0

A damaged manifest is `sealed` in some cases: it has the hash of what it says. It may then be read,
but all samples must be sound ones. For each kind of damage the program prints its number, and the
number that was told.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from hpc_train.data.check import check_shards, damage, every_shard
from hpc_train.data.manifest import (
    FILE_NAME,
    HASHED_BYTES,
    Manifest,
    Shard,
    hash_of_manifest,
    read_manifest,
)
from hpc_train.data.shard_files import ShardFiles
from hpc_train.data.shards import TokenDataset
from hpc_train.data.substitutes import Substituted
from hpc_train.data.write import write_shard
from hpc_train.errors import DataError
from tests.damages import append, cut_off, flip, noise, swap, zero

VOCAB = 50_000
SEQUENCE = 500
TOKENS = 2 * HASHED_BYTES  # bytes of a shard's tokens, about
KEYS = re.compile(
    r"\b(format|vocab|dtype|tokenizer|documents|splits?|name|file_bytes|tokens|(\w+_)?offset|hash|"
    r"keys?|shards?)\b"
)
PLACE = re.compile(r"line \d+ column \d+|position \d+|nested too deeply|limit \(\d+ digits\)")
BLOCK = re.compile(r"block (\d+) of its dataset (\w+)")
USED = ("tokens", "documents", "hashes")  # the datasets of a shard
SEALED_SHARE = 0.4  # of the manifests


def sealed(tree: Any) -> str:
    """The text of a manifest's file, with the hash of what the tree says."""
    if isinstance(tree, dict):
        tree = {**tree, "hash": hash_of_manifest(tree)}
    return json.dumps(tree)


class Folder:
    """A data folder of several shards, and what is in it.

    Args:
        directory: an empty folder.
        random: makes the tokens.
    """

    def __init__(self, directory: Path, random: Random) -> None:
        self.directory = directory
        generator = np.random.default_rng(random.randrange(1 << 30))
        self.others: list[bytes] = []  # shards that are none of the folder's
        splits: dict[str, list[Shard]] = {"train": [], "validation": []}
        self.rows: dict[str, np.ndarray] = {}
        # Two of equal sizes, so that nothing but hashes tells one from the other.
        sizes = {"train": (TOKENS, TOKENS, TOKENS // 3), "validation": (TOKENS // 8,)}
        for split, some in sizes.items():
            rows = []
            for number, size in enumerate(some):
                tokens = generator.integers(0, VOCAB, size // 2 + 7777, np.uint16)
                begins = np.arange(0, len(tokens), 5)
                name = f"{split}-{number}.h5"
                splits[split].append(write_shard(directory / name, tokens, begins))
                last = len(tokens) - SEQUENCE
                rows += [tokens[at : at + SEQUENCE + 1] for at in range(0, last, SEQUENCE)]
                for kind in ("uint32", "uint8"):
                    other = directory / "other"
                    write_shard(other, tokens.astype(kind), begins)
                    self.others.append(other.read_bytes())
                    other.unlink()
            self.rows[split] = np.stack(rows).astype(np.int64)
        self.manifest = Manifest(
            vocab=VOCAB,
            dtype="uint16",
            tokenizer="bytes",
            documents=sum(shard.documents for some in splits.values() for shard in some),
            splits={split: (*some,) for split, some in splits.items()},
        )
        (directory / FILE_NAME).write_text(self.manifest.to_json())
        self.sound = {path.name: path.read_bytes() for path in directory.iterdir()}
        self.known = {row.tobytes() for rows in self.rows.values() for row in rows}

    def samples(self, manifest: Manifest, split: str, damaged: Any = "raise") -> tuple[Any, Any]:
        """All samples of a split, with the token behind each, and the batch that they are from."""
        dataset = TokenDataset(self.directory, manifest, split, SEQUENCE, damaged=damaged)
        try:
            batch = dataset.fetch(np.arange(len(dataset)))
        finally:
            dataset.close()
        return np.concatenate([batch[0].numpy(), batch[1].numpy()[:, -1:]], axis=1), batch

    def read_documents(self, split: str, number: int) -> None:
        """Read the positions of a shard's documents."""
        shard = self.manifest.splits[split][number]
        memory = memoryview(bytearray(8 * shard.documents))
        shards = ShardFiles(self.directory, self.manifest, split)
        try:
            shards.read(np.array([number]), np.array([0]), len(memory), [[memory]], "documents")
        finally:
            shards.close()


Corruption = Callable[[Folder, Shard, bytearray, Random], "bytes | bytearray | None"]


def extent_of(shard: Shard, name: str) -> slice:
    """The bytes of one of a shard's datasets in its file."""
    begin, nbytes = shard.extents("uint16")[name]
    return slice(begin, begin + nbytes)


def flip_used(folder: Folder, shard: Shard, data: bytearray, random: Random) -> bytearray:
    """A bit of one of the datasets, or of the bytes before them."""
    name = random.choice(["tokens", "documents", "hashes", "before"])
    extent = extent_of(shard, name) if name != "before" else slice(0, shard.offset)
    data[random.randrange(extent.start, extent.stop)] ^= 1 << random.randrange(8)
    return data


def swap_blocks(folder: Folder, shard: Shard, data: bytearray, random: Random) -> bytearray:
    """Two whole blocks of a dataset have changed places."""
    begin = extent_of(shard, random.choice(["tokens", "documents"])).start
    one, other = (begin + random.randrange(2) * HASHED_BYTES for _ in range(2))
    first, second = slice(one, one + HASHED_BYTES), slice(other, other + HASHED_BYTES)
    data[first], data[second] = data[second], data[first]
    return data[: shard.file_bytes]


def zero_range(folder: Folder, shard: Shard, data: bytearray, random: Random) -> bytearray:
    """A hole of any length."""
    begin = random.randrange(len(data))
    end = random.randint(begin, len(data))
    data[begin:end] = bytes(end - begin)
    return data


def another(folder: Folder, shard: Shard, data: bytearray, random: Random) -> bytes:
    """Another shard of the folder."""
    names = [one.name for one in every_shard(folder.manifest)]
    return folder.sound[random.choice(names)]


def another_type(folder: Folder, shard: Shard, data: bytearray, random: Random) -> bytes:
    """A shard with tokens of another type."""
    return random.choice(folder.others)


def empty(folder: Folder, shard: Shard, data: bytearray, random: Random) -> bytes:
    """A file without bytes."""
    return b""


def missing(folder: Folder, shard: Shard, data: bytearray, random: Random) -> None:
    """No file."""


OF_SHARDS: tuple[Corruption, ...] = (
    flip_used, flip_used, flip_used, swap_blocks, zero_range, another, another_type, empty, missing,
)  # fmt: skip
OF_BYTES = (flip, cut_off, append, zero, swap, noise)


def check_shard_told(folder: Folder, random: Random) -> tuple[str, bool]:
    """Damage a shard. Returns the kind of damage, and whether it was told."""
    split = random.choice(["train", "train", "train", "validation"])
    number = random.randrange(len(folder.manifest.splits[split]))
    shard = folder.manifest.splits[split][number]
    sound, path = folder.sound[shard.name], folder.directory / shard.name
    if random.random() < len(OF_BYTES) / (len(OF_BYTES) + len(OF_SHARDS)):
        kind = random.choice(OF_BYTES).__name__
        damaged = next(one for one in OF_BYTES if one.__name__ == kind)(bytearray(sound), random)
    else:
        made = random.choice(OF_SHARDS)
        kind, damaged = made.__name__, made(folder, shard, bytearray(sound), random)
    path.unlink()
    if damaged is not None:
        path.write_bytes(damaged)
    try:
        told = judge_shard(folder, split, number, damaged, random)
    finally:
        path.unlink(missing_ok=True)
        path.write_bytes(sound)
    return kind, told


def judge_shard(
    folder: Folder, split: str, number: int, damaged: bytes | bytearray | None, random: Random
) -> bool:
    """Check what is told of a damaged shard; returns whether anything is."""
    shard = folder.manifest.splits[split][number]
    sound, extents = folder.sound[shard.name], {name: extent_of(shard, name) for name in USED}
    wrong = {n: damaged is None or sound[e] != damaged[e] for n, e in extents.items()}
    causes = causes_of(folder, split, number)
    for cause in filter(None, causes.values()):
        assert f"shard {folder.directory / shard.name} " in f"{cause} ", cause
    for what, cause in causes.items():
        needs = USED if what == "damage" else (what, "hashes")
        assert cause is not None or not any(wrong[name] for name in needs), what
    begin = min(extent.start for extent in extents.values())
    if damaged is None or len(damaged) != len(sound):
        assert all(causes.values()), causes
    elif damaged[:begin] == sound[:begin]:
        check_place(shard, sound, damaged, wrong, causes)
    if random.random() < 0.1:
        judge_substitutes(folder, split)
    return causes["damage"] is not None


def causes_of(folder: Folder, split: str, number: int) -> dict[str, str | None]:
    """What `damage` and the readers of tokens and documents say; None: they find all sound."""
    shard = folder.manifest.splits[split][number]
    path, dtype = folder.directory / shard.name, folder.manifest.dtype
    causes: dict[str, str | None] = dict.fromkeys(["tokens", "documents"])
    try:
        found = folder.samples(folder.manifest, split)[0]
        assert (found == folder.rows[split]).all(), "samples are wrong, and nobody says so"
    except DataError as error:
        causes["tokens"] = error.cause
    try:
        folder.read_documents(split, number)
    except DataError as error:
        causes["documents"] = error.cause
    return {"damage": damage(path, shard, dtype), **causes}


def check_place(
    shard: Shard,
    sound: bytes,
    damaged: bytes | bytearray,
    wrong: dict[str, bool],
    causes: dict[str, str | None],
) -> None:
    """Check that a damage behind a sound header is told with its dataset and a block of it."""
    for what, cause in causes.items():
        if wrong["hashes"]:
            assert "its dataset hashes" in cause
        elif cause is not None:
            (place,) = BLOCK.findall(cause)
            block, dataset = int(place[0]), place[1]
            assert what in (dataset, "damage")
            extent = extent_of(shard, dataset)
            begin = extent.start + block * HASHED_BYTES
            part = slice(begin, min(begin + HASHED_BYTES, extent.stop))
            assert sound[part] != damaged[part], cause


def judge_substitutes(folder: Folder, split: str) -> None:
    """Check that all samples are sound ones, and that those in place of others are told."""
    try:
        found, batch = folder.samples(folder.manifest, split, "substitute")
    except DataError as error:
        assert "could stand in" in error.cause
        return
    pairs = dict(batch.pairs if isinstance(batch, Substituted) else ())
    numbers = [pairs.get(number, number) for number in range(len(found))]
    assert (found == folder.rows[split][numbers]).all()


NUMBERS = (-1, 0, 1, 7, 1 << 31, 1 << 62, (1 << 63) - 1, 1 << 64, 10**400, 1.5, 1e300, 65536)
VALUES = (
    None, True, "", "1", "uint8", "uint32", "object", "../x", "a\0b", "\ud800", [], {}, [[]],
    {"a": 1}, "0" * 32, "x" * 5000,
)  # fmt: skip


def places(tree: Any) -> list[tuple[Any, Any]]:
    """The places of all values in a JSON tree: a list or an object, and the key in it."""
    keys = range(len(tree)) if isinstance(tree, list) else list(tree)
    found = [(tree, key) for key in keys]
    for key in keys:
        if isinstance(tree[key], (dict, list)):
            found += places(tree[key])
    return found


def other_number(tree: Any, random: Random) -> None:
    """A number is another one, near or far."""
    numbers = [place for place in places(tree) if type(place[0][place[1]]) is int]
    holder, key = random.choice(numbers)
    near = holder[key] + random.choice([-4096, -8, -1, 1, 8, 4096])
    holder[key] = random.choice([near, near, random.choice(NUMBERS), random.randrange(1 << 40)])


def other_value(tree: Any, random: Random) -> None:
    """A value of another type."""
    holder, key = random.choice(places(tree))
    holder[key] = random.choice(VALUES)


def removed_key(tree: Any, random: Random) -> None:
    """A key, or a shard, is missing."""
    holder, key = random.choice(places(tree))
    del holder[key]


def added_key(tree: Any, random: Random) -> None:
    """There is a key too many."""
    objects = [tree, *(h[k] for h, k in places(tree) if isinstance(h[k], dict))]
    random.choice(objects)[random.choice(["", "a", "Vocab", "x" * 5000])] = 1


def small_vocabulary(tree: Any, random: Random) -> None:
    """Tokens are beyond the vocabulary."""
    if type(tree.get("vocab")) is int:
        tree["vocab"] = random.randrange(1, VOCAB - 100)


def moved_value(tree: Any, random: Random) -> None:
    """A value stands in another's place, too, or two have changed places."""
    (one, a), (other, b) = random.choice(places(tree)), random.choice(places(tree))
    one[a], other[b] = json.loads(json.dumps([other[b], one[a]]))


def nested(tree: Any, random: Random) -> None:
    """A value lies in many lists."""
    holder, key = random.choice(places(tree))
    for _ in range(random.choice([1, 30, 300])):
        holder[key] = [holder[key]]


OF_TREES = (
    other_number, other_number, other_value, small_vocabulary, removed_key, added_key, moved_value,
    nested,
)  # fmt: skip


def doubled_key(text: str, random: Random) -> str:
    """An object has a key twice."""
    lines = text.splitlines()
    number = random.choice([n for n, line in enumerate(lines) if re.search(r'": [^{[]*,$', line)])
    again = re.sub(r": .*", f": {random.choice(['1', 'null', '[]'])},", lines[number])
    return "\n".join([*lines[:number], random.choice([again, lines[number]]), *lines[number:]])


def deep(text: str, random: Random) -> str:
    """Brackets without end."""
    return text[: random.randrange(len(text))] + random.choice("[{") * 100_000


def check_manifest_told(folder: Folder, random: Random) -> tuple[str, bool]:
    """Damage a manifest. Returns the kind of damage, and whether it was told."""
    text, is_sealed = folder.manifest.to_json(), False
    how = random.randrange(10)
    if how < 3:
        made = random.choice(OF_BYTES)
        kind, content = made.__name__, bytes(made(bytearray(text, "utf-8"), random))
    elif how < 4:
        of_text = random.choice([doubled_key, doubled_key, deep])
        kind, content = of_text.__name__, of_text(text, random).encode()
    else:
        tree, kinds = json.loads(text), []
        is_sealed = random.random() < SEALED_SHARE
        for _ in range(random.choice([1, 1, 1, 2])):
            change = random.choice(OF_TREES)
            change(tree, random)
            kinds.append(change.__name__)
        kind = ("sealed " if is_sealed else "") + kinds[0]
        content = (sealed(tree) if is_sealed else json.dumps(tree)).encode()
    path = folder.directory / FILE_NAME
    path.write_bytes(content)
    try:
        told = judge_manifest(folder, is_sealed=is_sealed)
        assert told or kind != "doubled_key"
        return f"manifest: {kind}", told
    finally:
        path.write_text(text)


def judge_manifest(folder: Folder, *, is_sealed: bool) -> bool:
    """Check what is told of a damaged manifest; returns whether anything is."""
    try:
        manifest = read_manifest(folder.directory)
    except DataError as error:
        assert f"{folder.directory / FILE_NAME} is damaged" in error.cause, error
        told = error.cause.partition("is damaged")[2]
        assert KEYS.search(told) or PLACE.search(told), error
        return True
    if manifest == folder.manifest:
        return False
    assert is_sealed, "the manifest says something else, and nobody says so"
    try:
        check_shards(folder.directory, manifest)
        rows = [row for split in manifest.splits for row in folder.samples(manifest, split)[0]]
    except DataError as error:
        assert str(folder.directory) in error.cause
        if "beyond its manifest's vocabulary" in error.cause:
            assert BLOCK.search(error.cause)
        return True
    assert {row.tobytes() for row in rows} <= folder.known
    assert all(row.max() < manifest.vocab for row in rows)
    return False


def damage_many(directory: Path, count: int, seed: int) -> dict[str, Counter[bool]]:
    """Damage some files. Returns for each kind of damage the number that was told."""
    random = Random(seed)
    folder = Folder(directory, random)
    assert damage(directory / "train-0.h5", folder.manifest.splits["train"][0], "uint16") is None
    found: dict[str, Counter[bool]] = {}
    for number in range(count):
        check = check_manifest_told if number % 2 else check_shard_told
        try:
            kind, told = check(folder, random)
        except Exception as error:
            raise AssertionError(f"damage {number} of seed {seed}") from error
        found.setdefault(kind, Counter())[told] += 1
    return found


def main() -> None:
    """Damage and count."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        found = damage_many(Path(folder), options.count, options.seed)
    for name, counts in sorted(found.items()):
        print(f"{name}: {counts[True]} told, {counts[False]} harmless")
    total = sum(counts.total() for counts in found.values())
    print(f"{total} in all, {time.perf_counter() - begin:.0f} s")


if __name__ == "__main__":
    main()
