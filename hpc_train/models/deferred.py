"""Models whose parameters get their memory and their values later, part by part.

A model's own code builds it. Meanwhile what `torch.empty` returns gets no memory, because the
operating system gives memory to a page when it is first written. What the code then writes there
with functions of torch, such as `nn.init.normal_`, is recorded, and can be repeated later for one
tensor at a time. Random numbers of a repeated write come from a seed of its own, so they are the
same wherever and whenever it is repeated. If the code reads such a tensor, or does anything else
that is not known here, the tensor gets its values at once.

torch's device `meta` would save the memory, too. But it does not know which values a tensor was
given, and using it loads what compiles models, which takes longer than training takes to begin.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from hpc_train.errors import UserError, size_text
from hpc_train.seeds import mix

ModuleT = TypeVar("ModuleT", bound=nn.Module)

RECIPES = "_hpc_train_recipes"  # the attribute of a model that has its recipes
EMPTY = {
    "empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided",
}  # fmt: skip
# What neither reads nor writes a tensor's elements; __get__ and __set__ are those of properties.
HARMLESS = {
    "__get__", "__set__", "__len__", "__hash__", "_has_compatible_shallow_copy_type",
    "_make_subclass", "as_strided", "chunk",
    "detach", "diagonal", "dim", "element_size", "expand", "expand_as", "get_device",
    "is_complex", "is_contiguous", "is_floating_point", "is_pinned", "is_same_size", "movedim",
    "narrow", "ndimension", "nelement", "numel", "permute", "register_hook", "requires_grad_",
    "select", "size", "split", "squeeze", "storage_offset", "stride", "swapaxes", "swapdims", "t",
    "transpose", "unbind", "unsqueeze", "view_as",
}  # fmt: skip
ROW_MAJOR = torch.preserve_format, torch.contiguous_format
VIEWS_OR_COPIES = {"contiguous", "flatten", "reshape", "unflatten", "view"}
UNCHANGING = bool, int, float, complex, str, type(None), slice, type(...)
WRITES = {
    "__setitem__", "add_", "bernoulli_", "cauchy_", "clamp_", "constant_", "div_", "erfinv_",
    "exp_", "exponential_", "fill_", "geometric_", "kaiming_normal_", "kaiming_uniform_",
    "log_normal_", "mul_", "neg_", "normal_", "ones_", "random_", "sub_", "trunc_normal_",
    "uniform_", "xavier_normal_", "xavier_uniform_", "zero_", "zeros_",
}  # fmt: skip


@dataclass(frozen=True)
class StridedPlace:
    """Where the elements of a tensor lie in its memory, in elements."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: Tensor) -> StridedPlace:
        """The place of a tensor."""
        return cls(tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))

    def of_memory(self, flat: Tensor) -> Tensor:
        """The elements in this memory."""
        return flat.as_strided(self.size, self.stride, self.offset)


@dataclass(frozen=True, eq=False)
class Write:
    """A call that writes to some elements of a tensor.

    Args:
        function: is called with those elements as its first argument, and with `args` and `how`.
        place: where the elements lie in the memory of the tensor.
        seed: the seed of the random numbers that it draws.
    """

    function: Callable[..., Any]
    args: Sequence[Any]
    how: Mapping[str, Any]
    place: StridedPlace
    seed: int

    def repeat(self, flat: Tensor) -> None:
        """Write to memory that holds what the earlier writes have written."""
        torch.default_generator.manual_seed(self.seed)  # the GPUs' generators stay as they are
        self.function(self.place.of_memory(flat), *self.args, **self.how)

    def describe(self) -> str:
        """All that decides what is written, as text."""
        name = getattr(self.function, "__name__", "")
        return repr((name, self.args, dict(self.how), self.place, self.seed))


@dataclass(eq=False)
class Unwritten:
    """Memory without values, and what has to be written there.

    Args:
        storage: the memory. It is kept so that no other tensor gets its address.
        dtype: the type of the elements.
        writes: in order.
    """

    storage: torch.UntypedStorage
    dtype: torch.dtype
    writes: list[Write] = field(default_factory=list)

    def flat(self) -> Tensor:
        """The memory as a tensor of one dimension."""
        return torch.empty(0, dtype=self.dtype).set_(self.storage)


@dataclass(frozen=True, eq=False)
class Recipe:
    """How a parameter gets its values.

    Args:
        elements: number of elements of the memory that it lies in.
        dtype: the type of the elements.
        writes: what has to be written to that memory, in order.
        place: where the parameter lies in that memory.
    """

    elements: int
    dtype: torch.dtype
    writes: Sequence[Write]
    place: StridedPlace

    def describe(self) -> str:
        """All that decides the values, as text."""
        return repr(
            (self.elements, self.dtype, self.place, [write.describe() for write in self.writes])
        )

    def make(self) -> Tensor:
        """The whole parameter, with its values. The state of torch's generator stays."""
        flat = untouched([self.elements], self.dtype)
        _repeat(self.writes, flat)
        return self.place.of_memory(flat)


def _repeat(writes: Sequence[Write], flat: Tensor) -> None:
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        for write in writes:
            write.repeat(flat)


OF_MEMORY = ("untyped_storage", "__torch_dispatch__")
"""Methods that a tensor with memory of its own does not change."""


class Deferring(TorchFunctionMode):
    """A context in which tensors get no values yet, where that is possible.

    Args:
        seed: the seed of all random numbers that are drawn later.

    Attributes:
        blanks: the memory without values, by address.
        because: why tensors got their values at once, by the address of their memory.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed, self.drawn = seed, 0
        self.blanks: dict[int, Unwritten] = {}
        self.because: dict[int, str] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call a function of torch, or record the call."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in EMPTY:
            return self._empty(func, args, kwargs)
        found = {at: t for t in tree_leaves((args, kwargs)) if (at := self._blank_of(t))}
        if not found or name in HARMLESS or (name == "__getitem__" and _basic(args[1])):
            return func(*args, **kwargs)
        if name in WRITES and self._recorded(func, args, kwargs):
            return None if name == "__setitem__" else (args[0] if args else kwargs["tensor"])
        if name == "clone" and kwargs.get("memory_format") in (None, *ROW_MAJOR):
            source = args[0] if args else kwargs["input"]
            if _has_own_memory(source):
                return self._clone(source)
        if name in VIEWS_OR_COPIES:
            result = func(*args, **kwargs)
            if isinstance(result, Tensor) and self._blank_of(result) in found:
                return result  # nothing was copied
        for at in found:
            self.because[at] = f"`{name}` needs their values"
            self._give_values(self.blanks.pop(at))
        return func(*args, **kwargs)

    def _empty(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        with _as_allocated():
            made = func(*args, **kwargs)
        plain = isinstance(made, Tensor) and made.device.type == "cpu"
        if plain and made.layout is torch.strided and made.untyped_storage().nbytes():
            storage = made.untyped_storage()
            self.blanks[storage.data_ptr()] = Unwritten(storage, made.dtype)
        return made

    def _blank_of(self, thing: object) -> int:
        """The address of the memory of a tensor without values; 0 for all else."""
        if not isinstance(thing, Tensor) or thing.layout is not torch.strided or is_lazy(thing):
            return 0
        at = thing.untyped_storage().data_ptr()
        return at if at in self.blanks else 0

    def _recorded(self, func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
        """Record a write, if it can be repeated later."""
        rest = {key: value for key, value in kwargs.items() if key != "tensor"}
        target: Tensor = args[0] if args else kwargs["tensor"]
        more = args[1:]
        at = self._blank_of(target)
        # What is kept must not change later, and has to be the same text on all ranks.
        if not at or not all(isinstance(other, UNCHANGING) for other in tree_leaves((more, rest))):
            return False
        blank, name = self.blanks[at], func.__name__
        if target.dtype != blank.dtype or (name == "__setitem__" and not _basic(more[0])):
            return False
        # A mistake of the model's code is an error here, on all ranks, and not when it is repeated.
        if name == "__setitem__":
            target[more[0]]
        else:
            func(target.new_zeros([min(2, size) for size in target.shape]), *more, **rest)
        self.drawn += 1
        blank.writes.append(
            Write(func, more, rest, StridedPlace.of(target), mix(self.seed, self.drawn))
        )
        return True

    def _clone(self, source: Tensor) -> Tensor:
        """A copy that gets the values of its source, as modules make of their layers."""
        with _as_allocated():
            copy = torch.empty_like(source)
        storage = copy.untyped_storage()
        writes = self.blanks[self._blank_of(source)].writes
        self.blanks[storage.data_ptr()] = Unwritten(storage, copy.dtype, [*writes])
        return copy

    def _give_values(self, blank: Unwritten) -> None:
        _repeat(blank.writes, blank.flat())

    def recipes(self, model: nn.Module) -> dict[str, Recipe]:
        """The recipes of the parameters without values. Of several names, the first one is taken.

        All other tensors get their values, wherever the model's code has put them. So do parameters
        whose memory other tensors have, too.

        Raises:
            UserError: a parameter is never given values, or as `check_has_memory`.
        """
        check_has_memory(model)
        found, tensors = {}, self._tensors()
        for name, parameter in model.named_parameters():
            blank = self.blanks.get(self._blank_of(parameter.data))
            if blank is None:
                continue
            if not blank.writes:
                raise UserError(
                    f"parameter {name} of the model is never given values",
                    "fill it when the model is built, for instance with torch.nn.init",
                )
            at, nbytes = blank.storage.data_ptr(), blank.storage.nbytes()
            if tensors[at] == 1 and parameter.nbytes >= nbytes:
                elements = nbytes // blank.dtype.itemsize
                found[name] = Recipe(
                    elements, blank.dtype, blank.writes, StridedPlace.of(parameter)
                )
        owned = {self._blank_of(model.get_parameter(name).data) for name in found}
        for at in [at for at in self.blanks if at not in owned]:
            blank = self.blanks.pop(at)
            if tensors[at]:
                self.because[at] = "other tensors have their memory, too"
                self._give_values(blank)
        return found

    def _tensors(self) -> Counter[int]:
        """How many tensors have each memory without values, by its address, wherever they are."""
        if count := getattr(torch._C, "_storage_Use_Count", None):
            every = self.blanks.items()
            return Counter({at: count(blank.storage._cdata) - 1 for at, blank in every})
        # Builds of torch for CPUs have that count only in newer versions, not in 2.7.
        alive = [one for one in gc.get_objects() if issubclass(type(one), Tensor)]
        found = Counter[int]()
        for one in alive:
            # Others stand for tensors, as those that torch.compile computes with, and gradients
            # that would be averaged if they were asked.
            with suppress(RuntimeError):
                if all(getattr(type(one), n) is getattr(Tensor, n) for n in OF_MEMORY):
                    found[self._blank_of(one)] += 1
        return found

    def describe_whole(self, model: nn.Module) -> str:
        """What says which parameters have values already, and why; "" if none has."""
        whole = [(n, p) for n, p in model.named_parameters() if not self._blank_of(p.data)]
        if not whole:
            return ""
        name, parameter = max(whole, key=lambda one: one[1].nbytes)
        at, made = parameter.untyped_storage().data_ptr(), "they were not made with `torch.empty`"
        nbytes = sum(p.nbytes for _, p in whole)
        return (
            f"every rank built {size_text(nbytes)} of parameters whole, because "
            f"{self.because.get(at, made)} (the largest is {name})"
        )


def check_has_memory(
    model: nn.Module,
    remedy: str = "build it without that device; a model that is given as a class or function "
    "takes no memory before it is filled (docs/how-to/memory.md)",
) -> None:
    """Check that a model's parameters and buffers have a shape, and memory.

    Args:
        model: the model.
        remedy: what to do about the device meta.

    Raises:
        UserError: one has none. The message names it.
    """
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if is_lazy(tensor):
            raise UserError(
                f"{name} of the model has no shape yet",
                "call the model with a batch before you pass it on, or use no lazy modules",
            )
        if tensor.is_meta:
            raise UserError(
                f"{name} of the model is on the device meta, and has no values",
                remedy,
            )


def _basic(index: object) -> bool:
    """Whether indexing with this returns a view."""
    several = index if isinstance(index, tuple) else (index,)
    return all(one is None or one is ... or type(one) in (int, slice) for one in several)


def _has_own_memory(tensor: Tensor) -> bool:
    """Whether a tensor is all of the memory that it lies in, and a copy has the same strides."""
    whole = tensor.nbytes == tensor.untyped_storage().nbytes()
    return whole and tensor.is_contiguous() and not tensor.storage_offset()


def deferred(
    build: Callable[[], ModuleT], dtype: torch.dtype, seed: int = 0
) -> tuple[ModuleT, str]:
    """Build a model whose parameters have no values yet, where that is possible.

    Args:
        build: the model's class, or a function that returns it.
        dtype: the type of tensors that `build` gives no type.
        seed: the seed of the random numbers that are drawn later.

    Returns:
        The model, and in words which parameters have values already, and why.

    Raises:
        UserError: as `Deferring.recipes`, or `build` returns something else.
    """
    usual, mode = torch.get_default_dtype(), Deferring(seed)
    torch.set_default_dtype(dtype)
    try:
        with mode:
            model = build()
    finally:
        torch.set_default_dtype(usual)
    if not isinstance(model, nn.Module):
        raise UserError(
            f"the function that builds the model returns a {type(model).__name__}",
            "let it return a torch.nn.Module",
        )
    setattr(model, RECIPES, mode.recipes(model))
    return model, mode.describe_whole(model)


def recipes_of(model: object) -> dict[str, Recipe]:
    """The recipes of a model's parameters that have no values yet, by name in the whole model."""
    return getattr(model, RECIPES, {})


def forget_recipes(model: nn.Module) -> None:
    """Note that all parameters of a model have values."""
    setattr(model, RECIPES, {})


def is_unfilled(model: nn.Module) -> bool:
    """Whether parameters of a model have no values yet."""
    return bool(recipes_of(model))


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
