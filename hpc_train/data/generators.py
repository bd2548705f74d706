"""Find the random generators that a data set can draw from, and give them one interface."""

from __future__ import annotations

import pickle
import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from itertools import islice
from types import BuiltinMethodType, FunctionType, MemberDescriptorType, ModuleType
from typing import Any

import numpy as np
import torch

from hpc_train.seeds import mix

DEPTH = 12  # levels of attributes of attributes that are searched for a data set's own generators
MOST_OBJECTS = 20_000  # most objects that are searched
MOST_ITEMS = 1000  # most items of one container that are searched


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
    """The generators that an object has as attributes, or as attributes of attributes.

    Attributes of classes and items of containers count, too, and generators that functions name,
    directly or through functions of the same module. Python's `SystemRandom` is left out, because
    it cannot be seeded.
    """
    return [_wrapped(found) for found in _held(holder)]


SEEDING: tuple[tuple[str, tuple[ModuleType, ...], tuple[str, ...]], ...] = (
    ("torch's", (torch, torch.random), ("manual_seed", "seed", "set_rng_state")),
    ("NumPy's", (np.random,), ("seed", "set_state")),
    ("Python's", (random,), ("seed", "setstate")),
)
"""The functions that seed generators of the process or set their states."""


@contextmanager
def seedings() -> Iterator[set[str]]:
    """Notice who seeds generators of the process, or sets their states, in this block.

    Yields a set that takes the names of these generators. The states alone do not show it, as with
    `torch.random.fork_rng`, which restores them.
    """
    noticed: set[str] = set()
    watched = [
        (_Watched(module, name, noticed, kind), module, name)
        for kind, modules, names in SEEDING
        for module in modules
        for name in names
    ]
    for one, module, name in watched:
        setattr(module, name, one)
    try:
        yield noticed
    finally:
        for one, module, name in watched:
            setattr(module, name, one.real)


class _Watched:
    """Stands for a function that seeds a generator. It is pickled and copied by its name."""

    def __init__(self, module: ModuleType, name: str, noticed: set[str], kind: str) -> None:
        real: Any = getattr(module, name)
        # Another thread may be in such a block, too.
        self.real: Any = real.real if isinstance(real, _Watched) else real
        self.__module__, self._name = module.__name__, name
        self._noticed, self._kind = noticed, kind

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        self._noticed.add(self._kind)
        return self.real(*arguments, **named)

    def __reduce__(self) -> str:
        return self._name


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
CONTAINERS = (list, tuple, dict, deque)  # a set has another order on each rank
WITHOUT_PARTS = (str, bytes, bytearray, int, float, complex, np.generic, np.ndarray, torch.Tensor)
"""They hold no generators, and are passed over."""


def _held(holder: Any) -> Iterator[Any]:
    shared = [torch.default_generator, np.random.mtrand._rand, random._inst]
    seen: dict[int, Any] = {id(one): one for one in shared}
    level = [holder]
    for _ in range(DEPTH):
        below: list[Any] = []
        for thing in level:
            if id(thing) in seen:
                continue
            if len(seen) == MOST_OBJECTS:
                return
            seen[id(thing)] = thing
            if _is(thing, GENERATOR_KINDS):
                if not _is(thing, random.SystemRandom):
                    yield thing
            elif len(below) < MOST_OBJECTS:
                inside = _inside(thing)
                below += [one for one in inside if one is not None and not _is(one, WITHOUT_PARTS)]
        level = sorted(below, key=lambda one: _is(one, CONTAINERS))  # large ones come last


def _is(thing: Any, kinds: type | tuple[type, ...]) -> bool:
    """Whether a thing's type is one of these. The thing is not asked: its `__class__` may raise."""
    return issubclass(type(thing), kinds)


def _inside(thing: Any) -> list[Any]:
    """What an object holds: items, attributes, slots (those of a partial, too), and its classes."""
    if _is(thing, ModuleType):
        return []
    if _is(thing, type):
        return [*vars(thing).values()]
    if _is(thing, FunctionType):
        return _named(thing)
    if _is(thing, BuiltinMethodType):
        return [thing.__self__]
    found: list[Any] = []
    with suppress(Exception):  # whatever somebody's objects raise
        if _is(thing, CONTAINERS):
            found += islice(thing.values() if _is(thing, dict) else thing, MOST_ITEMS)
        found += islice(getattr(thing, "__dict__", {}).values(), MOST_ITEMS)
    kinds = type(thing).__mro__[:-1]
    for descriptor in (one for kind in kinds for one in vars(kind).values()):
        if _is(descriptor, MemberDescriptorType):
            with suppress(AttributeError):  # a slot that is empty
                found.append(descriptor.__get__(thing))
    return [*found, *kinds]


def _named(function: FunctionType) -> list[Any]:
    """What a function has in its closure and defaults, and generators that it names.

    It may also name functions of its module, which are looked into.
    """
    found = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # an empty one
            found.append(cell.cell_contents)
    for name in function.__code__.co_names:
        one = function.__globals__.get(name)
        near = _is(one, FunctionType) and one.__module__ == function.__module__
        if near or _is(one, GENERATOR_KINDS):
            found.append(one)
    return found


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
