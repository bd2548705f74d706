"""What programs give for the keys of the sections gradients and memory."""

from __future__ import annotations

import numpy as np
import pytest

from hpc_train.config import (
    DataSection,
    FinetuneSection,
    GradientsSection,
    MemorySection,
    ModelSection,
)
from hpc_train.errors import ConfigError


@pytest.mark.parametrize(
    ("given", "remedy"),
    [
        ({"reduction": "sum"}, "one of mean, adasum"),
        ({"engine": "gloo"}, "one of auto, horovod, mpi, nccl"),
        ({"two_level": True}, "one of auto, on, off"),
        ({"average_every": 2.5}, "a whole number"),
        ({"bucket_mb": "4"}, "a number"),
        ({"compression": 3}, "text"),
    ],
    ids=str,
)
def test_a_program_is_told_what_a_key_takes(given, remedy):
    ((key, value),) = given.items()
    with pytest.raises(ConfigError) as caught:
        GradientsSection(**given)
    assert str(caught.value) == f"gradients.{key} is {value!r}: give {remedy}"


def test_numbers_of_numpy_and_true_of_zero_are_told_apart():
    assert GradientsSection(average_every=np.int64(2), bucket_mb=4).average_every == 2
    with pytest.raises(ConfigError, match="memory.zero is True: give one of auto, 0, 1, 2, 3"):
        MemorySection(zero=True)


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: ModelSection(kind="tabular", quantiles=["a"]), "'a' in its list: give a number"),
        (lambda: FinetuneSection(patterns=[1]), "finetune.patterns has 1 in its list: give text"),
    ],
)
def test_the_items_of_a_list_are_checked(make, told):
    with pytest.raises(ConfigError, match=told):
        make()
    assert DataSection(path=[{"path": "a"}]).folders == {"a": 1}
