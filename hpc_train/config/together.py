"""Checks that the values of several sections of a configuration go together."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpc_train.errors import ConfigError

if TYPE_CHECKING:
    from hpc_train.config import RunConfig


def check_together(config: RunConfig) -> None:
    """Check that no value of a section excludes a value of another one.

    Raises:
        ConfigError: two values exclude each other. The message names both.
    """
    _check_kind(config)
    _check_length(config)
    _check_compile(config)
    _check_engine(config)
    _check_compression(config)
    zero, gradients = config.memory.stage, config.gradients
    if zero and gradients.two_level == "off":
        raise ConfigError(
            f"memory.zero is {zero}, but gradients.two_level is off",
            "leave one out: memory.zero sums in the shared memory of a node",
        )
    if gradients.average_every > 1 and (
        zero or gradients.engine == "horovod" or gradients.compression != "none"
    ):
        raise ConfigError(
            f"gradients.average_every is {gradients.average_every}: replicas differ meanwhile",
            "leave out memory.zero, gradients.compression and engine horovod",
        )
    averaged = gradients.reduction == "mean" and gradients.average_every == 1
    unequal = config.data.loss == "token" or config.data.micro_tokens is not None
    if unequal and not averaged:
        given = "loss is token" if config.data.loss == "token" else "micro_tokens is given"
        raise ConfigError(
            f"data.{given}, but the replicas' gradients are not averaged in every step",
            f"leave out gradients.average_every and reduction, or data.{given.split()[0]}",
        )
    if gradients.reduction == "adasum" and config.optimizer.clip_norm:
        raise ConfigError(
            f"optimizer.clip_norm is {config.optimizer.clip_norm}, but with gradients.reduction "
            "adasum the replicas' gradients have no common norm",
            "leave optimizer.clip_norm out",
        )
    started = config.checkpoint.weights or config.checkpoint.resume not in ("auto", "none")
    if config.finetune.active and not started:
        raise ConfigError(
            "section finetune leaves parameters as they are, but checkpoint.weights is not given, "
            "so they would stay random",
            "give checkpoint.weights, or leave finetune out",
        )


def _check_compression(config: RunConfig) -> None:
    """Check that gradients can be compressed in this layout."""
    zero, gradients, tp = config.memory.stage, config.gradients, config.parallel.tp
    if zero > 1 and gradients.compression != "none":
        raise ConfigError(
            f"memory.zero is {zero}, but gradients.compression is {gradients.compression}",
            "use --memory.zero 1 --memory.scope node, or leave gradients.compression out",
        )
    if zero and config.memory.scope == "all" and gradients.compression != "none":
        raise ConfigError(
            f"memory.scope is all, but gradients.compression is {gradients.compression}, which "
            "needs each node's whole sum",
            "use --memory.scope node, or leave gradients.compression out",
        )
    if gradients.compression.startswith("topk") and tp > 1:
        raise ConfigError(
            f"gradients.compression is {gradients.compression}, but parallel.tp is {tp}: its ranks "
            "would send other elements of the parameters that all of them have",
            "use powersgd, fp16 or bf16, or leave gradients.compression out",
        )


def _check_compile(config: RunConfig) -> None:
    """Check that blocks that are to be compiled can be."""
    if config.run.compile and config.parallel.tp > 1:
        raise ConfigError(
            f"run.compile is on, but parallel.tp is {config.parallel.tp}: sums over ranks "
            "interrupt the code of each block",
            "use dp or pp, or leave run.compile out",
        )
    if config.run.compile and config.memory.recompute == "selective":
        raise ConfigError(
            "run.compile is on, but memory.recompute is selective: torch.compile decides itself "
            "which results inside of a block are kept",
            "set memory.recompute to none or full, or leave run.compile out",
        )


def _check_length(config: RunConfig) -> None:
    """Check what decides how long the run is, and where it begins."""
    if config.run.patience and not config.data.validation_every:
        raise ConfigError(
            f"run.patience is {config.run.patience}, but data.validation_every is 0, so only the "
            "last step is followed by a validation",
            "set data.validation_every, or leave run.patience out",
        )
    if config.run.test_steps and config.checkpoint.resume not in ("auto", "none"):
        raise ConfigError(
            "checkpoint.resume names a checkpoint, but run.performance_test is on, which trains "
            "from the beginning",
            "leave one of them out",
        )


def _check_engine(config: RunConfig) -> None:
    engine = config.gradients.engine
    if engine not in ("horovod", "nccl"):
        return
    for asked, what in (
        (config.memory.staged, "memory.offload is optimizer"),
        (config.memory.stage, f"memory.zero is {config.memory.stage}"),
    ):
        if asked:
            raise ConfigError(
                f"{what}, but gradients.engine is {engine}", "use --gradients.engine mpi"
            )


def _check_kind(config: RunConfig) -> None:
    """Check that section data has only what the kind of model can use."""
    kind, data = config.model.kind, config.data
    if config.model.is_language:
        for key in ("class_weights", "sampling"):
            if getattr(data, key) == "balanced":
                raise ConfigError(
                    f"data.{key} is balanced, but model.kind is {kind}, which has no classes",
                    f"leave data.{key} out: it is for the classification of tables",
                )
        if data.importance:
            raise ConfigError(
                f"data.importance is {data.importance}, but model.kind is {kind}",
                "leave data.importance out: it is for tables",
            )
        return
    given = {
        "loss": data.loss == "token",
        "micro_tokens": data.micro_tokens is not None,
        "across_documents": not data.across_documents,
    }
    for key, present in given.items():
        if present:
            raise ConfigError(
                f"data.{key} is given, but model.kind is {kind}, and rows of tables have no tokens",
                f"leave data.{key} out",
            )
