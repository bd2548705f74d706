"""What belongs into a checkpoint besides model and optimizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from hpc_train.checkpoint.fileformat import Entry, LocalTensor


class Stateful(Protocol):
    """Has a few numbers that belong to a run's state."""

    def state_dict(self) -> dict[str, Any]:
        """The numbers: plain JSON values, the same on all ranks and layouts."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from such numbers."""


class ExtraState:
    """What else a checkpoint holds; this one nothing. All ranks call each method."""

    def unify(self) -> None:
        """Bring all ranks to the state that is saved; training goes on from it as well."""

    def collect(self) -> dict[str, LocalTensor]:
        """The tensors to save, after `unify`."""
        return {}

    def expect(self, entries: Mapping[str, Entry]) -> dict[str, LocalTensor]:
        """Memory for those of a checkpoint's tensors that this rank wants."""
        return {}

    def values(self) -> dict[str, Any]:
        """Numbers to save: plain JSON values, the same on all ranks."""
        return {}

    def take(self, values: Mapping[str, Any]) -> None:
        """Go on with the tensors of `expect`, which have been filled, and with saved `values`."""


class Together(ExtraState):
    """Several such things as one. Each has names of its own for tensors and values.

    Args:
        parts: of it, in the order in which they are brought to one state and restored.
    """

    def __init__(self, parts: Sequence[ExtraState]) -> None:
        self.parts = parts

    def unify(self) -> None:
        """Of all parts."""
        for part in self.parts:
            part.unify()

    def collect(self) -> dict[str, LocalTensor]:
        """Of all parts."""
        return {name: held for part in self.parts for name, held in part.collect().items()}

    def expect(self, entries: Mapping[str, Entry]) -> dict[str, LocalTensor]:
        """Of all parts."""
        return {name: held for part in self.parts for name, held in part.expect(entries).items()}

    def values(self) -> dict[str, Any]:
        """Of all parts."""
        return {name: value for part in self.parts for name, value in part.values().items()}

    def take(self, values: Mapping[str, Any]) -> None:
        """Every part is given all values."""
        for part in self.parts:
            part.take(values)
