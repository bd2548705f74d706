from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_train.sharding import SliceSpec


@st.composite
def specs(draw):
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=4)))
    if not shape:
        return SliceSpec.whole(shape)
    dim = draw(st.integers(0, len(shape) - 1))
    start = draw(st.integers(0, shape[dim]))
    return SliceSpec(shape, dim, start, draw(st.integers(start, shape[dim])))


@given(specs(), st.data())
def test_blocks_cover_what_shard_and_range_share(spec, data):
    size = int(np.prod(spec.shape))
    begin = data.draw(st.integers(0, size))
    end = data.draw(st.integers(begin, size))
    tensor = np.arange(size).reshape(spec.shape)
    shard = tensor
    if spec.shape:
        shard = np.take(tensor, range(spec.start, spec.stop), axis=spec.dim)
    assert shard.shape == spec.local_shape
    found = {}
    blocks = spec.overlap(begin, end)
    for block in blocks:
        for row in range(block.rows):
            for i in range(block.length):
                place = block.place + row * block.stride + i
                assert place not in found
                found[place] = shard.ravel()[block.local + row * block.length + i]
    expected = {int(value) - begin: value for value in shard.ravel() if begin <= value < end}
    assert found == expected
    assert len(blocks) <= 3


@given(specs(), st.data())
def test_bytes_are_elements_times_their_size(spec, data):
    size = int(np.prod(spec.shape))
    begin = data.draw(st.integers(0, size))
    end = data.draw(st.integers(begin, size))

    def covered(blocks, unit):
        return {
            (block.place + row * block.stride) // unit + i
            for block in blocks
            for row in range(block.rows)
            for i in range(block.length // unit)
        }

    in_bytes = spec.overlap(begin * 8, end * 8, itemsize=8)
    assert covered(in_bytes, 8) == covered(spec.overlap(begin, end), 1)


def test_equal_parts():
    assert SliceSpec.part((6, 4), -1, 1, 2) == SliceSpec((6, 4), 1, 2, 4)
    with pytest.raises(ValueError, match="dimension 0 of .6, 4. is not divisible by 4"):
        SliceSpec.part((6, 4), 0, 1, 4)
