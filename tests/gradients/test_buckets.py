from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import Parameter

from hpc_train.gradients.buckets import make_buckets

SHAPES = st.lists(
    st.tuples(
        st.lists(st.integers(0, 5), max_size=3), st.sampled_from([torch.float32, torch.float64])
    ),
    max_size=12,
)


@given(SHAPES, st.integers(1, 600))
def test_every_gradient_lies_in_exactly_one_bucket_of_its_type(shapes, bucket_bytes):
    parameters = [Parameter(torch.ones(shape, dtype=dtype)) for shape, dtype in shapes]
    buckets = make_buckets(parameters, bucket_bytes)
    held = [parameter for bucket in buckets for parameter in bucket.views]
    assert [id(p) for p in held] == [id(p) for p in reversed(parameters)]
    for bucket in buckets:
        assert bucket.flat.numel() == sum(p.numel() for p in bucket.views)
        assert len(bucket.views) == 1 or bucket.flat.nbytes <= bucket_bytes
        for number, (parameter, view) in enumerate(bucket.views.items()):
            assert (view.shape, view.dtype) == (parameter.shape, parameter.dtype)
            view.fill_(number)
        values = torch.cat([torch.full((p.numel(),), float(n)) for n, p in enumerate(bucket.views)])
        assert torch.equal(bucket.flat.float(), values)
