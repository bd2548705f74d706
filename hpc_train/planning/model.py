"""The model of a configuration: its shape, and how the layout divides it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from hpc_train.config import DataSection, ModelSection, ParallelSection, RunConfig
from hpc_train.data import manifest as manifests
from hpc_train.errors import ConfigError, DataError
from hpc_train.models.kinds import SHAPES
from hpc_train.models.shape import Division, PartCost, Shape


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


def trained_parameters(
    config: RunConfig, shape: Shape, parts: Sequence[PartCost]
) -> Sequence[float]:
    """The parameters of each part that are trained on a rank, as section finetune says.

    With patterns nobody knows without the model, so all are counted. Adapters are counted as if all
    of a block's matrices had one.

    Args:
        config: the configuration.
        shape: the sizes of the model.
        parts: the costs of its parts under the layout.
    """
    chosen = config.finetune
    if not chosen.active or chosen.patterns:
        return [part.parameters for part in parts]
    share = shape.low_rank(chosen.lora) / config.parallel.tp
    inside = [share * part.weights for part in parts[1:-1]]
    return [0.0, *inside, parts[-1].parameters if chosen.head else 0.0]


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
