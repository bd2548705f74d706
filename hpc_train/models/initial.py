"""Initial values that any rank can make for any part of a tensor, the same on every layout.

An element's value depends on the seed, the tensor's name and the element's index only. It comes
from a counter-based generator, Philox: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3"
(SC11). Its 64 bits give two uniform numbers, and these a normal one by the transform of Box and
Muller, "A note on the generation of random normal deviates" (1958).
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode

from hpc_train.seeds import mix
from hpc_train.sharding import SliceSpec

ModuleT = TypeVar("ModuleT", bound=nn.Module)

AT_ONCE = 1 << 20  # elements that are made at once, so that little memory is needed besides
PER_COUNT = 4  # numbers of 64 bits that Philox makes of one count


@dataclass(frozen=True)
class Initial:
    """How a tensor begins: normally distributed, or constant if `std` is 0."""

    mean: float = 0.0
    std: float = 0.0


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
        how = self.model.initial(name)
        if not how.std:
            into.fill_(how.mean)
            return
        width = math.prod(spec.shape[1:])
        rows = into.view(len(into), -1) if into.dim() else into.view(1, 1)
        at = first + (spec.start if spec.dim == 0 else spec.first)
        step = max(1, AT_ONCE // max(1, width))
        for begin in range(0, len(rows), step):
            some = rows[begin : begin + step]
            made = normals(self.model.initial_seed, name, (at + begin) * width, len(some) * width)
            made *= np.float32(how.std)
            made += np.float32(how.mean)
            whole = torch.from_numpy(made).view(len(some), *spec.shape[1:])
            if spec.dim:
                whole = whole.narrow(spec.dim, spec.start, spec.stop - spec.start)
            some.copy_(whole.reshape(len(some), -1))


def fill(model: nn.Module) -> None:
    """Give all parameters of a whole model their initial values, unless it is built `unfilled`."""
    if _unfilled.get():
        return
    values = InitialValues(model)
    for parameter in model.parameters():
        values.fill(parameter, parameter.data)


def unfilled(build: type[ModuleT], dtype: torch.dtype, **arguments: object) -> ModuleT:
    """Build a model whose parameters have no values yet, and so take no memory yet.

    The operating system gives memory to a page when it is first written. torch's device `meta`
    would do as well, but using it loads what compiles models, which takes longer than training
    takes to begin.

    Args:
        build: the model's class, whose constructor calls `fill`.
        dtype: the type of its parameters.
        arguments: the constructor's.
    """
    token, usual = _unfilled.set(True), torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with _as_allocated(), _WithoutWrites():
            model = build(**arguments)
    finally:
        torch.set_default_dtype(usual)
        _unfilled.reset(token)
    model.unfilled = True  # type: ignore[assignment]
    return model


_unfilled: ContextVar[bool] = ContextVar("models are built without values", default=False)


class _WithoutWrites(TorchFunctionMode):
    """Leaves out all that would write to a tensor in place, as modules do when they are made."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name.endswith("_") and not name.startswith("__") and name != "requires_grad_":
            return args[0] if args else next(iter((kwargs or {}).values()))
        return func(*args, **(kwargs or {}))


@contextmanager
def _as_allocated() -> Iterator[None]:
    """A context in which torch does not fill new memory, as deterministic algorithms have it do."""
    settings: Any = torch.utils.deterministic
    fills = settings.fill_uninitialized_memory
    settings.fill_uninitialized_memory = False
    try:
        yield
    finally:
        settings.fill_uninitialized_memory = fills


def untouched(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A tensor on the CPU to which nothing has been written, not even by torch."""
    with _as_allocated():
        return torch.empty(shape, dtype=dtype)


def is_unfilled(model: nn.Module) -> bool:
    """Whether a model's parameters have no values yet."""
    return getattr(model, "unfilled", False) is True
