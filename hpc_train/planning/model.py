"""The model of a configuration: its shape, and how the layout divides it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpc_train.config import DataSection, ModelSection, ParallelSection, RunConfig
from hpc_train.config.model import MODEL_DEFAULTS
from hpc_train.data import manifest as manifests
from hpc_train.errors import ConfigError, DataError
from hpc_train.models.kinds import SHAPES
from hpc_train.models.shape import Division, PartCost, Shape
from hpc_train.models.tabular.sizes import CONTRASTED, TableSizes

if TYPE_CHECKING:
    from hpc_train.data.tables.features import TableFeatures


def shape_of(section: ModelSection, data: int | TableSizes) -> Shape:
    """The shape of a configuration's model.

    Args:
        section: section model of the configuration.
        data: the sizes that follow from the data: the vocabulary size of texts, or those of a
            table.
    """
    sizes: dict[str, Any] = {key: getattr(section, key) for key in MODEL_DEFAULTS[section.kind]}
    if isinstance(data, TableSizes):
        for key in ("quantiles", "pretraining", "corrupted", "together"):
            del sizes[key]  # the outputs are among the table's sizes
        sizes["sizes"] = data
    else:
        sizes["vocab"] = data
    return SHAPES[section.kind](**sizes)


def table_sizes(features: TableFeatures, section: ModelSection) -> TableSizes:
    """The sizes that a model takes from a table.

    Args:
        features: the table's features and target.
        section: section model of the configuration.

    Raises:
        ConfigError: quantiles are given for another task, or the table has no feature or target.
    """
    codes = tuple(one.codes for one in features.categorical)
    return TableSizes(
        edges=tuple(one.edges for one in features.numeric),
        codes=codes,
        outputs=_outputs(features, section, sum(codes)),
    )


def _outputs(features: TableFeatures, section: ModelSection, codes: int) -> int:
    """The number of a model's outputs for a row; 0 if there is nothing to predict."""
    target, quantiles = features.target, section.quantiles
    if quantiles and (target is None or target.task != "regression"):
        task = "none" if target is None else target.task
        raise ConfigError(
            f"model.quantiles is given, but the table's task is {task}",
            "leave model.quantiles out: it is for regressions",
        )
    if section.pretraining == "masked_cells":
        return len(features.numeric) + codes
    if section.pretraining == "contrast":
        return CONTRASTED
    if target is None:
        return 0
    counts = {"classification": len(target.classes), "multilabel": len(target.names)}
    return counts.get(target.task, len(quantiles) or 1)


def features_of(directory: Path) -> TableFeatures:
    """The features of a prepared table.

    Raises:
        ConfigError: the folder has no prepared table.
    """
    # Loaded here, because it loads numpy, which the plan of a language model does not need.
    from hpc_train.data.tables.table_manifest import read_table_manifest

    try:
        return read_table_manifest(directory).features
    except DataError as error:
        raise ConfigError(
            f"the sizes of the table are not known: {error.cause}",
            "give data.path the folder of `hpc-train prepare table`",
        ) from None


def planned_shape(config: RunConfig) -> Shape:
    """The shape of a model before training, with the sizes of its data.

    The vocabulary of texts can be given by model.vocab as well.

    Raises:
        ConfigError: the sizes are not known, or `check_one_length` has failed.
    """
    check_one_length(config.data)
    folders = [Path(folder) for folder in config.data.folders]
    if not config.model.is_language:
        if not folders:
            raise ConfigError(
                "the sizes of the table are not known",
                "give data.path the folder of `hpc-train prepare table`",
            )
        return shape_of(config.model, table_sizes(features_of(folders[0]), config.model))
    if config.model.vocab is not None:
        return shape_of(config.model, config.model.vocab)
    if not folders:
        raise ConfigError("the vocabulary size is not known", "give model.vocab, or data.path")
    try:
        return shape_of(config.model, manifests.read_manifests(folders)[0].vocab)
    except DataError as error:
        raise ConfigError(
            f"the vocabulary size is not known: {error.cause}", "give model.vocab"
        ) from None


def trained_parameters(
    config: RunConfig, shape: Shape, parts: Sequence[PartCost]
) -> tuple[list[float], list[float]]:
    """The parameters of each part that a rank trains, and those that it has frozen.

    With patterns nobody knows without the model, so all are counted. Adapters are counted as if all
    of a block's matrices had one.

    Args:
        config: the configuration.
        shape: the sizes of the model.
        parts: the costs of its parts under the layout.
    """
    chosen = config.finetune
    if not chosen.active or chosen.patterns:
        return [float(part.parameters) for part in parts], [0.0] * len(parts)
    share = shape.low_rank(chosen.lora) / config.parallel.tp
    inside = [share * part.weights for part in parts[1:-1]]
    frozen = [float(part.parameters) for part in parts]  # adapters come on top
    head = frozen.pop() if chosen.head else 0.0
    return [0.0, *inside, head], [*frozen, 0.0][: len(parts)]


def block_shape(config: RunConfig) -> Shape:
    """The shape of a model whose blocks are measured. Blocks of language models have no vocabulary.

    Raises:
        ConfigError: as `planned_shape`.
    """
    if config.model.is_language:
        return shape_of(config.model, config.model.vocab or 1)
    return planned_shape(config)


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
