"""Each element of a tensor has one owner, or the save is refused."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hpc_train.checkpoint.fileformat import Contents
from hpc_train.checkpoint.routes import check_cover, extents_of, row_of
from hpc_train.errors import CheckpointError
from hpc_train.sharding import SliceSpec


@st.composite
def parts_of_a_tensor(draw):
    """Parts that cover a tensor, and maybe one part too many or changed."""
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    dim = draw(st.integers(0, len(shape) - 1))
    cuts = sorted({0, shape[dim], *draw(st.lists(st.integers(0, shape[dim]), max_size=3))})
    parts = [SliceSpec(shape, dim, a, b) for a, b in pairwise(cuts)]
    found = []
    for part in parts:
        rows = part.local_shape[0]
        edges = sorted({0, rows, *draw(st.lists(st.integers(0, rows), max_size=3))})
        found += [part.rows(a, b) for a, b in pairwise(edges)]
    how = draw(st.sampled_from(["right", "one missing", "one twice", "one in place of another"]))
    if how != "right":
        odd = draw(st.sampled_from(found))
        if how != "one twice":
            found.remove(odd)
        if how != "one missing":
            found.append(draw(st.sampled_from(parts)))
    return shape, draw(st.permutations(found))


def box(spec):
    """The indices that a part has."""
    cut = [slice(None)] * len(spec.shape)
    for dim, (first, last) in spec.ranges().items():
        cut[dim] = slice(first, last)
    return tuple(cut)


@given(parts_of_a_tensor())
def test_parts_are_taken_if_each_element_is_in_one_of_them(drawn):
    shape, parts = drawn
    layout = Contents.of({"t": (torch.float32, shape)}).layout(3)
    count = np.zeros(shape, int)
    for part in parts:
        count[box(part)] += 1
    rows = [row_of(0, part) for part in parts]
    if (count == 1).all():
        check_cover(rows, layout, [0])
        return
    with pytest.raises(CheckpointError, match=f"own (some|{count.sum()}) elements of t "):
        check_cover(rows, layout, [0])


@given(parts_of_a_tensor(), st.integers(4, 40), st.integers(0, 9))
def test_the_extents_of_a_part_are_those_that_hold_its_bytes(drawn, size, before):
    shape, parts = drawn
    forms = {"a": (torch.float64, (before,)), "t": (torch.float32, shape)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hpc_train.checkpoint.fileformat.EXTENT_BYTES", size)
        layout = Contents.of(forms).layout(3)
        entry = layout.entries[1]
        for part in parts:
            bytes_ = np.zeros((*shape, 4), bool)
            bytes_[box(part)] = True
            places = entry.begin + np.flatnonzero(bytes_)
            found = extents_of(entry, part)
            assert {*(places // size).tolist()} <= {*found}
            if len(places):
                assert (found[0], found[-1]) == (places[0] // size, places[-1] // size)
