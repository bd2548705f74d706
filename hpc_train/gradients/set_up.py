"""Makes the averager of engine mpi: its buckets, and for memory.zero who has which part of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from torch import nn
from torch.nn import Parameter
from torch.optim import Optimizer

from hpc_train.collectives import connect
from hpc_train.collectives.device import DeviceCollectives
from hpc_train.errors import HpcTrainError, SetupError
from hpc_train.gradients.autotune import (
    MakeSums,
    chosen_bucket_bytes,
    compressed,
    device_way,
    made_on_all_nodes,
    ring_of,
    way,
)
from hpc_train.gradients.buckets import Bucket, has_slabs, plan_buckets
from hpc_train.gradients.division import BucketParts, Reach
from hpc_train.gradients.local import LocalSteps
from hpc_train.gradients.mpi import BucketAverager
from hpc_train.gradients.options import AveragingOptions
from hpc_train.gradients.overlap import check_movable
from hpc_train.gradients.ownership import trained, trained_by
from hpc_train.gradients.pooled_sums import PooledSums
from hpc_train.gradients.progress import Progress
from hpc_train.gradients.shared_parameters import SharedParameters
from hpc_train.gradients.staged_parameters import StagedParameters, check_staged
from hpc_train.gradients.streamed import StreamedParameters
from hpc_train.gradients.sums import CollectiveSums, LevelSums, Sums
from hpc_train.gradients.zero import ShardedAverager, check_divisible
from hpc_train.mpi.agreement import agreed
from hpc_train.mpi.levels import Levels


def mpi_averager(
    model: nn.Module, optimizer: Optimizer, levels: Levels, options: AveragingOptions
) -> BucketAverager:
    """The averager of engine mpi. Collective.

    Args:
        model: its parameters that require gradients are averaged.
        optimizer: its parameters are averaged, too.
        levels: the ranks by nodes.
        options: how gradients are averaged.

    Raises:
        UserError: the options do not fit together, or not with the model and the optimizer; or
            with engine nccl ranks share a GPU, or another averager sums on it.
        SetupError: the GPUs cannot be connected, or `options.zero` or a compression needs shared
            memory and there is too little.
    """
    planned = trained(model, optimizer)
    group = levels.whole
    options.check(planned)
    alone = group.size == 1 and not options.staged
    if alone or not (planned or _frozen(model, options)):
        none = CollectiveSums(connect(group), [])
        return BucketAverager(model, optimizer, group, lambda _: ([], none), Progress())
    if options.zero:
        return _sharded(model, optimizer, levels, options, planned)
    computing = next((p.device for p in planned if p.device.type != "cpu"), planned[0].device)
    if options.engine != "nccl":
        return _bucketed(
            model, optimizer, levels, options, planned, way(levels, options, computing)
        )
    release = DeviceCollectives.claim(group, computing)
    try:
        gpus = device_way(levels, options, computing)
        averager = _bucketed(model, optimizer, levels, options, planned, gpus)
    except HpcTrainError:
        release()
        raise
    averager.at_close.append(release)
    return averager


def _bucketed(
    model: nn.Module,
    optimizer: Optimizer,
    levels: Levels,
    options: AveragingOptions,
    planned: Sequence[Parameter],
    chosen: tuple[MakeSums, list[Callable[[], None]]],
) -> BucketAverager:
    group, (make, closing) = levels.whole, chosen
    size = chosen_bucket_bytes(group, make, planned, options)
    by_rows = options.compression != "none"

    def made(parameters: Sequence[Parameter]) -> tuple[list[Bucket], Sums]:
        buckets = [Bucket(some, by_rows=by_rows) for some in plan_buckets(parameters, size)]
        return buckets, make(buckets)

    progress = options.progress()
    averager = (
        LocalSteps(model, optimizer, levels, options.average_every, made, progress)
        if options.average_every > 1
        else BucketAverager(model, optimizer, group, made, progress)
    )
    averager.at_close += closing
    return averager


def _sharded(
    model: nn.Module,
    optimizer: Optimizer,
    levels: Levels,
    options: AveragingOptions,
    planned: Sequence[Parameter],
) -> BucketAverager:
    check_divisible(optimizer)

    def made(buckets: Sequence[Bucket], reach: Sequence[Reach] = ()) -> LevelSums:
        if options.zero > 1 and reach:
            return PooledSums(
                levels, buckets, ring_of(levels), reach, by_pass=options.deterministic
            )
        return compressed(levels, buckets, options.compression, reach)

    def make(buckets: Sequence[Bucket], reach: Sequence[Reach] = ()) -> LevelSums:
        return made_on_all_nodes(levels.whole, lambda: made(buckets, reach))

    frozen = _frozen(model, options)
    size = chosen_bucket_bytes(levels.whole, make, [*planned, *frozen], options)
    whole = frozenset(options.whole)  # `in` on a list would compare the parameters' values
    # Others in the model may be those of another optimizer, or be changed by the user's code.
    mine = {id(p) for p in trained_by(optimizer)}
    divisible = [p for p in planned if id(p) in mine and p not in whole and has_slabs(p)]
    with agreed(levels.whole):
        check_movable(model, [*divisible, *frozen])
    rest = {id(p) for p in divisible}
    if options.staged:
        check_staged(planned, [p for p in planned if id(p) not in rest], levels.whole)
    divided, still = (
        [some for stage in _by_stage(which, options) for some in plan_buckets(stage, size)]
        for which in (divisible, frozen)
    )
    kept = plan_buckets([p for p in planned if id(p) not in rest], size)
    by_rows = options.compression != "none" or options.staged
    buckets = [
        *(Bucket(some, by_rows=True) for some in divided),
        *(Bucket(some, by_rows=by_rows) for some in kept),
    ]
    reach = Reach.JOB if options.scope == "all" else Reach.NODE
    reaches = [reach] * len(divided) + [Reach.RANK] * len(kept)
    sums = make(buckets, reaches)
    division = BucketParts(
        levels,
        [*buckets, *(Bucket(some, by_rows=True, summed=False) for some in still)],
        [*reaches, *[reach] * len(still)],
    )

    progress = options.progress()
    try:
        # Only this: what `ShardedAverager` does is collective over all nodes.
        parameters = made_on_all_nodes(
            levels.whole, lambda: _shared(sums, division, progress, options, planned)
        )
    except SetupError:
        progress.close()
        sums.close()
        raise
    return ShardedAverager(
        model,
        optimizer,
        parameters,
        hidden=options.only_modules_read,
        values=options.values,
    )


def _shared(
    sums: LevelSums,
    division: BucketParts,
    progress: Progress,
    options: AveragingOptions,
    planned: Sequence[Parameter],
) -> SharedParameters:
    if options.staged:
        return StagedParameters(sums, division, progress, planned[0].device)
    if options.zero == 3 and Reach.JOB in division.reach:
        return StreamedParameters(sums, division, progress, options.gates)
    return SharedParameters(sums, division, progress)


def _frozen(model: nn.Module, options: AveragingOptions) -> list[Parameter]:
    """The parameters that are divided although they are not trained: with zero 3 only.

    With zero 3 nobody but the modules uses parameters. Other stages leave it to the user's code to
    change those that are not trained, as for the mean of a model's parameters over the steps.
    """
    if options.zero < 3:
        return []
    return [p for p in model.parameters() if not p.requires_grad and has_slabs(p)]


def _by_stage(
    parameters: Sequence[Parameter], options: AveragingOptions
) -> Iterator[list[Parameter]]:
    """Parameters whose buckets may be filled one after the other by the backward pass.

    With zero 3 they are those of each stage, the last stage first, because a bucket is gathered as
    a whole. A parameter of several stages is the first one's.
    """
    stage = {
        parameter: place
        for place, gate in reversed(list(enumerate(options.gates)))
        for parameter in gate.module.parameters()
    }
    places = {parameter: stage.get(parameter, 0) for parameter in parameters}
    for place in sorted({*places.values()}, reverse=True):
        yield [parameter for parameter in parameters if places[parameter] == place]
