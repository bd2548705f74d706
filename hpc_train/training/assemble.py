"""How a job is put together, from top to bottom: places, data, model, optimizer, checkpoints."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hpc_train.checkpoint import Checkpoints
from hpc_train.collectives import Collectives, connect
from hpc_train.config import RunConfig
from hpc_train.data.loader import Part, cut
from hpc_train.data.order import SampleOrder
from hpc_train.errors import ConfigError
from hpc_train.gradients import GradientAverager, LossScaler
from hpc_train.mpi.agreement import agreed, same
from hpc_train.mpi.grid import ParallelGrid
from hpc_train.mpi.runtime import Runtime
from hpc_train.mpi.topology import discover
from hpc_train.parallel import batch_norm
from hpc_train.parallel.apply import ParallelModel, apply
from hpc_train.training import averaging, sharing
from hpc_train.training.device import choose_device, choose_matmul, make_deterministic, use_cores
from hpc_train.training.learning_rate import last_step
from hpc_train.training.optimizers import build_optimizer
from hpc_train.training.saving import check_best, policy_of

logger = logging.getLogger(__name__)

Loss = Callable[[nn.Module, Any], Tensor]


def call_model(model: nn.Module, batch: Any) -> Tensor:
    """The loss that a model gives itself when it is called with the parts of a batch."""
    loss: Tensor = model(*batch)
    return loss


@dataclass(frozen=True, eq=False)
class TrainingTask:
    """What a job trains, and on what. All ranks give the same.

    Args:
        model: any module, whole and the same on all ranks, which get rank 0's weights. The parts
            that other ranks compute are taken from it. For tp above 1 it has an attribute
            `tensor_plan`, for pp above 1 `stages` (docs/how-to/parallel.md). If it has a method
            `seed_samples`, it is given one integer per sample before each forward pass, to make
            masks from that do not depend on the layout. torch's generator is seeded for each
            micro-batch too.
        dataset: any map-style data set of torch, or one with `fetch` (see `Loader`).
        loss: gives of the model, and of a batch as the data set gives it on the model's device,
            the mean over the batch's samples, a scalar. By default the model is called with the
            parts of the batch, and returns it.
        validation: a held-out data set of the same kind.
        identity: what a checkpoint must have been made with to be continued, besides the seed,
            the batch and the number of samples, by configuration key.
        about: what the checkpoint's readers need to use the model, as plain JSON values.
        tokens_per_sample: tokens in each sample, to report tokens per second; 0 reports none.
        only_optimizer_writes: whether nothing but the optimizer's step writes to parameters after
            the Trainer is made; then `memory.zero: auto` may share them between ranks. If a model,
            a loss or a hook writes to shared parameters, each of the ranks does so.
    """

    model: nn.Module
    dataset: Any
    loss: Loss = call_model
    validation: Any = None
    identity: Mapping[str, Any] = field(default_factory=dict)
    about: Mapping[str, Any] | None = None
    tokens_per_sample: int = 0
    only_optimizer_writes: bool = False


@dataclass(frozen=True, eq=False)
class StepPlan:
    """Which samples this replica computes in each step.

    Args:
        parts: its micro-batches of a step's batch.
        order: the order of all samples.
        last: the number of the last step.
    """

    parts: list[Part]
    order: SampleOrder
    last: int


@dataclass(frozen=True, eq=False)
class Assembly:
    """The parts of a training job on one rank, as `assemble` has put them together.

    Args:
        grid: this rank's place, and its groups.
        plan: which samples its replica computes.
        device: that it computes on.
        model: what it computes of the task's model.
        layout: the pipeline, and what completes gradients.
        replicas: the ranks that hold the same part of the model.
        optimizer: of its parameters.
        scaler: of the loss; None: the loss has no scale.
        averager: of its gradients.
        collectives: of all ranks.
        checkpoints: of the run.
        state_bytes: of the whole model's parameters and Adam's two moments.
    """

    grid: ParallelGrid
    plan: StepPlan
    device: torch.device
    model: nn.Module
    layout: ParallelModel
    replicas: Collectives
    optimizer: Optimizer
    scaler: LossScaler | None
    averager: GradientAverager
    collectives: Collectives
    checkpoints: Checkpoints
    state_bytes: int

    def close(self) -> None:
        """Release hooks, threads, shared memory and communicators. Collective."""
        self.checkpoints.close()
        self.averager.close()
        batch_norm.release(self.model, self.replicas)
        self.layout.close()
        self.grid.close()


def assemble(config: RunConfig, task: TrainingTask, runtime: Runtime) -> Assembly:
    """Put a job together. Collective.

    Args:
        config: every section but `model`, which whoever built the model has used.
        task: what is trained. Its model keeps, in place, what this rank computes of it.
        runtime: from `hpc_train.mpi.runtime.start_runtime`.

    Raises:
        ConfigError: the values do not fit the ranks or the data.
        UserError: the model does not say how the layout is put on it.
        SetupError: engine horovod, and Horovod is missing.
    """
    group, parallel = runtime.world, config.parallel
    model, dtype = task.model, getattr(torch, config.precision.dtype)

    # Where each rank stands, and which samples its replica computes.
    topology = discover(group, runtime.node)
    grid = ParallelGrid.build(group, topology, dp=parallel.dp, tp=parallel.tp, pp=parallel.pp)
    plan = _plan(config, task, grid)

    # What this rank computes on. Determinism is set up before Horovod starts.
    if config.run.deterministic:
        make_deterministic()
    use_cores(runtime)
    device = choose_device(runtime.node.rank)
    choose_matmul(group, config.precision.matmul, device)

    # Who averages the gradients. What decides it must be known of the whole model.
    engine = averaging.start_engine(config, grid, device)
    zero = sharing.decide(
        config, grid, engine, device, model, only_optimizer_writes=task.only_optimizer_writes
    )

    # The model: rank 0's weights, of them what this rank computes, on its device.
    model.to(getattr(torch, config.precision.parameters))
    state_bytes = 3 * sum(parameter.nbytes for parameter in model.parameters())
    layout = apply(
        model,
        grid,
        device,
        schedule=parallel.schedule,
        virtual_stages=parallel.stages_per_rank,
        sequence_parallel=parallel.sequence_parallel,
        overlap=runtime.cores > torch.get_num_threads(),
    )
    model.to(device)
    replicas = connect(grid.data, device)
    batch_norm.set_up_batch_norm(model, replicas, parallel.batch_norm)

    # The optimizer's step, which averages over the replicas first.
    optimizer = build_optimizer(model, config.optimizer)
    averager, zero = averaging.make_averager(
        config, model, optimizer, grid, layout, engine, zero=zero, cores=runtime.cores
    )
    local = group if config.gradients.average_every > 1 else None
    scaler = LossScaler(dtype, local) if dtype.itemsize == 2 else None

    # What a checkpoint holds, and which rank writes which part of it.
    state = averaging.training_state(config, zero, averager, model, optimizer, layout, grid, scaler)
    collectives = connect(group)
    checkpoints = Checkpoints(
        Path(config.run.dir) / "checkpoints",
        collectives,
        state,
        policy_of(config.checkpoint, config.run.nonfinite),
        identity={**sample_order_identity(config, len(task.dataset)), **task.identity},
        about=task.about,
    )
    return Assembly(
        grid, plan, device, model, layout, replicas, optimizer, scaler, averager, collectives,
        checkpoints, state_bytes,
    )  # fmt: skip


def _plan(config: RunConfig, task: TrainingTask, grid: ParallelGrid) -> StepPlan:
    """Cut the batches, and check that data and configuration go together. Collective."""
    group, data, run = grid.world, config.data, config.run
    samples, held_out = len(task.dataset), task.validation is not None
    with agreed(group):
        parts = cut(data.batch, grid.dp, grid.coordinate.dp, data.micro_batch)
        order = SampleOrder(samples, data.batch, seed=run.seed, shuffle=data.shuffle)
        last = last_step(run, order.steps_per_epoch)
        if data.validation_every and not held_out:
            raise ConfigError(
                f"data.validation_every is {data.validation_every}, but nothing is held out",
                "prepare the data with more --validation, or leave the key out",
            )
        check_best(config.checkpoint, data, last, held_out=held_out)
    sizes = f"{samples} {len(task.validation) if held_out else 0}"
    same(group, "the size of the data set", sizes, "give all ranks the same data")
    if len(parts) < grid.pp and group.rank == 0:
        logger.warning(
            "a step has %d micro-batches, fewer than the %d stages of the pipeline: most ranks "
            "wait most of the time; a smaller data.micro_batch gives more",
            len(parts),
            grid.pp,
        )
    return StepPlan(parts, order, last)


def sample_order_identity(config: RunConfig, samples: int) -> dict[str, Any]:
    """What decides which samples a step has, by configuration key."""
    return {
        "run.seed": config.run.seed,
        "data.batch": config.data.batch,
        "data.shuffle": config.data.shuffle,
        "number of samples": samples,
    }
