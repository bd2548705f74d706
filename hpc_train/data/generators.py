"""Find the random generators that a data set can draw from, and give them one interface."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import islice
from types import ModuleType
from typing import Any

import numpy as np
import torch

from hpc_train.seeds import mix

DEPTH = 4  # levels of attributes of attributes that are searched for a data set's own generators
MOST_OBJECTS = 1000  # most objects that are searched


@dataclass(frozen=True)
class Generator:
    """A random generator.

    Args:
        name: its name, for messages.
        get: returns its state.
        put: sets a state that `get` has returned.
        seed: seeds it with an integer of 63 bits.
        key: maps a state to a value that can be compared; two states with equal keys are the same.
    """

    name: str
    get: Callable[[], Any]
    put: Callable[[Any], object]
    seed: Callable[[int], object]
    key: Callable[[Any], object]


def of_process() -> list[Generator]:
    """The generators that all code of the process shares: torch's, NumPy's and Python's."""
    return [
        _torch("torch's", torch.default_generator),
        _numpy_state("NumPy's", np.random),
        _python("Python's", random),
    ]


def of_gpu() -> list[Generator]:
    """The generator of the GPU in use, or an empty list if torch uses no GPU."""
    return [
        _torch("torch's on the GPU", module.default_generators[module.current_device()])
        for module in (torch.cuda, torch.xpu)
        if module.is_initialized()
    ]


def own(holder: Any) -> list[Generator]:
    """The generators that an object has as attributes, or as attributes of attributes."""
    return [_wrapped(found) for found in _held(holder)]


def seed_process(number: int) -> None:
    """Seed the generators of the process: torch's on the CPU and on all GPUs, NumPy's and Python's.

    `torch.manual_seed` writes down its caller's stack for each kind of GPU that torch knows, also
    where there is none. That is slow beside a small step (`benchmarks.own_loop`).
    """
    torch.default_generator.manual_seed(number)
    for seed in _seeds_of_gpus():
        seed(number)
    np.random.seed(mix(number, 1) & 0xFFFFFFFF)
    random.seed(mix(number, 2))


@cache
def _seeds_of_gpus() -> list[Callable[[int], object]]:
    """For each kind of GPU that torch can use here, the function that seeds all GPUs of it."""
    seeds = [module.manual_seed_all for module in (torch.cuda, torch.xpu) if module.is_available()]
    return [*seeds, torch.mps.manual_seed] if torch.backends.mps.is_available() else seeds


GENERATOR_KINDS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


def _held(holder: Any) -> Iterator[Any]:
    seen: dict[int, Any] = {}
    level = [holder]
    for _ in range(DEPTH):
        below: list[Any] = []
        for thing in level:
            if id(thing) in seen or len(seen) == MOST_OBJECTS:
                continue
            seen[id(thing)] = thing
            if isinstance(thing, GENERATOR_KINDS):
                yield thing
            else:
                below += _inside(thing)
        level = below


def _inside(thing: Any) -> list[Any]:
    if isinstance(thing, (type, ModuleType, torch.Tensor)):
        return []
    if not isinstance(thing, (list, tuple, dict)):
        thing = getattr(thing, "__dict__", {})
    return list(islice(thing.values() if isinstance(thing, dict) else thing, MOST_OBJECTS))


def _wrapped(found: Any) -> Generator:
    if isinstance(found, torch.Generator):
        return _torch("its own of torch", found)
    if isinstance(found, np.random.RandomState):
        return _numpy_state("its own of NumPy", found)
    if isinstance(found, random.Random):
        return _python("its own of Python", found)
    return _numpy("its own of NumPy", found.bit_generator)


def _torch(name: str, generator: torch.Generator) -> Generator:
    return Generator(
        name,
        generator.get_state,
        generator.set_state,
        generator.manual_seed,
        lambda state: state.numpy().tobytes(),
    )


def _numpy_state(name: str, holder: Any) -> Generator:
    return Generator(
        name,
        holder.get_state,
        holder.set_state,
        lambda number: holder.seed([number & 0xFFFFFFFF, number >> 32]),
        lambda state: (state[1].tobytes(), *state[2:]),
    )


def _numpy(name: str, bits: Any) -> Generator:
    return Generator(
        name,
        lambda: bits.state,
        lambda state: setattr(bits, "state", state),
        lambda number: setattr(bits, "state", type(bits)(number).state),
        pickle.dumps,  # a dictionary of numbers, and with some kinds of arrays
    )


def _python(name: str, holder: Any) -> Generator:
    return Generator(name, holder.getstate, holder.setstate, holder.seed, lambda state: state)
