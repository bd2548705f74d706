"""Places beyond 2^31 and 2^40: of files that are mostly holes, and of tensors that nobody has."""

from __future__ import annotations

import math
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hpc_train import files
from hpc_train.checkpoint import fileformat, restore
from hpc_train.checkpoint.engines import PosixWriter, open_writer
from hpc_train.checkpoint.fileformat import HASH_BYTES, STATE, LocalTensor
from hpc_train.checkpoint.parts import Parts, pieces_of
from hpc_train.mpi.group import Group
from hpc_train.sharding import SliceSpec

PLACES = (2**31 - 5, 2**31 + 5000, 2**32 - 5, 2**40 - 5, 2**40 + 5000)
HUGE = (2**20, 2**17)  # int64: 1 TiB
ROWS = 3  # of it that are there: its last ones


def made_sparse(path: Path, size: int) -> bool:
    """Make a file of so many bytes that takes no room; whether that is possible."""
    try:
        path.touch()
        os.truncate(path, size)
    except OSError:
        return False
    return path.stat().st_blocks < 1000


@pytest.mark.mpi
@pytest.mark.parametrize("engine", ["posix", "mpiio"])
def test_ranks_write_and_read_at_any_offset(job, together, engine):
    world, path = job.world, together / "sparse"
    possible = world.rank > 0 or made_sparse(path, 2**40 + 2**20)
    if world.largest(int(not possible)):
        pytest.skip("no sparse files of 1 TiB here")
    own = bytes([world.rank + 1]) * 12
    writer = open_writer(engine, path, world)
    for place in PLACES:
        writer.write_at(place + 100 * world.rank, own)
    writer.sync()
    writer.close()
    world.barrier()
    other = (world.rank + 1) % world.size
    with files.opened(path) as descriptor:
        read = [files.read_at(descriptor, 20, place + 100 * other - 4) for place in PLACES]
    world.barrier()
    if world.rank == 0:
        path.unlink()
    assert read == [bytes(4) + bytes([other + 1]) * 12 + bytes(4)] * len(PLACES)


def test_tensors_behind_a_terabyte_are_written_and_read(tmp_path):
    path, state = tmp_path / "c.safetensors", b'{"step":1}'
    after = torch.arange(3000.0).view(1000, 3)
    last = torch.arange(ROWS * HUGE[1]).view(ROWS, -1) - 7
    spec = SliceSpec(HUGE, 0, HUGE[0] - ROWS, HUGE[0])
    held = {
        "after": LocalTensor.whole(after),
        "huge": LocalTensor(last, spec),
        STATE: LocalTensor.whole(torch.frombuffer(bytearray(state), dtype=torch.uint8)),
    }
    specs = {name: part.spec for name, part in held.items()}
    forms = {name: held[name].form for name in ("after", "huge")}
    layout = fileformat.Contents.of(forms).layout(len(state))
    assert [entry.begin for entry in layout.entries[:3]] == [0, 2**40, 2**40 + 12000]
    if not made_sparse(path, layout.file_bytes):
        pytest.skip("no sparse files of 1 TiB here")
    first = spec.start * HUGE[1] * 8 // fileformat.EXTENT_BYTES
    assert (first, layout.extents) == (2**16 - 1, 2**16 + 1)
    hole = fileformat.hash_of(bytes(fileformat.EXTENT_BYTES))
    table = bytearray(hole * layout.extents)
    writer = PosixWriter(path)
    for number in range(first, layout.extents):
        data = np.zeros(layout.size(number), np.uint8)
        Parts(held).gather(pieces_of(specs, layout, *layout.extent(number)), data)
        writer.write_at(layout.data_start + layout.extent(number)[0], data.data)
        table[HASH_BYTES * number : HASH_BYTES * (number + 1)] = fileformat.hash_of(data)
    writer.write_at(layout.data_start + layout.content_bytes, table)
    head = fileformat.header(layout, bytes(table))
    writer.write_at(0, len(head).to_bytes(8, "little") + head)
    writer.close()

    reader = restore.CheckpointReader.open(path)
    assert reader.layout == layout
    assert not any(reader.extent(first // 2))
    found = {"after": LocalTensor.whole(torch.zeros_like(after))}
    restore.load_tensors(reader, found, Group())
    assert torch.equal(found["after"].tensor, after)
    assert restore.load_state(reader, Group()) == {"step": 1}
    rows = torch.zeros_like(last)
    pieces = pieces_of({"huge": spec}, layout, *layout.extent(first))
    Parts({"huge": LocalTensor(rows, spec)}).scatter(reader.extent(first), pieces)
    assert torch.equal(rows, last)


@st.composite
def huge_specs(draw):
    """Parts of tensors of more than 2^40 elements."""
    shape = tuple(draw(st.lists(st.integers(1, 2**24), min_size=2, max_size=4)))
    shape = (*shape, 1 + 2**41 // math.prod(shape))
    dim = draw(st.integers(0, len(shape) - 1))
    start = draw(st.integers(0, shape[dim]))
    spec = SliceSpec(shape, dim, start, draw(st.integers(start, shape[dim])))
    if dim > 0 and draw(st.booleans()):
        first = draw(st.integers(0, shape[0] - 1))
        spec = spec.rows(first, draw(st.integers(first + 1, shape[0])))
    return spec


def bounds(spec: SliceSpec) -> list[tuple[int, int]]:
    """Of each dimension the first index that is in the part, and the one behind the last."""
    found = [(0, size) for size in spec.shape]
    found[spec.dim] = (spec.start, spec.stop)
    return [(spec.first, spec.last), *found[1:]] if spec.last else found


def place_in(spec: SliceSpec, element: int) -> int | None:
    """An element's place in the part, if it is in it: index by index."""
    place, stride = 0, 1
    for size, (first, last) in reversed(list(zip(spec.shape, bounds(spec), strict=True))):
        element, index = divmod(element, size)
        if not first <= index < last:
            return None
        place, stride = place + (index - first) * stride, stride * (last - first)
    return place


@given(huge_specs(), st.sampled_from([1, 2, 8]), st.data())
def test_overlaps_are_right_for_numbers_of_any_size(spec, itemsize, data):
    corner = 0
    for size, (first, last) in zip(spec.shape, bounds(spec), strict=True):
        corner = corner * size + data.draw(st.sampled_from([first, max(first, last - 1), 0]))
    begin = max(0, corner * itemsize - data.draw(st.integers(0, 60)))
    end = min(math.prod(spec.shape) * itemsize, begin + data.draw(st.integers(0, 120)))
    expected = {}
    for place in range(begin, end):
        element, byte = divmod(place, itemsize)
        if (local := place_in(spec, element)) is not None:
            expected[place - begin] = local * itemsize + byte
    found = {}
    for block in spec.overlap(begin, end, itemsize):
        for row in range(block.rows):
            for i in range(block.length):
                place = block.place + row * block.stride + i
                assert place not in found
                found[place] = block.local + row * block.length + i
    assert found == expected
