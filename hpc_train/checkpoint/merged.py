"""A checkpoint's model as a plain model has it: adapters are merged into the weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from hpc_train.checkpoint.fileformat import Entry
from hpc_train.checkpoint.restore import Tensors
from hpc_train.checkpoint.state import COMPLEX, MODEL
from hpc_train.models.initial import LORA_A, LORA_B
from hpc_train.models.lora import LoraAdapters


class MergedTensors:
    """Reads the tensors of a checkpoint's model by the model's names, as `Tensors` does.

    Args:
        path: the checkpoint.

    Attributes:
        about: the checkpoint's `about`.
        pairs: the names of tensors of complex128, which are pairs of float64 here.
        further: further names of tensors, each with the first name.
        extra: what modules keep beside tensors (`get_extra_state`), by its name in `state_dict`.
        adapters: the adapters that are merged, if the model has any.
        entries: the tensors but for those of adapters, by name, in the file's order.

    Raises:
        HpcTrainError: as `Tensors`. Each access may raise it, too.
    """

    def __init__(self, path: Path) -> None:
        self.saved = Tensors(path)
        state = self.saved.state()
        self.about: Mapping[str, Any] = state.get("about", {})
        self.extra: Mapping[str, Any] = state.get("extra_state", {})
        told = {n.removeprefix(MODEL): value for n, value in state.get("model", {}).items()}
        self.pairs = {name for name, value in told.items() if value == COMPLEX}
        self.further = {n: v.removeprefix(MODEL) for n, v in told.items() if v != COMPLEX}
        self.adapters = LoraAdapters.of(self.about)
        layers = self.adapters.layers if self.adapters else ()
        self.adapted = {f"{layer}.weight" for layer in layers}
        apart = {f"{MODEL}{layer}.{own}" for layer in layers for own in (LORA_A, LORA_B)}
        self.entries: dict[str, Entry] = {
            name.removeprefix(MODEL): entry
            for name, entry in self.saved.entries.items()
            if name.startswith(MODEL) and name not in apart
        }

    def __getitem__(self, name: str) -> Tensor:
        tensor = self.saved[MODEL + name]
        if self.adapters is None or name not in self.adapted:
            return tensor
        return self.adapters.merged(tensor, *self.adapter(name.removesuffix(".weight")))

    def adapter(self, layer: str) -> tuple[Tensor, Tensor]:
        """The matrices A (R, K) and B (N, R) beside a layer's weight."""
        a, b = (self.saved[f"{MODEL}{layer}.{own}"] for own in (LORA_A, LORA_B))
        return a, b
