"""Notices that a loop was left before registered objects were updated, as they were before."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from hpc_train.training.group_values import mark_of

HABIT = 3  # batches; an object may be updated in every second one


class Updates:
    """Which registered objects change between the optimizer's step and the next batch.

    Schedulers and averaged models mostly do. It looks at their own numbers and the first tensors in
    them, which takes no time on a device. An object that shows nothing there never counts.

    Args:
        things: the registered objects, by name.
    """

    def __init__(self, things: Mapping[str, Any]) -> None:
        self.things = {n: one for n, one in things.items() if not isinstance(one, Optimizer)}
        self._stepped: dict[str, Any] | None = None  # marks after the last step of the batch
        self._always: set[str] | None = None  # the objects that were updated in all whole batches
        self._whole = 0  # number of these

    def note_step(self) -> None:
        """Remember the objects as they are after an optimizer's step."""
        self._stepped = self._marks()

    def end_batch(self) -> None:
        """Find the objects that were updated in a batch that is whole."""
        if self._stepped is not None:
            self._whole += 1
            found = self._changed(self._stepped)
            self._always = found if self._always is None else self._always & found
        self._stepped = None

    def missing(self) -> list[str]:
        """The objects that were updated in each batch before, but not in the one that was left."""
        if self._stepped is None or self._whole < HABIT:
            return []
        return sorted((self._always or set()) - self._changed(self._stepped))

    def _marks(self) -> dict[str, Any]:
        return {name: _marks_in(thing) for name, thing in self.things.items()}

    def _changed(self, since: Mapping[str, Any]) -> set[str]:
        return {name for name, marks in self._marks().items() if marks != since[name]}


def _marks_in(thing: Any) -> list[Any]:
    found = []
    for value in getattr(thing, "__dict__", {}).values():
        if isinstance(value, dict | list) and value:
            value = next(iter(value.values() if isinstance(value, dict) else value))
            found.append(mark_of(value) if isinstance(value, Tensor) else None)
        elif isinstance(value, Tensor) or type(value) in (int, float):
            found.append(mark_of(value))
    return found
