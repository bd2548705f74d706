"""Puts a training job together, from top to bottom: grid, data, model, optimizer, checkpoints."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from hpc_train.checkpoint import Checkpoints
from hpc_train.checkpoint.state import Together
from hpc_train.collectives import Collectives, connect
from hpc_train.config import DataSection, RunConfig
from hpc_train.data.by_length import PartsByLength
from hpc_train.data.lengths import lengths_of
from hpc_train.data.loader import Part, cut
from hpc_train.data.mixture import datasets_in
from hpc_train.data.order import SampleOrder
from hpc_train.data.packing import PackedDataset
from hpc_train.data.reader import Reader, check_by_number
from hpc_train.data.shard_files import ShardFiles
from hpc_train.data.tables.balanced import RowsOfClass
from hpc_train.errors import ConfigError, UserError, plural, size_text
from hpc_train.gradients import GradientAverager, LossScaler
from hpc_train.gradients.unwaited import UnwaitedClipping
from hpc_train.models.deferred import check_has_memory, deferred, recipes_of
from hpc_train.mpi.agreement import agreed, same
from hpc_train.mpi.grid import ParallelGrid
from hpc_train.mpi.group import Group
from hpc_train.mpi.runtime import Runtime
from hpc_train.mpi.topology import discover
from hpc_train.parallel import batch_norm
from hpc_train.parallel.apply import ParallelModel, apply
from hpc_train.parallel.compiled import compile_blocks
from hpc_train.training import averaging, sharing
from hpc_train.training.costs import RunCosts
from hpc_train.training.device import (
    choose_device,
    choose_matmul,
    make_deterministic,
    tell_gpu,
    use_cores,
)
from hpc_train.training.finetuning import choose_trained
from hpc_train.training.flops import sample_flops
from hpc_train.training.learning_rate import last_step
from hpc_train.training.optimizer_steps import OptimizerSteps, is_unwaited
from hpc_train.training.optimizers import build_optimizer, set_precision
from hpc_train.training.patience import Patience
from hpc_train.training.same_data import compared
from hpc_train.training.saving import check_best, policy_of
from hpc_train.training.substituted import SubstitutedSamples
from hpc_train.training.task import TrainingTask, check_loss

logger = logging.getLogger(__name__)

LARGE = 1 << 30  # bytes of a model that had better not be built whole on every rank


@dataclass(frozen=True, eq=False)
class StepPlan:
    """The samples that this replica computes in each step.

    Args:
        parts: the parts of a step's batch that this replica computes, one for each micro-batch, or
            with `data.micro_tokens` a function of the step that returns them.
        order: the order of all samples.
        last: the number of the last step.
    """

    parts: list[Part] | PartsByLength
    order: SampleOrder
    last: int


@dataclass(frozen=True, eq=False)
class Assembly:
    """The parts of a training job on one rank, as `assemble` has put them together.

    Args:
        grid: this rank's place among the ranks, and its groups.
        plan: the samples that this rank's replica computes.
        device: the device that this rank computes on.
        model: the part of the task's model that this rank computes.
        layout: the layout of the model: its pipeline, and what completes its gradients.
        replicas: the collectives of the ranks that hold the same part of the model.
        optimizer: the optimizer of this rank's parameters.
        scaler: the scaler of the loss; None: the loss has no scale.
        averager: the averager of this rank's gradients.
        collectives: the collectives of all ranks.
        checkpoints: the checkpoints of the run.
        substituted: the number of samples that stood in for damaged ones.
        patience: decides whether training ends early.
        costs: what the run costs.
        steps: takes the optimizer's steps.
        state_bytes: bytes of the whole model's parameters, and of Adam's two moments of those that
            are trained.
        flops: operations of a sample's forward and backward pass; 0 if they are not known.
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
    substituted: SubstitutedSamples
    patience: Patience
    costs: RunCosts
    steps: OptimizerSteps
    state_bytes: int
    flops: float

    @property
    def speaks(self) -> bool:
        """Whether this rank's losses count. In each replica those of one rank do."""
        return self.layout.pipeline.is_last and self.grid.coordinate.tp == 0

    def close(self) -> None:
        """Release hooks, threads, shared memory and communicators. Collective."""
        self.checkpoints.close()
        if self.averager.shards.group.size > 1:
            self.optimizer.state.clear()  # else `close` would gather all of it, for nobody
        self.averager.close()
        batch_norm.release(self.model, self.replicas)
        self.layout.close()
        self.grid.close()


def assemble(config: RunConfig, task: TrainingTask, runtime: Runtime) -> Assembly:
    """Put a job together. Collective.

    Args:
        config: the configuration. `model` is not used here: the caller has built the model.
        task: the model and its data. The model is reduced, in place, to this rank's part.
        runtime: the runtime from `hpc_train.mpi.runtime.start_runtime`.

    Raises:
        ConfigError: the values do not fit the ranks or the data.
        UserError: the model lacks an attribute that the layout needs, or has nothing to train.
        SetupError: `gradients.engine` is horovod, and Horovod is missing.
    """
    group, parallel = runtime.world, config.parallel
    dtype = getattr(torch, config.precision.dtype)

    # The grid of ranks, and the samples that each replica computes.
    topology = discover(group, runtime.node)
    grid = ParallelGrid.build(group, topology, dp=parallel.dp, tp=parallel.tp, pp=parallel.pp)
    plan = _plan(config, task, grid)

    # The device. Determinism comes first, because Horovod reads its settings when it starts.
    if config.run.deterministic:
        make_deterministic()
    use_cores(runtime)
    device = choose_device(runtime.node.rank)
    choose_matmul(group, config.precision.matmul, device)
    tell_gpu(group, device)

    # The whole model, with values or without, and which of its parameters are trained.
    model = _built(config, task, group)
    with agreed(group):
        finetuned, adapters = choose_trained(model, config.finetune, config.run.seed)
        flops = 0.0 if task.shape is None else sample_flops(task.shape, model)

    # The engine that averages gradients, and whether ranks share parameters. The model must still
    # be whole, so that all ranks decide alike.
    engine = averaging.start_engine(config, grid, device)
    shared = sharing.decide(config, grid, engine, device, model, private=task.private_parameters)

    # The model: rank 0's weights, cut to this rank's part, on its device.
    set_precision(model, getattr(torch, config.precision.parameters))
    state_bytes = sum(p.nbytes * (3 if p.requires_grad else 1) for p in model.parameters())
    # BatchNorm comes before what keeps a layer's `forward`: compilation, stages, recomputation.
    replicas = connect(grid.data, device)
    batch_norm.set_up_batch_norm(model, replicas, parallel.batch_norm)
    if config.run.compile:
        with agreed(group):
            compile_blocks(model, device)
    layout = apply(
        model,
        grid,
        device,
        schedule=parallel.schedule,
        virtual_stages=parallel.stages_per_rank,
        sequence_parallel=parallel.sequence_parallel,
        overlap=runtime.cores > torch.get_num_threads(),
        recompute=config.memory.recompute,
    )
    model.to(device)

    # The optimizer. Its step first averages the gradients over the replicas.
    optimizer = build_optimizer(model, config.optimizer)
    averager, shared = averaging.make_averager(
        config, model, optimizer, grid, layout, engine, shared, cores=runtime.cores
    )
    offloaded = averaging.offload(config.memory, optimizer, group)
    local = group if config.gradients.average_every > 1 else None
    scaler = LossScaler(dtype, local) if dtype.itemsize == 2 else None

    # The checkpoints: what they hold, and which rank writes which part.
    state = averaging.training_state(
        config, shared, averager, model, optimizer, layout, grid, scaler
    )
    if offloaded is not None:
        averager.at_close.append(offloaded.close)
        state = replace(state, place=offloaded.place)
    substituted = SubstitutedSamples(grid, task.dataset, config.data.batch)
    patience = Patience(config.run.patience)
    costs = RunCosts(runtime, len(topology.hosts), saved=not config.run.deterministic)
    unwaited = None
    if not shared.zero and is_unwaited(config, optimizer, device):
        unwaited = UnwaitedClipping(optimizer, device, config.optimizer.clip_norm)
    steps = OptimizerSteps(config, group, averager, scaler, layout.gradients, device, unwaited)
    state = replace(state, extra=Together([state.extra, substituted, patience, costs, steps]))
    collectives = connect(group)
    checkpoints = Checkpoints(
        Path(config.run.dir) / "checkpoints",
        collectives,
        state,
        policy_of(config.checkpoint, config.run.nonfinite),
        identity={**sample_order_identity(config, plan.order), **task.identity, **finetuned},
        about={**(task.about or {}), **adapters},
        where=" and ".join(map(str, config.data.folders)),
    )
    return Assembly(
        grid, plan, device, model, layout, replicas, optimizer, scaler, averager, collectives,
        checkpoints, substituted, patience, costs, steps, state_bytes, flops,
    )  # fmt: skip


def _built(config: RunConfig, task: TrainingTask, group: Group) -> nn.Module:
    """The task's model, whole. Collective.

    Raises:
        UserError: there is nothing to train, or ranks have built different models.
    """
    model, recipes = task.model, ""
    with agreed(group):
        if not isinstance(model, nn.Module):
            parameters, seed = getattr(torch, config.precision.parameters), config.run.seed
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                model, told = deferred(model, parameters, seed)
            if told and group.rank == 0 and group.size > 1:
                logger.info("%s", told)
            recipes = "\n".join(f"{n} {r.describe()}" for n, r in recipes_of(model).items())
        else:
            check_has_memory(model)
            if group.size > 1 and (nbytes := sum(p.nbytes for p in model.parameters())) > LARGE:
                logger.info(
                    "every rank built the whole model (%s): give TrainingTask a function that "
                    "builds it, and each rank fills its own part only",
                    size_text(nbytes),
                )
        check_loss(task.loss, model)
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise UserError(
                "no parameter of the model requires a gradient, so there is nothing to train",
                "call requires_grad_(True) on those to train",
            )
    same(group, "how the model gets its initial values", recipes, "build the same on all ranks")
    return model


def _plan(config: RunConfig, task: TrainingTask, grid: ParallelGrid) -> StepPlan:
    """Cut batches into micro-batches, and check the configuration against the data. Collective."""
    group, data, run = grid.world, config.data, config.run
    held_out = task.validation is not None
    with agreed(group):
        for one in (task.dataset, task.validation):
            check_by_number(one)
        _check_task(data, task)
        searched = data.micro_batch == "auto"
        if searched and run.deterministic:
            raise ConfigError(
                "data.micro_batch is auto, but run.deterministic is on: free memory would decide "
                "how samples are added up",
                "give data.micro_batch a number",
            )
        compression = config.gradients.compression
        if searched and compression != "none":
            raise ConfigError(
                f"data.micro_batch is auto, but gradients.compression is {compression}: trials "
                "would leave parts of gradients behind",
                "give data.micro_batch a number",
            )
        order = SampleOrder.of(task.dataset, data.batch, seed=run.seed, shuffle=data.shuffle)
        replica, lengths = grid.coordinate.dp, []
        parts: list[Part] | PartsByLength
        if data.micro_tokens is None:
            at_a_time = 1 if searched else data.samples_at_a_time
            parts = cut(data.batch, grid.dp, replica, at_a_time)
            micro_batches = len(parts)
            if parts[0].count % task.together:
                raise ConfigError(
                    f"a micro-batch has {plural(parts[0].count, 'sample')}, which is no multiple "
                    f"of the {task.together} that are computed together",
                    f"give data.micro_batch a multiple of {task.together}",
                )
        else:
            parts = PartsByLength(
                task.dataset, order, data.micro_tokens, ranks=grid.dp, rank=replica
            )
            micro_batches = len(parts(1))
            lengths = lengths_of(task.dataset, order.indices(1, 0, data.batch)).tolist()
        last = last_step(run, order.steps_per_epoch)
        check_best(config.checkpoint, data, last, held_out=held_out)
        run.profile.check(group.size, last)
    given = (
        f"{len(task.dataset)} {len(task.validation) if held_out else 0} {order.identity} {lengths}"
    )
    what = "the data set (its size, mixture or lengths)"
    same(group, what, given, "give all ranks the same data")
    compared(group, Reader(task.dataset), "the data set", copied=data.workers > 0)
    if held_out:
        compared(group, Reader(task.validation), "the held-out data set", copied=data.workers > 0)
    if micro_batches < grid.pp and group.rank == 0:
        logger.warning(
            "a step has %s, fewer than the %d stages of the pipeline, so ranks are idle most of "
            "the time; a smaller data.micro_batch gives more micro-batches",
            plural(micro_batches, "micro-batch"),
            grid.pp,
        )
    return StepPlan(parts, order, last)


def _check_task(data: DataSection, task: TrainingTask) -> None:
    """Check that a task can do what the section `data` of the configuration asks for.

    Raises:
        ConfigError: it cannot.
    """
    every = datasets_in(task.dataset)
    if data.cache is not None and not all(map(_is_cached, every)):
        raise ConfigError(
            "data.cache is given, but the data set was made without a cache",
            "leave data.cache out, or give each TokenDataset a BlockCache",
        )
    if not data.across_documents and not all(isinstance(one, PackedDataset) for one in every):
        raise ConfigError(
            "data.across_documents is false, but the data set does not have whole documents",
            "leave data.across_documents out",
        )
    given = [task.dataset] if task.validation is None else [task.dataset, task.validation]
    if data.micro_tokens is not None and not all(hasattr(one, "lengths") for one in given):
        raise ConfigError(
            "data.micro_tokens is given, but the data set has no method lengths",
            "give it one, and each data set of a mixture, or use data.micro_batch",
        )
    if data.validation_every and task.validation is None:
        raise ConfigError(
            f"data.validation_every is {data.validation_every}, but nothing is held out",
            "prepare the data with more --validation (a warning says if this does not help), or "
            "leave the key out",
        )
    if task.validation is not None and not len(task.validation):
        raise ConfigError(
            "the data set `validation` of TrainingTask has no samples",
            "leave it out, or give it some",
        )
    if task.together > 1 and (data.micro_batch == "auto" or data.micro_tokens is not None):
        raise ConfigError(
            f"{task.together} neighbours are computed together, but the data decides on the size "
            "of micro-batches",
            f"give data.micro_batch a multiple of {task.together}",
        )
    if data.loss == "token" and task.counted is None:
        raise ConfigError(
            "data.loss is token, but nothing says how many tokens of a batch count",
            "give TrainingTask `counted`, or leave data.loss out",
        )
    if data.damaged == "substitute" and getattr(task.dataset, "substitutes", None) is None:
        raise ConfigError(
            "data.damaged is substitute, but the data set substitutes no samples",
            "leave data.damaged out; TokenDataset with damaged='substitute' is one that does",
        )


def _is_cached(dataset: Any) -> bool:
    """Whether a data set reads shards through a cache of its node."""
    of = dataset.dataset if isinstance(dataset, RowsOfClass) else dataset
    files = getattr(of, "files", None)
    return isinstance(files, ShardFiles) and files.cache is not None


def sample_order_identity(config: RunConfig, order: SampleOrder) -> dict[str, Any]:
    """The values that decide which samples a step has, by configuration key."""
    return {
        "run.seed": config.run.seed,
        "data.batch": config.data.batch,
        "data.shuffle": config.data.shuffle,
        "number of samples": order.samples,
        **order.identity,
    }
