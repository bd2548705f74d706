"""Initial values that any rank can make for any part of a tensor, the same on every layout.

An element's value depends on the seed, the tensor's name and the element's index only. It comes
from a counter-based generator, Philox: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3"
(SC11). Its 64 bits give two uniform numbers, and these a normal one by the transform of Box and
Muller, "A note on the generation of random normal deviates" (1958).
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import Parameter

from hpc_train.models.deferred import ModuleT, deferred, recipes_of
from hpc_train.seeds import mix
from hpc_train.sharding import SliceSpec

AT_ONCE = 1 << 20  # elements that a thread makes at once, so that little memory is needed besides
PER_COUNT = 4  # numbers of 64 bits that Philox makes of one count
LORA_A, LORA_B = "lora_a", "lora_b"  # how the names of adapters' parameters end (models.lora)


@dataclass(frozen=True)
class Initial:
    """How a tensor begins: normally distributed, or constant if `std` is 0.

    Args:
        mean: the mean.
        std: the standard deviation.
        blank: rows that begin as zeros all the same.
    """

    mean: float = 0.0
    std: float = 0.0
    blank: tuple[int, ...] = ()


def on_all_cores(work: Callable[[int], None], numbers: Sequence[int]) -> None:
    """Call a function for each number, in as many threads as torch may use.

    The function must release Python's lock while it works, as NumPy does.
    """
    threads = min(torch.get_num_threads(), len(numbers))
    if threads < 2:
        for number in numbers:
            work(number)
        return
    with ThreadPoolExecutor(threads, "initial values") as pool:
        for _ in pool.map(work, numbers):
            pass


class HasInitial(Protocol):
    """A model whose parameters can be filled part by part."""

    initial_seed: int
    """The seed of all initial values."""

    def initial(self, name: str) -> Initial:
        """How the parameter of this name begins."""


def normals(seed: int, name: str, begin: int, count: int) -> NDArray[np.float32]:
    """Elements `begin` to `begin + count` - 1 of a flat tensor of standard normal numbers."""
    generator = np.random.Philox(key=mix(seed, zlib.crc32(name.encode())))
    generator.advance(begin // PER_COUNT)
    spare = begin % PER_COUNT
    raw = generator.random_raw(count + spare)[spare:]
    one = (raw >> np.uint64(32)).astype(np.float32)
    two = (raw & np.uint64(0xFFFFFFFF)).astype(np.float32)
    one = (one + np.float32(1)) * np.float32(2.0**-32)  # above 0
    np.minimum(one, np.float32(1), out=one)
    two *= np.float32(2 * math.pi * 2.0**-32)
    np.log(one, out=one)
    one *= np.float32(-2)
    np.sqrt(one, out=one)
    np.cos(two, out=two)
    one *= two
    return one


def initial_of_adapter(name: str, shape: Sequence[int]) -> Initial | None:
    """How an adapter's parameter begins, whatever model has it; None for any other parameter.

    The results of A (R, K) have the variance of its inputs.
    """
    if name.endswith(f".{LORA_A}"):
        return Initial(std=shape[1] ** -0.5)
    return Initial() if name.endswith(f".{LORA_B}") else None


def initial_tensor(model: HasInitial, name: str, shape: Sequence[int]) -> Tensor:
    """The whole parameter of this name, float32, as `InitialValues` fills it."""
    return _whole(model.initial(name), model.initial_seed, name, shape)


def made_at_once(into: Tensor, name: str, seed: int) -> None:
    """Fill the whole parameter of an adapter in a model that has no seed of its own."""
    how = initial_of_adapter(name, into.shape)
    assert how is not None
    into.copy_(_whole(how, seed, name, into.shape))


def _whole(how: Initial, seed: int, name: str, shape: Sequence[int]) -> Tensor:
    made = torch.full(tuple(shape), how.mean, dtype=torch.float32)
    if how.std and made.numel():
        drawn = normals(seed, name, 0, made.numel()) * np.float32(how.std)
        made += torch.from_numpy(drawn).view(made.shape)
        made[list(how.blank)] = 0
    return made


class InitialValues:
    """The initial values of a model's parameters.

    Args:
        model: the model, or this rank's part of it.
        names: the name that each of its parameters has in the whole model, by its name in `model`.
        specs: the slice that `model` has of each parameter, by its name in `model`.
    """

    def __init__(
        self,
        model: nn.Module,
        names: Mapping[str, str] | None = None,
        specs: Mapping[str, SliceSpec] | None = None,
    ) -> None:
        self.model: HasInitial = model  # type: ignore[assignment]
        self._known: dict[Parameter, tuple[str, SliceSpec]] = {}
        for name, parameter in model.named_parameters():
            spec = (specs or {}).get(name, SliceSpec.whole(tuple(parameter.shape)))
            self._known[parameter] = ((names or {}).get(name, name), spec)

    def fill(self, parameter: Parameter, into: Tensor, first: int = 0) -> None:
        """Write rows of a parameter.

        Args:
            parameter: a parameter of the model.
            into: gets the rows; of any dtype, on the CPU.
            first: the number of the first of these rows in `parameter`.
        """
        name, spec = self._known[parameter]
        how = initial_of_adapter(name, spec.shape) or self.model.initial(name)
        if not how.std:
            into.fill_(how.mean)
            return
        width = math.prod(spec.shape[1:])
        rows = into.view(len(into), -1) if into.dim() else into.view(1, 1)
        at = first + (spec.start if spec.dim == 0 else spec.first)
        step = max(1, AT_ONCE // max(1, width))

        def write(begin: int) -> None:
            some = rows[begin : begin + step]
            made = normals(self.model.initial_seed, name, (at + begin) * width, len(some) * width)
            made *= np.float32(how.std)
            made += np.float32(how.mean)
            whole = torch.from_numpy(made).view(len(some), *spec.shape[1:])
            if spec.dim:
                whole = whole.narrow(spec.dim, spec.start, spec.stop - spec.start)
            some.copy_(whole.reshape(len(some), -1))

        on_all_cores(write, range(0, len(rows), step))
        for row in how.blank:
            if at <= row < at + len(rows):
                rows[row - at] = 0


class RecordedValues(InitialValues):
    """The values that a model's own code has given its parameters (see `models.deferred`).

    Args:
        model, names, specs: as for `InitialValues`.
    """

    def fill(self, parameter: Parameter, into: Tensor, first: int = 0) -> None:
        """Write rows of a parameter. A parameter that has its values already is copied."""
        name, spec = self._known[parameter]
        mine, recipe = parameter.detach(), recipes_of(self.model).get(name)
        if recipe is not None:
            mine = recipe.make()
            if mine.dim():
                mine = mine.narrow(spec.dim, spec.start, spec.stop - spec.start)
        into.copy_(mine[first : first + len(into)] if mine.dim() else mine)


def values_of(
    model: nn.Module, names: Mapping[str, str], specs: Mapping[str, SliceSpec]
) -> InitialValues:
    """The initial values of a model that has none yet. Arguments are as for `InitialValues`."""
    kind = InitialValues if hasattr(model, "initial_seed") else RecordedValues
    return kind(model, names, specs)


def fill(model: nn.Module) -> None:
    """Give all parameters of a whole model their initial values, unless it is built `unfilled`."""
    if _unfilled.get():
        return
    values = InitialValues(model)
    for parameter in model.parameters():
        values.fill(parameter, parameter.data)


def unfilled(build: type[ModuleT], dtype: torch.dtype, **arguments: object) -> ModuleT:
    """Build a model whose parameters have no values yet, and so take no memory yet.

    Args:
        build: the model's class, whose constructor calls `fill`.
        dtype: the type of its parameters.
        arguments: the constructor's.
    """
    token = _unfilled.set(True)
    try:
        return deferred(partial(build, **arguments), dtype)[0]
    finally:
        _unfilled.reset(token)


_unfilled: ContextVar[bool] = ContextVar("models are built without values", default=False)
