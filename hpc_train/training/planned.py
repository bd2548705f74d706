"""What the trainings of `hpc-train train` share: one program on all ranks, one plan of memory."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

import hpc_train
from hpc_train.config import RunConfig
from hpc_train.data.loader import cut
from hpc_train.errors import HpcTrainError, first_line
from hpc_train.host.allocator import close_gaps
from hpc_train.job.exhausted import out_of_memory
from hpc_train.models.shape import Shape
from hpc_train.mpi.agreement import agreed, same
from hpc_train.mpi.group import Group
from hpc_train.mpi.placement import place
from hpc_train.mpi.runtime import Runtime
from hpc_train.mpi.topology import discover
from hpc_train.planning.fits import PlannedJob, check_fits, check_host_fits
from hpc_train.planning.layouts import Candidate
from hpc_train.training.device import choose_device, free_memory_of, whole_memory_of
from hpc_train.training.sharing import SharingFacts, choose_zero
from hpc_train.training.task import TrainingTask
from hpc_train.training.trainer import Trainer

logger = logging.getLogger(__name__)

LEANER = 0.9  # share of the memory that a job needed, and did not get, which a remedy may need

Free = tuple[NDArray[np.int64], Sequence[str]]  # bytes, and where they are, in words


def job_that_fits(
    config: RunConfig, shape: Shape, runtime: Runtime
) -> tuple[PlannedJob, int | None]:
    """The job on its nodes, which have enough memory if `run.preflight` is on. Collective.

    Returns:
        The job, and the largest micro-batch that `data.micro_batch: auto` may try; None without it.

    Raises:
        ConfigError: the job does not fit; on all ranks.
    """
    job = job_of(config, shape, runtime)
    nodes, gpu = bytes_left(runtime)
    free, where = nodes if job.on_cpu else gpu
    with agreed(runtime.world):
        if config.run.preflight:
            check_fits(job, free, where)
            if not job.on_cpu:
                check_host_fits(job, *nodes)
        if job.on_cpu and (config.memory.recompute != "none" or job.is_tight(free)):
            close_gaps()  # before the model has memory
            if config.memory.recompute == "none" and runtime.world.rank == 0:
                logger.info("memory is short: large tensors leave no gaps, which takes longer")
        searched = config.data.micro_batch == "auto"
        return job, job.largest_micro_batch(free) if searched else None


def train_planned(config: RunConfig, task: TrainingTask, runtime: Runtime, job: PlannedJob) -> None:
    """Train a task to its end. If memory ends, say which keys need less. Collective.

    Raises:
        Stopped: a signal, the stop file or the time limit stopped it, with a checkpoint.
        HpcTrainError: a part of the job failed; the same error is raised on all ranks.
    """
    try:
        Trainer(config, task, runtime).train()
    except (MemoryError, RuntimeError) as error:  # torch has no error of its own for processors
        if not out_of_memory(error):
            raise
        room = np.rint(job.needs() * LEANER).astype(np.int64)
        if (whole := whole_memory_of(choose_device(runtime.node.rank))) is not None:
            room = np.minimum(room, whole)
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
                together=int(Candidate(sized, shape, node).together.min()),
            )
            zero, _ = choose_zero(config.gradients, facts)
            zero = memory.stage or zero
            sized = replace(sized, memory=replace(memory, zero=zero))
    return PlannedJob(sized, shape, node, on_cpu)


def bytes_left(runtime: Runtime) -> tuple[Free, Free]:
    """What is free on each node, and on the GPU that has least. Collective.

    Without GPUs the latter means nothing.
    """
    device = choose_device(runtime.node.rank)
    mine = free_memory_of(torch.device("cpu")), free_memory_of(device), runtime.world.host
    found = runtime.world.gathered(mine, "the free memory")
    topology = discover(runtime.world, runtime.node)
    of_nodes = {number: free for number, (free, _, _) in zip(topology.node, found, strict=True)}
    nodes = np.array([of_nodes[number] for number in range(len(topology.hosts))])
    least, host = min((free, host) for _, free, host in found)
    return (nodes, topology.hosts), (np.array([least]), [f"a GPU of {host}"])


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
