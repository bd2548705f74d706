"""The main job: a GPT trained on prepared text."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

import hpc_train
from hpc_train.config import ModelSection, RunConfig
from hpc_train.data import manifest as manifests
from hpc_train.data.loader import cut
from hpc_train.data.manifest import Manifest
from hpc_train.data.packing import PACKED_TOGETHER
from hpc_train.data.tokenizer import describe_tokenizer
from hpc_train.errors import ConfigError, HpcTrainError
from hpc_train.models.gpt.module import counted_targets
from hpc_train.models.shape import Shape
from hpc_train.mpi.agreement import agreed, same
from hpc_train.mpi.group import Group
from hpc_train.mpi.placement import place
from hpc_train.mpi.runtime import Runtime
from hpc_train.mpi.topology import discover
from hpc_train.planning.fits import PlannedJob, check_fits
from hpc_train.planning.layouts import Candidate
from hpc_train.planning.model import check_one_length, division_of, shape_of
from hpc_train.training.assemble import TrainingTask
from hpc_train.training.device import choose_device, free_memory_of
from hpc_train.training.samples import node_caches, samples_of, tokens_in
from hpc_train.training.sharing import SharingFacts, choose_zero
from hpc_train.training.substituted import check_on_nodes
from hpc_train.training.trainer import Trainer

LEANER = 0.9  # share of the memory that a job needed, and did not get, which a remedy may need


def train_gpt(config: RunConfig, runtime: Runtime) -> None:
    """Train a GPT, from the data folder to the last checkpoint. Collective.

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
    job = job_of(config, shape, runtime)
    free, where = free_bytes_of(job, runtime)
    with agreed(group):
        if config.run.preflight:
            check_fits(job, free, where)
        searched = config.data.micro_batch == "auto"
        most = job.largest_micro_batch(free) if searched else None
    with agreed(group):
        torch.manual_seed(config.run.seed)
        dtype = getattr(torch, config.precision.parameters)
        model = shape.build_unfilled(dtype)  # each rank fills its part when the layout is known
        about = {
            "kind": config.model.kind,
            "shape": asdict(shape),
            "dtype": config.precision.parameters,
            "tokenizer": describe_tokenizer(manifest.tokenizer, directory),
        }
    with node_caches(config.data, found, group) as caches:
        splits = manifests.SPLITS
        training, held_out = (samples_of(config, found, name, group, caches) for name in splits)
        assert training is not None  # only held-out samples may be missing
        digests = [one.digest for one in found.values()]
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
        )
        try:
            Trainer(config, task, runtime).train()
        except (MemoryError, RuntimeError) as error:  # torch has no error of its own for processors
            if not out_of_memory(error):
                raise
            room = np.rint(job.needs() * LEANER).astype(np.int64)
            raise HpcTrainError(f"out of memory ({first_line(error)})", job.remedy(room)) from error


def job_of(config: RunConfig, shape: Shape, runtime: Runtime) -> PlannedJob:
    """The job with all sizes of its layout, on the nodes that its ranks run on. Collective.

    If its micro-batch is to be found, it has the smallest one.
    """
    parallel, memory = config.parallel, config.memory
    dp = parallel.dp or max(1, runtime.world.size // (parallel.tp * parallel.pp))
    least = 1 if config.data.micro_batch == "auto" else config.data.micro_batch
    sized = replace(
        config,
        parallel=replace(parallel, dp=dp),
        data=replace(config.data, micro_batch=least),
    )
    topology = discover(runtime.world, runtime.node)
    with agreed(runtime.world):
        cut(config.data.batch, dp, 0, sized.data.samples_at_a_time)
        ranks = place(topology, dp, parallel.tp, parallel.pp).ranks
        node = np.array(topology.node)[ranks]
        on_cpu = choose_device(runtime.node.rank).type == "cpu"
        if memory.zero == "auto":
            facts = SharingFacts(
                engine=config.gradients.engine,
                device="cpu" if on_cpu else "a GPU",
                replicas=dp,
                together=int(Candidate(sized, shape, node).replicas[1]),
            )
            zero, _ = choose_zero(config.gradients, facts)
            sized = replace(sized, memory=replace(memory, zero=zero))
    return PlannedJob(sized, shape, node, on_cpu)


def free_bytes_of(job: PlannedJob, runtime: Runtime) -> tuple[NDArray[np.int64], Sequence[str]]:
    """Bytes free on each node, or on the GPU that has least, and their names. Collective."""
    mine = free_memory_of(choose_device(runtime.node.rank)), runtime.world.host
    found = runtime.world.gathered(mine, "the free memory")
    if not job.on_cpu:
        free, host = min(found)
        return np.array([free]), [f"a GPU of {host}"]
    topology = discover(runtime.world, runtime.node)
    of_nodes = dict(zip(topology.node, found, strict=True))
    least = [of_nodes[number][0] for number in range(len(topology.hosts))]
    return np.array(least), topology.hosts


def out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory is exhausted."""
    told = isinstance(error, (MemoryError, torch.OutOfMemoryError))
    return told or "can't allocate memory" in str(error)


def first_line(error: BaseException) -> str:
    """The first line of an error's text."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


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


def check_same_program(config: RunConfig, group: Group) -> None:
    """Check that all ranks run the same code on the same configuration. Collective.

    Raises:
        UserError: they differ on a rank.
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
