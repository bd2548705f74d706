"""Batches whose tensors are exchanged, as for a GPU."""

from __future__ import annotations

from collections import UserDict, defaultdict, namedtuple
from collections.abc import MutableMapping
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


class Crops(tuple):
    """It is made of several arguments."""

    def __new__(cls, one, other=None):
        return super().__new__(cls, (one, other))


class Scores(list):
    def __init__(self, classes, scores):
        super().__init__([classes, scores])


class Fields(MutableMapping):
    """It has its items in an attribute, which its copies share."""

    def __init__(self, items):
        self.items_in_it = items

    def __getattr__(self, name):
        if name == "items_in_it":
            raise AttributeError(name)
        return self[name]

    def __getitem__(self, key):
        return self.items_in_it[key]

    def __setitem__(self, key, value):
        self.items_in_it[key] = value

    def __delitem__(self, key):
        del self.items_in_it[key]

    def __iter__(self):
        return iter(self.items_in_it)

    def __len__(self):
        return len(self.items_in_it)


def test_containers_that_cannot_be_made_anew_become_plain_ones_and_stay_as_they_are():
    pair, scores = Crops(torch.zeros(1), "text"), Scores(torch.zeros(1), [torch.zeros(1)])
    deep = Fields(Fields({"name": "text", "x": torch.zeros(1), "y": torch.zeros(1)}))
    found = [each_tensor(one, lambda tensor: tensor + 1) for one in (pair, scores, deep)]
    assert found == [(1, "text"), [1, [1]], {"name": "text", "x": 1, "y": 1}]
    assert [type(one) for one in found] == [tuple, list, dict]
    assert (pair, scores) == ((0, "text"), [0, [0]])
    assert dict(deep) == {"name": "text", "x": 0, "y": 0}


def test_a_mapping_with_its_items_in_an_attribute_keeps_its_class():
    fields = Fields({"name": "text", "x": torch.zeros(1)})
    found = each_tensor(fields, lambda tensor: tensor + 1)
    assert (type(found), found.name, float(found.x)) == (Fields, "text", 1.0)
    assert float(fields.x) == 0.0
