"""Batches whose tensors are exchanged, as for a GPU."""

from __future__ import annotations

from collections import UserDict, defaultdict, namedtuple
from types import MappingProxyType

import torch

from hpc_train.data.pinned import each_tensor

Pair = namedtuple("Pair", "one other")


class Encoding(UserDict):
    """As transformers.BatchEncoding, it has more attributes than its items."""

    kind = None


def test_tensors_are_changed_in_containers_which_keep_their_class():
    encoding = Encoding(x=torch.zeros(2), deep=[UserDict(y=torch.ones(1))])
    encoding.kind = "special"
    found = each_tensor(encoding, lambda tensor: tensor + 5)
    assert (type(found), found.kind) == (Encoding, "special")
    assert torch.equal(found["x"], torch.full((2,), 5.0))
    assert torch.equal(found["deep"][0]["y"], torch.full((1,), 6.0))
    assert torch.equal(encoding["x"], torch.zeros(2))
    batch = Pair(defaultdict(list, a=torch.ones(1)), MappingProxyType({"b": torch.ones(1)}))
    pair = each_tensor(batch, lambda tensor: tensor * 3)
    assert (type(pair), type(pair.one)) == (Pair, defaultdict)
    assert float(pair.one["a"]) == float(pair.other["b"]) == 3.0
