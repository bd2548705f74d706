"""Scores of held-out samples, and how the rows that they need are collected from all ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from hpc_train.collectives import Collectives
from hpc_train.errors import UserError
from hpc_train.mpi.agreement import agreed, from_first
from hpc_train.mpi.group import Group

ComputeScores = Callable[[Mapping[str, np.ndarray]], Mapping[str, float | None]]
SampleParts = Sequence[tuple[Sequence[int], Mapping[str, Tensor]]]
"""Numbers of samples, and tensors of theirs by name; each sample is that of one rank."""


ROWS_ALIKE = 0.01  # rows of tensor-parallel ranks may differ by this share of their norm


class Collector(Protocol):
    """Collects rows of held-out samples from all ranks, and computes scores of them."""

    def add(self, parts: SampleParts) -> None:
        """Add samples of every rank. Collective."""

    def scores(self) -> dict[str, float]:
        """The scores of all samples, on all ranks. Collective."""

    def close(self) -> None:
        """Free what it holds."""


class Scoring(Protocol):
    """What is computed from held-out samples besides their mean loss."""

    def measure(self, model: nn.Module, batch: Any) -> tuple[Tensor, Mapping[str, Tensor]]:
        """The loss of a batch, and tensors by name that have a row for each of its samples."""

    def collector(self, group: Group) -> Collector:
        """What collects these rows of all ranks of a job. Collective."""


@dataclass(frozen=True, eq=False)
class HeldOutScores:
    """What is computed from all held-out samples besides their mean loss.

    Rank 0 holds the arrays of all samples of a pass, so their size and the number of held-out
    samples, or of those of `data.validation_batches`, decide the memory that this takes.

    Args:
        measure: a function of the model and a batch. It takes the place of the task's loss on
            held-out samples. It returns that loss, and tensors by name that have a row for each
            sample of the batch, such as predictions and targets.
        compute: a function of these tensors as NumPy arrays, which have the rows of all samples in
            the order of their numbers. It returns scores by name. Those that are None are left out,
            and `metrics.jsonl` has null for those that are not finite. It is called on rank 0 only,
            so it must not call a collective.
    """

    measure: Callable[[nn.Module, Any], tuple[Tensor, Mapping[str, Tensor]]]
    compute: ComputeScores

    def collector(self, group: Group) -> GatheredRows:
        """What collects the rows of all samples. Collective."""
        return GatheredRows(group, self.compute)


class GatheredRows:
    """Gathers arrays of samples on rank 0, and computes scores of them.

    Args:
        group: all ranks of the job.
        compute: computes the scores of the rows of all samples.
    """

    def __init__(self, group: Group, compute: ComputeScores) -> None:
        self.group, self.compute = group, compute
        self._parts: list[tuple[np.ndarray, dict[str, np.ndarray]]] = []  # on rank 0

    def add(self, parts: SampleParts) -> None:
        """Add samples of every rank. Collective.

        Args:
            parts: numbers of samples, and their tensors by name. Each sample is that of one rank.

        Raises:
            UserError: a tensor does not have one row for each sample; on all ranks.
        """
        with agreed(self.group):
            mine = [
                (np.asarray(numbers, np.int64), as_arrays(tensors, len(numbers)))
                for numbers, tensors in parts
            ]
        for found in self.group.gathered_by_first(mine, "the predictions of held-out samples"):
            self._parts += found

    def scores(self) -> dict[str, float]:
        """The scores that `compute` makes of all samples, on all ranks. Collective.

        Raises:
            HpcTrainError: `compute` has failed or returned no scores; on all ranks.
        """

        def computed() -> dict[str, float]:
            numbers = np.concatenate([some for some, _ in self._parts])
            places = np.empty_like(numbers)
            places[np.argsort(numbers, kind="stable")] = np.arange(len(numbers))
            arrays = {name: self._in_order(name, places) for name in [*self._parts[0][1]]}
            return as_numbers(self.compute(arrays))

        return from_first(self.group, computed)

    def close(self) -> None:
        """Forget the samples."""
        self._parts.clear()

    def _in_order(self, name: str, places: np.ndarray) -> np.ndarray:
        """The rows of this name, each at its place. Frees the parts that they came in."""
        first = self._parts[0][1][name]
        array, begin = np.empty((len(places), *first.shape[1:]), first.dtype), 0
        for numbers, rows in self._parts:
            array[places[begin : begin + len(numbers)]] = rows.pop(name)
            begin += len(numbers)
        return array


def defined(scores: Mapping[str, float | None]) -> dict[str, float]:
    """The scores that are numbers, and finite."""
    return {name: number for name, number in as_numbers(scores).items() if math.isfinite(number)}


def check_rows_alike(rows: Sequence[Mapping[str, Tensor]], tensor: Collectives) -> None:
    """Check that tensor-parallel ranks have the same rows. Collective over these ranks.

    Args:
        rows: of the micro-batches; none on ranks whose stage is not the last.
        tensor: of the tensor-parallel ranks.

    Raises:
        HpcTrainError: they differ, or a rank has failed; on all ranks of the group.
    """
    if tensor.group.size == 1 or not rows:
        return
    with agreed(tensor.group):
        real = [one.detach().resolve_conj() for one in _tensors(rows)]
        real = [torch.view_as_real(one) if one.is_complex() else one for one in real]
        forms = repr([(tuple(one.shape), one.dtype) for one in real])
    alike = len({*tensor.group.gathered(forms, "the forms of rows")}) == 1
    for one in real if alike else []:  # each by itself: large numbers of one would hide another
        with agreed(tensor.group):
            mine = one.double().flatten().nan_to_num(0.0, 0.0, 0.0)
            first = mine.clone()
        tensor.broadcast_(first)
        with agreed(tensor.group):
            largest = max(float(mine.norm()), float(first.norm()))
            alike &= float((mine - first).norm()) <= ROWS_ALIKE * largest
    if tensor.group.smallest(int(alike)) == 0:
        raise UserError(
            "the rows that `measure` of the task's scores returns differ between the ranks of "
            "parallel.tp",
            "the model's outputs have only the rank's part of the vocabulary or the width: give "
            "its last layer no style in `tensor_plan`, or return rows of whole tensors",
        )


def _tensors(rows: Sequence[Mapping[str, Tensor]]) -> list[Tensor]:
    """The tensors among the rows; what else is there is refused later."""
    return [
        one
        for own in rows
        if isinstance(own, Mapping)
        for one in own.values()
        if isinstance(one, Tensor)
    ]


def as_numbers(scores: Mapping[str, float | None]) -> dict[str, float]:
    """The scores that are not None, as numbers.

    Raises:
        UserError: these are no scores by name.
    """
    if not isinstance(scores, Mapping):
        raise UserError(
            f"`compute` of the task's scores returned a value of type {type(scores).__name__}",
            "let it return a dict of numbers by name",
        )
    return {name: _number(name, one) for name, one in scores.items() if one is not None}


def _number(name: str, score: Any) -> float:
    try:
        return float(score.item() if hasattr(score, "item") else score)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise UserError(
            f"`compute` of the task's scores returned a value of type {type(score).__name__} for "
            f"{name!r}, which is no number",
            "let it return one number for each name, or None",
        ) from None


def as_arrays(tensors: Mapping[str, Tensor], samples: int) -> dict[str, np.ndarray]:
    """Tensors as arrays of their own, checked to have a row for each sample.

    Raises:
        UserError: one has not.
    """
    found = {}
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor) or tensor.ndim < 1 or len(tensor) != samples:
            shape = [*tensor.shape] if isinstance(tensor, Tensor) else type(tensor).__name__
            raise UserError(
                f"`measure` of the task's scores returned {shape} for {name!r} of {samples} "
                "samples",
                "let it return tensors with one row for each sample",
            )
        plain = tensor.detach().cpu()
        # NumPy has no bfloat16.
        found[name] = np.array((plain.float() if plain.dtype == torch.bfloat16 else plain).numpy())
    return found
