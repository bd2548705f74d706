from __future__ import annotations

from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import Parameter

from hpc_train.gradients.buckets import Bucket, plan_buckets

DTYPES = st.sampled_from([torch.float32, torch.float64])
SHAPES = st.lists(st.tuples(st.lists(st.integers(0, 5), max_size=3), DTYPES), max_size=12)


def made(shapes):
    return [Parameter(torch.ones(shape, dtype=dtype)) for shape, dtype in shapes]


@given(SHAPES, st.integers(1, 600))
def test_every_gradient_lies_in_exactly_one_bucket_of_its_type(shapes, bucket_bytes):
    parameters = made(shapes)
    buckets = [Bucket(some) for some in plan_buckets(parameters, bucket_bytes)]
    held = [parameter for bucket in buckets for parameter in bucket.parameters]
    assert [id(p) for p in held] == [id(p) for p in reversed(parameters)]
    for bucket in buckets:
        assert bucket.numel == sum(p.numel() for p in bucket.parameters)
        assert len(bucket.parameters) == 1 or bucket.nbytes <= bucket_bytes
        flat = torch.zeros(bucket.numel, dtype=bucket.dtype)
        views = bucket.views(flat)
        for number, (parameter, view) in enumerate(views.items()):
            assert (view.shape, view.dtype) == (parameter.shape, parameter.dtype)
            view.fill_(number)
        values = [torch.full((p.numel(),), float(n)) for n, p in enumerate(bucket.parameters)]
        assert torch.equal(flat.float(), torch.cat(values))


@given(SHAPES.filter(lambda shapes: shapes), st.integers(1, 6))
def test_the_parts_of_a_bucket_are_whole_rows_and_all_of_it(shapes, parts):
    parameters = [Parameter(torch.ones(shape)) for shape, _ in shapes]
    bucket = Bucket(parameters)
    cuts = bucket.cuts(parts)
    assert (cuts[0], cuts[-1], len(cuts)) == (0, bucket.numel, parts + 1)
    assert cuts == sorted(cuts)
    flat = torch.arange(bucket.numel, dtype=torch.float32)
    rebuilt = {p: torch.full(p.shape, -1.0) for p in parameters}
    for begin, end in pairwise(cuts):
        slabs = bucket.slabs(begin, end)
        assert sum(slab.of(flat).numel() for slab in slabs) == end - begin
        for slab in slabs:
            assert slab.rows_of(slab.parameter).shape == slab.shape
            slab.rows_of(rebuilt[slab.parameter]).copy_(slab.of(flat))
    for parameter, view in bucket.views(flat).items():
        assert torch.equal(rebuilt[parameter], view)


def test_parts_differ_by_a_row_at_most():
    bucket = Bucket([Parameter(torch.ones(100, 7)), Parameter(torch.ones(50))])
    sizes = [end - begin for begin, end in pairwise(bucket.cuts(4))]
    assert max(sizes) - min(sizes) <= 2 * 7
