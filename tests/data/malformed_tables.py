"""Damages files of tables at random: rows are read, counted as wrong, or one clear error is told.

    python -m tests.data.malformed_tables --count 10000 --seed 0

For each format and kind of damage the program prints its number, and in how many cases an error was
told, rows were counted as wrong, or all rows were right. Another exception, a crash or a wait ends
the program.
"""

from __future__ import annotations

import argparse
import faulthandler
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from datetime import date, timedelta
from pathlib import Path
from random import Random
from typing import Any

import h5py
import numpy as np

from hpc_train.data.tables.features import Categories
from hpc_train.data.tables.infer import infer_schema
from hpc_train.data.tables.schema import Column, TableSchema
from hpc_train.data.tables.sources import (
    count_quotes,
    cut_tables,
    list_tables,
    read_rows,
    settle_quotes,
)
from hpc_train.errors import DataError
from tests.damages import append, cut_off, flip, noise, swap, zero

ROWS = 300
HANG_SECONDS = 200
HDF5_SHARE = 0.02  # of the files; for each of them a process is started
SCHEMA = TableSchema(
    columns=(
        Column(name="number", kind="numeric"),
        Column(name="text", kind="categorical"),
        Column(name="when", kind="date"),
        Column(name="count", kind="numeric"),
        Column(name="free", kind="ignored"),
    ),
    task="none",
    targets=(),
)
BYTES = [b'"', b'""', b",", b"\n", b"\r", b"\r\n", b"\0", b"\xff", b"\xe2\x82", b"NA", b"'", b";"]


def insert(data: bytearray, random: Random) -> bytearray:
    """Some bytes that mean something are inserted."""
    for _ in range(random.choice([1, 1, 2, 5])):
        place = random.randrange(len(data) + 1)
        data[place:place] = random.choice(BYTES)
    return data


def drop(data: bytearray, random: Random) -> bytearray:
    """Some bytes are missing."""
    place = random.randrange(len(data))
    del data[place : place + random.choice([1, 1, 3, 100])]
    return data


def repeat(data: bytearray, random: Random) -> bytearray:
    """A part is there many times."""
    begin = random.randrange(len(data))
    part = data[begin : begin + random.randint(1, 40)]
    data[begin:begin] = part * random.choice([1, 10, 1000])
    return data


DAMAGES = (flip, cut_off, append, zero, swap, noise, insert, insert, drop, repeat)


def sound_files(random: Random) -> dict[str, bytes]:
    """The bytes of sound files of all formats by name."""
    import csv
    import gzip
    import io

    import pyarrow as pa
    import pyarrow.parquet as pq

    texts = ["red", "green", 'a "b"', "x\ny", "é", None]
    columns: dict[str, list[Any]] = {
        "number": [random.gauss(0, 1) for _ in range(ROWS)],
        "text": [random.choice(texts) for _ in range(ROWS)],
        "when": [date(2020, 1, 1) + timedelta(random.randrange(1000)) for _ in range(ROWS)],
        "count": [random.randrange(100) for _ in range(ROWS)],
        "free": [f"row, {number}" for number in range(ROWS)],
    }
    written = io.StringIO(newline="")
    writer = csv.writer(written)
    writer.writerow(columns)
    writer.writerows(zip(*columns.values(), strict=True))
    text = written.getvalue().encode()
    sound = {"a.csv": text, "b.csv.gz": gzip.compress(text)}
    table = pa.table(columns)
    for name, options in {
        "c.parquet": {"compression": "none", "use_dictionary": False},
        "d.parquet": {"compression": "snappy", "row_group_size": 100},
        "e.parquet": {"compression": "zstd", "data_page_size": 200, "write_page_checksum": True},
    }.items():
        memory = io.BytesIO()
        pq.write_table(table, memory, **options)
        sound[name] = memory.getvalue()
    arrays = {name: np.array(some) for name, some in columns.items() if name != "text"}
    arrays["when"] = arrays["when"].astype("datetime64[D]")
    arrays["text"] = np.array([text or "" for text in columns["text"]])
    for name, save in {"f.npz": np.savez, "g.npz": np.savez_compressed}.items():
        memory = io.BytesIO()
        save(memory, **arrays)
        sound[name] = memory.getvalue()
    rows = np.zeros(ROWS, [("number", "f8"), ("text", "S8"), ("when", "S10"), ("count", "i2"),
                           ("free", "S12")])  # fmt: skip
    for name, some in columns.items():
        texts = rows.dtype[name].kind == "S"
        rows[name] = [str(one or "").encode() for one in some] if texts else some
    memory = io.BytesIO()
    with h5py.File(memory, "w") as file:
        file.create_dataset("table", data=rows, chunks=(70,), compression="gzip")
    sound["h.h5"] = memory.getvalue()
    return sound


def read_damaged(path: Path, random: Random) -> str:
    """Read a file in some way; returns "told", "counted" or "right"."""
    quoted = random.random() < 0.7
    try:
        files = list_tables([path])
        schema = infer_schema(files) if random.random() < 0.2 else SCHEMA
        nbytes = random.choice([1, 100, 3000, 1 << 20])
        portions = cut_tables(files, quoted_newlines=quoted, nbytes=max(nbytes, len_of(files) // 9))
        portions = settle_quotes(portions, [count_quotes(portion) for portion in portions])
        wrong = random.choice(["raise", "count", "count"])
        counted = 0
        for portion in portions:
            for batch in read_rows(portion, schema, wrong):
                check_rows(schema, batch)
                counted += batch.wrong
    except DataError as error:
        assert path.name in error.cause or "column" in error.cause, error
        assert error.remedy
        return "told"
    assert wrong == "count" or not counted
    return "counted" if counted else "right"


def len_of(files: Any) -> int:
    """The bytes of some files."""
    return sum(file.nbytes for file in files)


def check_rows(schema: TableSchema, batch: Any) -> None:
    """Check that a batch has rows of the kinds that the schema says."""
    for column in schema.columns:
        if column.kind == "ignored":
            assert column.name not in batch.columns
            continue
        values = batch.columns[column.name]
        assert len(values) == len(batch.numbers)
        if column.kind == "categorical":
            assert isinstance(values, Categories)
            assert len(set(values.values)) == len(values.values)
            assert all("\0" not in text for text in values.values)
            values.texts()
        else:
            assert values.dtype == np.float64


def damage_tables(directory: Path, count: int, seed: int) -> dict[str, Counter[str]]:
    """Damage and read many files. Returns for each format and damage how it ended how often."""
    random = Random(seed)
    sound = sound_files(random)
    found: dict[str, Counter[str]] = defaultdict(Counter)
    for _ in range(count):
        name = "h.h5" if random.random() < HDF5_SHARE else random.choice([*sound][:-1])
        damage: Callable[[bytearray, Random], bytes | bytearray] = random.choice(DAMAGES)
        path = directory / name
        path.write_bytes(damage(bytearray(sound[name]), random))
        faulthandler.dump_traceback_later(HANG_SECONDS, exit=True)
        try:
            found[f"{name} {damage.__name__}"][read_damaged(path, random)] += 1
        finally:
            faulthandler.cancel_dump_traceback_later()
    return found


def main() -> None:
    """Damage files and print what has become of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        found = damage_tables(Path(folder), given.count, given.seed)
    for kind, ends in sorted(found.items()):
        print(f"{kind:24} {ends.total():6}", *(f"{end} {n}" for end, n in sorted(ends.items())))
    print(f"{given.count} files in {time.monotonic() - begin:.0f} s")


if __name__ == "__main__":
    main()
