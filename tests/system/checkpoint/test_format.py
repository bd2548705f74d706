"""The format as docs/reference/checkpoint-format.md describes it: a reader without our code."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
import xxhash

from hpc_train.checkpoint.fileformat import LocalTensor, format_dtypes
from hpc_train.mpi.group import Group
from tests.checkpoint.states import save_tensors
from tests.checkpoint.test_fileformat import VERSION_1, of_version_1
from tests.conftest import records

TYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "BOOL": "?"}
TYPES |= {"I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1", "U8": "u1"}
TYPES |= {"U64": "<u8", "U32": "<u4", "U16": "<u2", "C64": "<c8"}
TYPES |= {f"F8_{kind}": "u1" for kind in ("E4M3", "E5M2", "E4M3FNUZ", "E5M2FNUZ", "E8M0")}


def read(path: Path) -> tuple[dict[str, np.ndarray], dict]:
    """The tensors and the state, all hashes compared."""
    data = path.read_bytes()
    # 1. the commit record
    length = int.from_bytes(data[:8], "little")
    assert 0 < length <= min(100_000_000 + 2**20, len(data) - 8), "it was never completed"
    # 2. and 3. the header and its version
    text, start = data[8 : 8 + length], 8 + length
    entries = json.loads(text)
    metadata = entries.pop("__metadata__")
    assert "hpc_train.version" in metadata, "it is of somebody else"
    assert metadata["hpc_train.version"] == "1", f"version {metadata['hpc_train.version']}"
    # 4. the header's hash, and the size of the file
    own = metadata["hpc_train.header_hash"]
    hidden = text.rstrip(b" ").replace(own.encode(), b"0" * 32, 1)
    assert xxhash.xxh3_128_hexdigest(hidden) == own
    assert start % 2**20 == 0
    place, items = 0, [np.dtype(TYPES[entry["dtype"]]).itemsize for entry in entries.values()]
    for entry, size in zip(entries.values(), items, strict=True):
        assert entry["data_offsets"] == [place, place + math.prod(entry["shape"]) * size]
        place = entry["data_offsets"][1]
    assert len(data) == start + place
    *names, state, hashes = entries
    assert (state, hashes) == ("__hpc_train__.state", "__hpc_train__.hash")
    order = [(-size, name) for size, name in zip(items, names, strict=False)]
    assert order == sorted(order)
    # 5. the hash table
    end = start + entries[hashes]["data_offsets"][0]
    table = data[end:]
    assert xxhash.xxh3_128_hexdigest(table) == metadata["hpc_train.table_hash"]
    # 6. the extents
    step = int(metadata["hpc_train.extent_bytes"])
    pieces = [data[begin : min(begin + step, end)] for begin in range(start, end, step)]
    assert b"".join(map(xxhash.xxh3_128_digest, pieces)) == table
    found = {}
    for name in (*names, state):
        entry = entries[name]
        begin, behind = (start + offset for offset in entry["data_offsets"])
        flat = np.frombuffer(data[begin:behind], TYPES[entry["dtype"]])
        found[name] = flat.reshape(entry["shape"])
    return found, json.loads(found.pop(state).tobytes())


def assert_has(found: dict[str, np.ndarray], named: dict[str, torch.Tensor]) -> None:
    assert found.keys() == named.keys()
    for name, tensor in named.items():
        assert found[name].shape == tuple(tensor.shape), name
        assert found[name].tobytes() == tensor.reshape(-1).view(torch.uint8).numpy().tobytes(), name


def test_a_reader_from_the_documentation_reads_version_1():
    named, state = of_version_1()
    found, tree = read(VERSION_1)
    assert_has(found, named)
    assert tree == json.loads(state)


def test_a_reader_from_the_documentation_reads_all_types(tmp_path):
    named = {f"a.{dtype}": torch.arange(7).view(7, 1).to(dtype) for dtype in format_dtypes()}
    named |= {"ä": torch.tensor(3.5), "z": torch.zeros(2, 0), "large": torch.randn(5000, 1000)}
    held = {name: LocalTensor.whole(tensor) for name, tensor in named.items()}
    save_tensors(tmp_path / "c.safetensors", held, b'{"step":7}', Group())
    found, tree = read(tmp_path / "c.safetensors")
    assert_has(found, named)
    assert tree == {"step": 7}


def test_a_reader_from_the_documentation_reads_a_trained_checkpoint(program):
    assert program.train("run", launcher="mpirun", ranks=2).returncode == 0
    found, tree = read(program.checkpoint("run", 12))
    assert tree["step"] == len(records(program.root / "run")) == 12
    assert {"identity", "about", "optimizer"} <= tree.keys()
    assert {"kind", "shape", "dtype", "tokenizer"} == tree["about"].keys()
    assert {name.partition(".")[0] for name in found} == {"model", "optim"}
    slots = {name.rpartition(".")[2] for name in found if name.startswith("optim.")}
    assert slots == {"exp_avg", "exp_avg_sq", "step"}
    for name, array in found.items():
        if name.startswith("optim."):
            parameter, _, slot = name.removeprefix("optim.").rpartition(".")
            shape = () if slot == "step" else found[f"model.{parameter}"].shape
            assert array.shape == shape


@pytest.mark.parametrize("place", [0, 100, (1 << 20) - 5, (1 << 20) + 5, -1])
def test_the_reader_notices_damage(tmp_path, place):
    data = bytearray(VERSION_1.read_bytes())
    data[place] ^= 1
    (tmp_path / "c").write_bytes(data)
    with pytest.raises((AssertionError, ValueError)):
        read(tmp_path / "c")
