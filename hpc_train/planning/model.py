"""The model of a configuration: its shape, and how the layout divides it."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from hpc_train.config import DataSection, ModelSection, ParallelSection, RunConfig
from hpc_train.data import manifest as manifests
from hpc_train.errors import ConfigError, DataError
from hpc_train.models.kinds import SHAPES
from hpc_train.models.shape import Division, Shape


def shape_of(section: ModelSection, vocab: int) -> Shape:
    """The shape of a configuration's model with this vocabulary size."""
    sizes = asdict(section) | {"vocab": vocab}
    return SHAPES[sizes.pop("kind")](**sizes)


def planned_shape(config: RunConfig) -> Shape:
    """The shape of a model before training. The vocabulary is model.vocab, or the data's.

    Raises:
        ConfigError: neither is known, or `check_one_length` has failed.
    """
    check_one_length(config.data)
    if config.model.vocab is not None:
        return shape_of(config.model, config.model.vocab)
    if not config.data.folders:
        raise ConfigError("the vocabulary size is not known", "give model.vocab, or data.path")
    try:
        found = manifests.read_manifests([Path(folder) for folder in config.data.folders])
        return shape_of(config.model, found[0].vocab)
    except DataError as error:
        raise ConfigError(
            f"the vocabulary size is not known: {error.cause}", "give model.vocab"
        ) from None


def check_one_length(section: DataSection) -> None:
    """Check that micro-batches are not cut by length: all samples of prepared text have one.

    Raises:
        ConfigError: they are.
    """
    if section.micro_tokens is not None:
        raise ConfigError(
            "data.micro_tokens is given, but all samples of prepared text have one length",
            "give data.micro_batch",
        )


def division_of(section: ParallelSection) -> Division:
    """How a layout's tensor and pipeline ranks divide the model."""
    return Division(
        tp=section.tp,
        pp=section.pp,
        virtual_stages=section.stages_per_rank,
        sequence_parallel=section.sequence_parallel,
    )
