"""The main job: a GPT trained on prepared text."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import hpc_train
from hpc_train.config import ModelSection, ParallelSection, RunConfig
from hpc_train.data import manifest as manifests
from hpc_train.data.check import check_shards, every_shard
from hpc_train.data.manifest import Manifest
from hpc_train.data.shards import TokenDataset
from hpc_train.data.tokenizer import describe_tokenizer
from hpc_train.errors import ConfigError
from hpc_train.models import GPT
from hpc_train.mpi.agreement import agreed, same
from hpc_train.mpi.group import Group
from hpc_train.mpi.runtime import Runtime
from hpc_train.training.trainer import Trainer


def train_gpt(config: RunConfig, runtime: Runtime) -> None:
    """Train, from data folder to last checkpoint. All ranks must call.

    Raises:
        Stopped: a signal or the time limit stopped it, with a checkpoint.
        HpcTrainError: as the parts raise them, the same on all ranks.
    """
    group = runtime.world
    check_same_program(config, group)
    with agreed(group):
        if config.data.path is None:
            raise ConfigError("data.path is not given", "give the folder of `hpc-train prepare`")
        directory = Path(config.data.path)
        manifest = manifests.read_manifest(directory)
    same(group, f"the data in {directory}", manifest.digest, "copy the same data to all nodes")
    with agreed(group):  # each node has its own view of the folder, which its ranks share out
        node = runtime.node
        check_shards(directory, manifest, every_shard(manifest)[node.rank :: node.size])
    with agreed(group):
        shape = gpt_shape(config.model, manifest)
        check_layout(config.parallel, shape)
        torch.manual_seed(config.run.seed)
        model = GPT(**shape)
        sequence = config.model.sequence
        training = TokenDataset(directory, manifest, "train", sequence)
        held_out = None
        if manifest.tokens("validation") > sequence:
            held_out = TokenDataset(directory, manifest, "validation", sequence)
        about = {
            "kind": config.model.kind,
            "shape": shape,
            "dtype": config.precision.parameters,
            "tokenizer": describe_tokenizer(manifest.tokenizer, directory),
        }
    trainer = Trainer(
        config,
        model,
        training,
        lambda gpt, batch: gpt(*batch),
        runtime,
        validation=held_out,
        identity={
            "data": manifest.digest,
            "model.sequence": sequence,
            "model.heads": config.model.heads,  # no tensor's shape tells
        },
        about=about,
        tokens_per_sample=sequence,
        only_optimizer_writes=True,
    )
    trainer.train()


def gpt_shape(section: ModelSection, manifest: Manifest) -> dict[str, Any]:
    """The arguments of `GPT`.

    Raises:
        ConfigError: the vocabulary is smaller than the data's.
    """
    vocab = section.vocab or manifest.vocab
    if vocab < manifest.vocab:
        raise ConfigError(
            f"model.vocab is {vocab}, the data has {manifest.vocab} tokens",
            "leave model.vocab out, or give at least so many",
        )
    shape = asdict(section) | {"vocab": vocab}
    del shape["kind"]
    return shape


def check_layout(section: ParallelSection, shape: Mapping[str, Any]) -> None:
    """Check that tensor and pipeline parallelism can divide a GPT.

    Args:
        section: the layout.
        shape: from `gpt_shape`.

    Raises:
        ConfigError: they cannot; the message has the nearest sizes that can.
    """
    divided = {"heads": shape["heads"], "vocab": shape["vocab"]}
    if section.sequence_parallel:
        divided["sequence"] = shape["sequence"]
    for key, size in divided.items():
        if size % section.tp:
            below, above = size // section.tp * section.tp, -(-size // section.tp) * section.tp
            near = [str(above)] if key == "vocab" or not below else [str(below), str(above)]
            raise ConfigError(
                f"parallel.tp {section.tp} does not divide model.{key} {size}",
                f"nearest that it divides: model.{key} {' or '.join(near)}",
            )
    parts, most = section.pp * section.chunks, shape["layers"] + 2
    if section.pp > 1 and parts > most:
        virtual = f" x parallel.virtual_stages {section.chunks}" if section.chunks > 1 else ""
        raise ConfigError(
            f"parallel.pp {section.pp}{virtual} is more than the {most} parts of the model "
            f"({shape['layers']} layers, embedding and head)",
            f"nearest that fits: model.layers {parts - 2}, or parallel.pp {most // section.chunks}",
        )


def check_same_program(config: RunConfig, group: Group) -> None:
    """Check that all ranks run the same code on the same configuration. Collective.

    Raises:
        UserError: a rank differs.
    """
    remedy = "install the same version on all nodes"
    same(group, "the code of hpc_train", code_digest(), remedy)
    same(group, "the version of torch", torch.__version__, remedy)
    same(group, "the configuration", config.to_yaml(), "give all ranks the same file and options")


def code_digest() -> str:
    """A hash of this package's source files."""
    digest = hashlib.blake2b(digest_size=16)
    root = Path(hpc_train.__file__).parent
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + path.read_bytes())
    return digest.hexdigest()
