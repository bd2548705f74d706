"""Encodes Python values, also tuples, counters, infinities and tensors, as tagged JSON.

The JSON names a tensor, and the checkpoint saves it as one of its tensors. Nothing is pickled: a
value of any other type is refused, and the message has its path.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hpc_train.checkpoint.fileformat import format_dtypes
from hpc_train.errors import UserError

TENSOR, FLOAT, METADATA = "tensor", "float", "metadata"
SEQUENCES: dict[str, type[Any]] = {"tuple": tuple, "set": set, "frozenset": frozenset}
MAPPINGS: dict[str, type[Any]] = {"dict": dict, "Counter": Counter, "OrderedDict": OrderedDict}
TAG_OF_KIND = {kind: name for name, kind in [*SEQUENCES.items(), *MAPPINGS.items()]}


def encode(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """Encode a value as JSON.

    A value of a type that JSON lacks becomes an object with one key, its type, such as
    {"tuple": [1, 2]}. A mapping becomes a list of pairs, because its keys need not be strings. The
    state of a module keeps the versions that torch stores beside it.

    Args:
        value: consists of numbers, strings, None, lists, tuples, sets, dicts, Counters,
            OrderedDicts and tensors.
        path: the path of the value, for messages and for the names of its tensors.
        tensors: receives the tensors by their names. They share the value's memory.

    Raises:
        UserError: the value contains another type. The message has its path.
    """
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if isinstance(value, float):  # NumPy's float64 is a subclass
        return float(value) if math.isfinite(value) else {FLOAT: repr(float(value))}
    if isinstance(value, Tensor):
        return {TENSOR: _name(value, path, tensors)}
    if kind is list:
        return [encode(one, f"{path}.{place}", tensors) for place, one in enumerate(value)]
    if kind in (set, frozenset):
        value = sorted(value, key=repr)  # the same order in all processes
    if kind in SEQUENCES.values():
        encoded = [encode(one, f"{path}.{place}", tensors) for place, one in enumerate(value)]
        return {TAG_OF_KIND[kind]: encoded}
    if kind in MAPPINGS.values():
        if any(isinstance(key, Tensor) for key in value):
            raise UserError(
                f"{path} has tensors as keys, which checkpoints cannot hold",
                "use numbers or strings as keys",
            )
        pairs = [
            [encode(key, f"{path}, a key", tensors), encode(one, f"{path}.{key}", tensors)]
            for key, one in value.items()
        ]
        found = {TAG_OF_KIND[kind]: pairs}
        versions = getattr(value, "_metadata", None)
        if versions is not None:
            found[METADATA] = encode(versions, f"{path}, its versions", tensors)
        return found
    raise UserError(
        f"{path} is of type {kind.__name__}, which checkpoints cannot hold",
        "keep numbers, strings, tensors, lists, tuples, sets and dicts in its state_dict",
    )


def _name(tensor: Tensor, path: str, tensors: dict[str, Tensor]) -> str:
    """Add a tensor to `tensors`, and return its name there."""
    if tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg():
        what = "sparse, or a view that is conjugated or negated when it is read"
    elif tensor.dtype not in format_dtypes():
        what = f"of type {str(tensor.dtype).removeprefix('torch.')}"
    else:
        while path in tensors:  # as in {"a.b": ..., "a": {"b": ...}}
            path += "'"
        tensors[path] = tensor.detach()
        return path
    remedy = "convert it to a dense tensor of a type that safetensors files have"
    raise UserError(f"{path} is a tensor {what}, which checkpoints cannot hold", remedy)


def decode(tree: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Decode a value from the JSON that `encode` returned.

    Args:
        tree: the JSON.
        tensors: the tensors of the value, by name.
    """
    if isinstance(tree, list):
        return [decode(one, tensors) for one in tree]
    if not isinstance(tree, dict):
        return tree
    kind, inside = next((key, one) for key, one in tree.items() if key != METADATA)
    if kind == TENSOR:
        return tensors[inside]
    if kind == FLOAT:
        return float(inside)
    if kind in SEQUENCES:
        return SEQUENCES[kind](decode(one, tensors) for one in inside)
    found = MAPPINGS[kind]()
    for key, one in inside:
        found[decode(key, tensors)] = decode(one, tensors)
    if METADATA in tree:
        found._metadata = decode(tree[METADATA], tensors)
    return found
