"""Loads the model of a checkpoint of `hpc-train train`, to use it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from hpc_train.checkpoint import restore, state
from hpc_train.checkpoint.catalogue import newest
from hpc_train.errors import CheckpointMismatch
from hpc_train.models.kinds import SHAPES
from hpc_train.models.lora import LoraAdapters
from hpc_train.models.shape import Shape
from hpc_train.mpi.agreement import agreed, from_first
from hpc_train.mpi.group import Group

Reads = Literal["text", "tables"]


@dataclass(frozen=True, eq=False)
class TrainedModel:
    """A model with its trained weights, in eval mode.

    Args:
        module: the model.
        shape: its shape.
        about: what the training has written down for readers of its checkpoints.
        hashes: the hashes of the file's content.
    """

    module: nn.Module
    shape: Shape
    about: Mapping[str, Any]
    hashes: bytes


def load_model(
    checkpoint: str | Path, reads: Reads, device: torch.device, group: Group
) -> TrainedModel:
    """Load the whole model of a checkpoint on each rank. Collective.

    Args:
        checkpoint: a checkpoint file, or a run directory, whose newest checkpoint is loaded.
        reads: what the model has to read.
        device: the device that this rank computes on.
        group: the ranks that load it. The file is read once, whatever their number.

    Raises:
        CheckpointError: the checkpoint is damaged; on all ranks.
        CheckpointMismatch: there is no checkpoint, or it holds another kind of model, or one that
            has not learned to predict; on all ranks.
    """
    path = from_first(group, lambda: newest(Path(checkpoint)))
    reader = restore.open_together(path, group)
    saved = restore.load_state(reader, group)
    with agreed(group):
        _check(path, saved, reads)
        about = saved["about"]
        shape = SHAPES[about["kind"]].from_tree(about["shape"])
        module: nn.Module = shape.build()
        if (adapters := LoraAdapters.of(about)) is not None:
            adapters.add_to(module)
        module.to(device, getattr(torch, about["dtype"]))
    restore.load_tensors(reader, state.model_tensors(module, {}), group, alike=group)
    return TrainedModel(module.eval(), shape, about, reader.table)


def _check(path: Path, saved: Mapping[str, Any], reads: Reads) -> None:
    about: Mapping[str, Any] = saved["about"]
    kind = about.get("kind")
    if kind not in SHAPES:
        raise CheckpointMismatch(
            f"{path} does not hold a model of `hpc-train train`",
            "give a checkpoint, or a run directory, of one",
        )
    of_tables = "features" in about
    if reads == "text" and of_tables:
        raise CheckpointMismatch(
            f"{path} does not hold a language model: model.kind is {kind}, a model of tables",
            "`hpc-train predict` predicts with it",
        )
    if reads == "tables" and not of_tables:
        raise CheckpointMismatch(
            f"{path} does not hold a model of tables: model.kind is {kind}",
            "`hpc-train generate` writes text with it",
        )
    pretraining = saved["identity"].get("model.pretraining", "none")
    if pretraining != "none":
        raise CheckpointMismatch(
            f"{path} holds a model that is only pretrained, by model.pretraining {pretraining}, "
            "and predicts no target",
            "train a model from it first: give it as checkpoint.weights",
        )
