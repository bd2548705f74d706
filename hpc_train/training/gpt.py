"""The main job: a language model trained on prepared text."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import torch

from hpc_train.config import ModelSection, RunConfig
from hpc_train.data import manifest as manifests
from hpc_train.data.manifest import Manifest
from hpc_train.data.packing import PACKED_TOGETHER
from hpc_train.data.shards import check_one_sample
from hpc_train.errors import ConfigError
from hpc_train.models.language import counted_targets
from hpc_train.models.shape import Shape
from hpc_train.mpi.agreement import agreed, same
from hpc_train.mpi.runtime import Runtime
from hpc_train.planning.model import check_one_length, division_of, shape_of
from hpc_train.training.planned import check_same_program, job_that_fits, train_planned
from hpc_train.training.samples import node_caches, samples_of, tokens_in
from hpc_train.training.substituted import check_on_nodes
from hpc_train.training.task import TrainingTask


def train_gpt(config: RunConfig, runtime: Runtime) -> None:
    """Train a language model, from the data folder to the last checkpoint. Collective.

    Raises:
        Stopped: a signal, the stop file or the time limit stopped it, with a checkpoint.
        HpcTrainError: a part of the job failed; the same error is raised on all ranks.
    """
    group = runtime.world
    check_same_program(config, group)
    with agreed(group):
        if not config.data.folders:
            raise ConfigError("data.path is not given", "give the folder of `hpc-train prepare`")
        check_one_length(config.data)
        folders = [Path(folder) for folder in config.data.folders]
        found = dict(zip(folders, manifests.read_manifests(folders), strict=True))
    for directory, manifest in found.items():
        same(group, f"the data in {directory}", manifest.digest, "copy the same data to all nodes")
        check_on_nodes(runtime, directory, manifest, config.data.damaged)
    with agreed(group):
        directory, manifest = next(iter(found.items()))  # all have the same vocabulary
        shape = trained_shape(config.model, manifest)
        shape.check(division_of(config.parallel))
        if config.data.across_documents:  # before the memory that such samples need is checked
            for folder, its in found.items():
                check_one_sample(folder, its, "train", config.model.sequence or 0)
    job, most = job_that_fits(config, shape, runtime)
    with agreed(group):
        torch.manual_seed(config.run.seed)
        dtype = getattr(torch, config.precision.parameters)
        model = shape.build_unfilled(dtype)  # each rank fills its part when the layout is known
        about = {
            "kind": config.model.kind,
            "shape": asdict(shape),
            "dtype": config.precision.parameters,
            "tokenizer": manifests.tokenizer_of(manifest, directory),
        }
    of_folders = {directory: manifest.digest for directory, manifest in found.items()}
    with node_caches(config.data, of_folders, group) as caches:
        splits = manifests.SPLITS
        training, held_out = (samples_of(config, found, name, group, caches) for name in splits)
        assert training is not None  # only held-out samples may be missing
        digests = [*of_folders.values()]
        data = digests if len(digests) > 1 else digests[0]
        identity = {"data": data, "model.sequence": config.model.sequence, **shape.identity}
        if not config.data.across_documents:
            identity |= {
                "data.across_documents": False,
                "documents packed together": PACKED_TOGETHER,
            }
        task = TrainingTask(
            model,
            training,
            validation=held_out,
            identity=identity,
            about=about,
            tokens_per_sample=tokens_in(training),
            most_at_a_time=most,
            private_parameters=True,
            counted=counted_targets,
            shape=shape,
        )
        train_planned(config, task, runtime, job)


def trained_shape(section: ModelSection, manifest: Manifest) -> Shape:
    """The shape of the configured model, with a vocabulary that has all tokens of the data.

    Raises:
        ConfigError: `model.vocab` is smaller than the vocabulary of the data.
    """
    vocab = section.vocab or manifest.vocab
    if vocab < manifest.vocab:
        raise ConfigError(
            f"model.vocab is {vocab}, but the data has {manifest.vocab} tokens",
            f"leave model.vocab out, or give at least {manifest.vocab}",
        )
    return shape_of(section, vocab)
