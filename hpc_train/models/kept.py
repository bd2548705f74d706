"""Keeps results that a recomputation takes in place of computing them again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from hpc_train.errors import UserError


class Results:
    """Results of one forward pass, in the order in which they were computed."""

    def __init__(self) -> None:
        self._kept: list[tuple[Tensor, int]] = []  # each with the number of its changes
        self._next: int | None = None  # the one to give out next; None while they are taken
        self._complete = False  # whether the forward pass has ended

    @contextmanager
    def taken(self) -> Iterator[None]:
        """A context of the forward pass, whose results are kept.

        Raises:
            UserError: the pass has changed a result in place.
        """
        with self._in_use():
            yield
        self._complete = True
        if any(result._version != version for result, version in self._kept):
            raise _changed()

    @contextmanager
    def given(self) -> Iterator[None]:
        """A context in which the forward pass is repeated with the kept results.

        Raises:
            UserError: the forward pass has not ended: a backward pass inside of it repeats it.
        """
        if not self._complete:
            raise UserError(
                "memory.recompute is selective, and a block computes gradients in its forward pass",
                "give full, which repeats the whole block",
            )
        self._next = 0
        with self._in_use():
            yield

    @contextmanager
    def _in_use(self) -> Iterator[None]:
        token = _in_use.set(self)
        try:
            yield
        finally:
            _in_use.reset(token)

    def keep(self, result: Tensor) -> Tensor:
        """Keep a result, and return it."""
        # Autograd will make the result a part of its graph. So another view of it is kept.
        self._kept.append((result.detach(), result._version))
        return result

    def take(self) -> Tensor | None:
        """The next of the kept results, or None if this is the pass whose results are kept."""
        if self._next is None:
            return None
        result, version = self._kept[self._next]
        self._next += 1
        if result._version != version:
            raise _changed()
        return result.detach()


def _changed() -> UserError:
    return UserError(
        "memory.recompute is selective, and the model changes a Linear's result in place",
        "give full, or let the model make a new tensor, as ReLU(inplace=False) does",
    )


_in_use: ContextVar[Results | None] = ContextVar("results in use", default=None)


def keeps() -> bool:
    """Whether results are kept, or given, in this pass."""
    return _results() is not None


def _results() -> Results | None:
    """The results of this pass; None if none are kept. In compiled code none are."""
    return None if torch.compiler.is_compiling() else _in_use.get()


def kept(compute: Callable[[], Tensor]) -> Tensor:
    """Compute what a function of autograd returns, or take it from the pass that has kept it.

    It is for the `forward` of an autograd function. The function must save the same tensors for
    its backward pass in both cases.
    """
    results = _results()
    if results is None:
        return compute()
    taken = results.take()
    return results.keep(compute()) if taken is None else taken


def kept_with_its_graph(function: Callable[..., Tensor], *inputs: Tensor, **options: Any) -> Tensor:
    """Compute a function of tensors, or take its result from the pass that has kept it.

    What the function saves for its backward pass is kept with the result. So it should save no more
    than the result and tensors that are kept anyway.
    """
    results = _results()
    if results is None:
        return function(*inputs, **options)
    taken = results.take()
    if taken is not None:
        return taken.requires_grad_(any(one.requires_grad for one in inputs))
    with saved_tensors_hooks(lambda saved: saved, lambda saved: saved):  # those nearest to it count
        return results.keep(function(*inputs, **options))
