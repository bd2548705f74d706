"""Measure a machine on the ranks of a job, for `hpc-train plan`. It takes about ten seconds.

Two functions return this rank's own numbers. `pass_seconds` measures passes of a layer, and
`message_seconds` messages to the next rank of a group. `described` is a pure function that turns
the numbers of all ranks into a description of the machine.

`measure_alone` measures in one process what it can, in about five seconds.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hpc_train import files
from hpc_train.collectives.coroutines import Coroutine, drive
from hpc_train.config import RunConfig
from hpc_train.errors import UserError, plural
from hpc_train.host.cores import physical_cores
from hpc_train.models.shape import Shape
from hpc_train.mpi.agreement import meet
from hpc_train.mpi.environment import ranks_yield
from hpc_train.mpi.group import Group
from hpc_train.mpi.levels import Levels
from hpc_train.mpi.runtime import Runtime
from hpc_train.mpi.topology import discover
from hpc_train.planning.assumed import Speeds, cores_of_a_rank
from hpc_train.planning.layouts import GIB
from hpc_train.planning.machine import Compute, Link, Machine
from hpc_train.planning.model import block_shape
from hpc_train.training.device import choose_device, choose_matmul, free_memory_of, use_cores

SECONDS = 1.0  # seconds of each of the five measurements of computing
HIDDEN, TOKENS = 1024, 256  # largest sizes of the measured layer on processors
SAMPLES = 4  # samples of the larger pass; the smaller one has one sample
STREAM = 32 << 20  # bytes of each of three tensors
STREAMS = 1 << 30  # bytes of the tensors of all threads together
MATRIX = 512  # rows and columns of the matrices that threads multiply
SMALL, LARGE = 8, 4 << 20  # bytes of the two kinds of messages
REPEATS = {SMALL: 50, LARGE: 4}  # number of timed messages


@dataclass(frozen=True)
class MessageCost:
    """The cost of a message: seconds in all, and seconds in which it keeps a processor busy."""

    seconds: float = 0.0
    processor: float = 0.0


@dataclass(frozen=True)
class Found:
    """The numbers that one rank has measured. A time that it has not measured is 0.

    Args:
        node: the number of its node.
        one, several: seconds of a pass of 1 and of SAMPLES samples on rank 0 while all others
            sleep.
        in_node, in_job: seconds of a pass of SAMPLES samples while all ranks of the first node, or
            of the job, compute.
        stream: bytes/s that the rank reads and writes while all ranks do.
        inside, across: costs of a small and a large message inside its node, and between nodes.
        free: bytes of free memory, on the GPU if the rank has one, otherwise on the node.
    """

    node: int
    one: float
    several: float
    in_node: float
    in_job: float
    stream: float
    inside: tuple[MessageCost, MessageCost]
    across: tuple[MessageCost, MessageCost]
    free: int


def measure(config: RunConfig, runtime: Runtime) -> Machine:
    """Measure on all ranks of a job. All get the same description. Collective."""
    use_cores(runtime)
    world, device = runtime.world, choose_device(runtime.node.rank)
    shape = measured_shape(block_shape(config), device)
    choose_matmul(world, config.precision.matmul, device)
    node = discover(world, runtime.node).node[world.rank]
    levels = Levels.of(world)
    one, several = (
        layer_pass(shape, config.precision.dtype, device, samples) for samples in (1, SAMPLES)
    )
    first = world.rank == 0
    found = Found(
        node,
        in_turn(world, first, one),
        in_turn(world, first, several),
        in_turn(world, node == 0, several),
        in_turn(world, True, several),
        3 * STREAM / in_turn(world, True, stream(device)),
        messages(world, levels.node, device, mine=node == 0),
        messages(world, levels.cross, device, mine=True),
        free_memory_of(device),
    )
    levels.close()
    flops = 3 * shape.parts()[1].flops  # a block's forward and backward pass of one sample
    return described(world.gathered(found), flops, config.precision.dtype, device.type)


def measure_alone(config: RunConfig, ranks_per_node: int) -> Speeds:
    """Measure in this process what one rank and the ranks of a node can compute.

    MPI is not loaded. Threads take the place of a node's ranks: they show how much ranks slow each
    other down by sharing the clock, the caches and the memory of the node.

    Args:
        config: the training, whose layer and number format are measured.
        ranks_per_node: ranks on each node, which share the cores of this one.
    """
    device, dtype = choose_device(), config.precision.dtype
    shape = measured_shape(block_shape(config), device)
    choose_matmul(Group(), config.precision.matmul, device)
    cores = len(physical_cores(os.sched_getaffinity(0)))
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(cores_of_a_rank(cores, ranks_per_node))
    one, several = (pass_seconds(layer_pass(shape, dtype, device, n)) for n in (1, SAMPLES))
    sample, layer = of_sample(one, several)
    rank = 3 * shape.parts()[1].flops / sample
    if device.type == "cpu":
        ranks = min(ranks_per_node, max(1, cores // torch.get_num_threads()))
        alone, shared = (beside([matrix_product(dtype)] * count) for count in (1, ranks))
        node: float | None = short(rank * ranks * min(1.0, alone / shared))
        nbytes = min(STREAM, STREAMS // (3 * ranks))
        streams = [stream(device, nbytes) for _ in range(ranks)]
    else:
        gpus = getattr(torch, device.type).device_count()
        node = short(rank * gpus) if gpus < ranks_per_node else None
        streams, nbytes = [stream(device)], STREAM
    bandwidth = 3 * nbytes / beside(streams)
    free = free_memory_of(device)
    return Speeds(device.type, short(rank), node, short(layer), short(bandwidth), free)


def beside(several: Sequence[Callable[[], None]]) -> float:
    """Median seconds of a call of each function, while threads repeat all of them."""
    with ThreadPoolExecutor(len(several)) as threads:
        return statistics.median(threads.map(pass_seconds, several))


def matrix_product(dtype: str) -> Callable[[], None]:
    """A function that multiplies two matrices. Python's lock is free meanwhile."""
    matrix = torch.ones(MATRIX, MATRIX, dtype=getattr(torch, dtype))

    def once() -> None:
        torch.mm(matrix, matrix)

    return once


def measured_shape(shape: Shape, device: torch.device) -> Shape:
    """The shape of the layer that is measured. On processors a large one is made smaller."""
    return shape.at_most(TOKENS, HIDDEN) if device.type == "cpu" else shape


def layer_pass(shape: Shape, dtype: str, device: torch.device, samples: int) -> Callable[[], None]:
    """A function that computes a layer's forward and backward pass, and returns at its end."""
    kind = torch.float64 if dtype == "float64" else torch.float32
    layer = shape.block().to(device, kind)
    x = torch.randn(
        samples, shape.tokens, shape.hidden, device=device, dtype=kind, requires_grad=True
    )
    gradient = torch.randn_like(x)
    short = dtype in ("float16", "bfloat16")

    def once() -> None:
        layer.zero_grad()
        with torch.autocast(device.type, getattr(torch, dtype)) if short else nullcontext():
            y = layer(x)
        y.backward(gradient)
        if device.type != "cpu":
            getattr(torch, device.type).synchronize()

    return once


def stream(device: torch.device, nbytes: int | None = None) -> Callable[[], None]:
    """A function that reads two tensors of so many bytes (STREAM), and writes a third one."""
    one, other, total = (torch.ones((nbytes or STREAM) // 4, device=device) for _ in range(3))

    def once() -> None:
        torch.add(one, other, out=total)
        if device.type != "cpu":
            getattr(torch, device.type).synchronize()

    return once


def pass_seconds(once: Callable[[], None]) -> float:
    """Mean seconds of a call that is repeated for SECONDS. The first call does not count."""
    once()
    count, taken, begin = 0, 0.0, time.perf_counter()
    while taken < SECONDS:
        once()
        count, taken = count + 1, time.perf_counter() - begin
    return taken / count


def message_seconds(group: Group, nbytes: int, device: torch.device) -> MessageCost:
    """The cost of a message to the next rank of a group, while all ranks send one. Collective.

    As in a pipeline, tensors on a GPU go through host memory unless MPI can read GPU memory.
    """
    # Not at the top, because this module loads MPI. A group of several ranks has loaded it.
    from hpc_train.collectives.mpi import through_host

    mine, arrived = (torch.zeros(nbytes, dtype=torch.uint8, device=device) for _ in range(2))
    staged = through_host(device)
    polite = ranks_yield(os.environ)
    into = torch.empty_like(arrived, device="cpu" if staged else device)
    begin = spent = 0.0
    for number in range(1 + REPEATS[nbytes]):
        out = mine.cpu() if staged else mine
        with group.waiting("a message of a measurement"):
            drive(_passed_on(group, _buffer(out), _buffer(into)), polite=polite)
        if staged:
            arrived.copy_(into)
        if number == 0:  # the first message made the connections, so it does not count
            begin, spent = time.perf_counter(), time.process_time()
    seconds, processor = time.perf_counter() - begin, time.process_time() - spent
    return MessageCost(seconds / REPEATS[nbytes], processor / REPEATS[nbytes])


def _passed_on(group: Group, out: Any, into: Any) -> Coroutine[None]:
    """Send a buffer to the next rank of a group, and receive one from the rank before."""
    assert group.comm is not None
    arrived = group.comm.Irecv(into, source=(group.rank - 1) % group.size)
    sent = group.comm.Isend(out, dest=(group.rank + 1) % group.size)
    yield arrived
    yield sent


def _buffer(tensor: torch.Tensor) -> Any:
    """A tensor in the form that mpi4py takes."""
    return tensor if tensor.is_cuda else tensor.numpy()


def messages(
    world: Group, group: Group, device: torch.device, *, mine: bool
) -> tuple[MessageCost, MessageCost]:
    """Measure both kinds of messages in groups whose turn it is (`mine`). Collective over world."""
    taken = [MessageCost(), MessageCost()]
    for number, nbytes in enumerate((SMALL, LARGE)):
        meet(world)
        if mine and group.size > 1:
            taken[number] = message_seconds(group, nbytes, device)
    meet(world)
    return taken[0], taken[1]


def in_turn(world: Group, mine: bool, once: Callable[[], None]) -> float:
    """`pass_seconds` on the ranks whose turn it is (`mine`), while others sleep. Collective."""
    meet(world)
    taken = pass_seconds(once) if mine else 0.0
    meet(world)
    return taken


def described(found: Sequence[Found], flops: float, dtype: str, device: str) -> Machine:
    """Turn the numbers of all ranks into the description of a machine.

    Args:
        found: the numbers of all ranks, in their order.
        flops: number of operations in a layer's pass of one sample.
        dtype: the number format, as in `precision.dtype`.
        device: cpu, cuda or xpu.
    """
    first = found[0]
    ranks = sum(one.node == 0 for one in found)
    sample, layer = of_sample(first.one, first.several)
    speed = flops / sample
    capacity = sum(first.several / one.in_node for one in found if one.in_node)
    slowest = min(_by_node(found, lambda one: first.several / one.in_job))
    share = slowest / ranks  # the part of a core that a rank has while all compute
    stream_speed = statistics.median(one.stream for one in found)
    free = min(one.free for one in found) / GIB
    nodes = max(one.node for one in found) + 1
    # On one node this would be the node's speed once more, only with other noise.
    in_job = short(speed * slowest) if nodes > 1 else None
    return Machine(
        {dtype: Compute(short(speed), short(speed * capacity), in_job, short(layer))},
        short(stream_speed / min(1.0, share)),
        _link([one.inside for one in found if one.inside[1].seconds], sharing=1),
        _link([one.across for one in found if one.across[1].seconds], sharing=ranks),
        node_gib=short(free) if device == "cpu" else None,
        rank_gib=short(free) if device != "cpu" else None,
        device=device,
        ranks_per_node=ranks,
    )


def of_sample(one: float, several: float) -> tuple[float, float]:
    """Seconds of a sample, and the fixed ones of a layer's pass.

    Args:
        one: seconds of a pass of one sample.
        several: seconds of a pass of SAMPLES samples.
    """
    sample = (several - one) / (SAMPLES - 1)
    if sample <= 0:  # small layers take as long for one sample as for several
        sample = several / SAMPLES
    return sample, max(0.0, one - sample)


def _by_node(found: Sequence[Found], number: Callable[[Found], float]) -> list[float]:
    """The sum of a number over the ranks of each node."""
    nodes = sorted({one.node for one in found})
    return [sum(number(one) for one in found if one.node == node) for node in nodes]


def _link(taken: Sequence[tuple[MessageCost, MessageCost]], sharing: int) -> Link | None:
    """The cost of messages on a link that `sharing` ranks share; None if none were measured."""
    if not taken:
        return None
    alpha = statistics.median(small.seconds for small, _ in taken)
    more = LARGE - SMALL
    beta = statistics.median(large.seconds - small.seconds for small, large in taken) / more
    processor = statistics.fmean(large.processor - small.processor for small, large in taken) / more
    return Link(short(alpha), short(max(0.0, beta / sharing)), short(max(0.0, processor)))


def short(number: float) -> float:
    """Round a number to four digits, because a measurement is not more exact."""
    return float(f"{number:.4g}")


def write(made: Machine, path: Path, ranks: int) -> None:
    """Write a description that was measured on `ranks` ranks.

    A file that is there, which its user may have written, is kept with the ending .old. If there is
    such a file, a description that was measured does not replace it.

    Raises:
        UserError: the file cannot be written.
    """
    header, old = "# Measured by `hpc-train plan --measure` on ", path.with_name(f"{path.name}.old")
    try:
        there = path.read_bytes() if path.exists() else b""
        if there and not (old.exists() and there.startswith(header.encode())):
            old.write_bytes(there)
        files.write_text(path, f"{header}{plural(ranks, 'rank')}.\n{made.to_yaml()}")
    except OSError as error:
        remedy = "name another file with --machine"
        raise UserError(f"{path} cannot be written: {error.strerror}", remedy) from None
