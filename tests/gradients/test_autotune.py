"""The size of buckets."""

from __future__ import annotations

import pytest
import torch
from torch.nn import Parameter

from hpc_train.gradients.autotune import USUAL_BUCKET, chosen_bucket_bytes
from hpc_train.gradients.options import AveragingOptions
from hpc_train.mpi.group import Group


@pytest.mark.parametrize("compression", ["topk:0.1", "powersgd:2:100"])
def test_a_size_that_changes_the_results_is_not_measured(compression):
    """Otherwise two runs, or a run and its restart, would send other parts of the gradients."""

    def measured(_):
        raise AssertionError("sums were made for a measurement")

    trained = [Parameter(torch.zeros(1000, 1000))]
    options = AveragingOptions(compression=compression)
    assert chosen_bucket_bytes(Group(), measured, trained, options) == USUAL_BUCKET
    options = AveragingOptions(compression=compression, bucket_bytes=1000)
    assert chosen_bucket_bytes(Group(), measured, trained, options) == 1000
