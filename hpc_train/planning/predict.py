"""Predict the seconds of a step for a layout on a machine. The largest of three bounds counts.

The critical path: the work, waiting and messages of one rank in sequence, as if it shared its
processor and its link with nobody. The processors: all work of ranks that share cores, with what
communication takes of the processors. The links: the bytes that nodes send to each other.
docs/how-to/plan.md has the formulas.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpc_train import compression
from hpc_train.parallel.simulate import Costs, makespan
from hpc_train.planning.layouts import Candidate
from hpc_train.planning.machine import Link, Machine
from hpc_train.planning.model import trained_parameters
from hpc_train.planning.schedules import ITEM_BYTES, OPTIMIZER_TENSORS, micro_batching

Array = NDArray[np.float64]
NO_COST = Link(0.0, 0.0)
ASSUMED_BUCKET = 4 << 20  # bytes


@dataclass(frozen=True)
class Prediction:
    """The predicted time of a step.

    Args:
        seconds: seconds of the step.
        bubble: share of the step in which processors would wait if messages took no time.
        communication: share of the step that messages add.
    """

    seconds: float
    bubble: float
    communication: float


def predict(layout: Candidate, machine: Machine) -> Prediction:
    """Predict the time of a step."""
    step = StepModel(layout, machine)
    silent = step.without_messages()
    seconds, alone = step.seconds(), silent.seconds()
    return Prediction(
        seconds, max(0.0, alone - silent.busy()) / seconds, max(0.0, seconds - alone) / seconds
    )


class StepModel:
    """A step of a layout on a machine. Times are in seconds, for a rank with cores of its own.

    Arrays have the shape (dp, pp, tp), or one that numpy broadcasts to it.

    Args:
        layout: the layout.
        machine: the machine that it runs on.
        averages: whether replicas average their gradients.
    """

    def __init__(self, layout: Candidate, machine: Machine, *, averages: bool = True) -> None:
        self.layout, self.machine = layout, machine
        self.config, self.node = layout.config, layout.node
        self.dp, self.tp, self.pp = layout.sizes
        self.averages = averages and self.dp > 1
        self.speed = machine.compute[self.config.precision.dtype]
        self.inside, self.across = machine.inside or NO_COST, machine.across or NO_COST
        self.micro_batch, self.n = micro_batching(self.config)
        self.item = ITEM_BYTES[self.config.precision.parameters]
        shape = layout.shape
        trained = self._by_rank(trained_parameters(self.config, shape, layout.parts)[0])
        self.state = self.item * trained  # bytes of what a rank trains, and of its gradients
        numbers = self.micro_batch * shape.tokens * shape.hidden
        self.activation = numbers * self.item  # bytes of what stages pass on
        # Bytes that a tensor group sums. The embedding's result is no product: it stays in 32 bits.
        products = numbers * ITEM_BYTES[self.config.precision.dtype]
        self.summed = [self.activation, *[products] * (len(layout.parts) - 1)]
        self.crossing_next = self.node != np.roll(self.node, -1, axis=1)
        self.crossing_previous = self.node != np.roll(self.node, 1, axis=1)
        first, last = self.node.min(axis=2, keepdims=True), self.node.max(axis=2, keepdims=True)
        self.crossing_tensor = np.broadcast_to(first != last, self.node.shape)
        self.tensor_nodes = 1 + int(
            (np.diff(np.sort(self.node, axis=2), axis=2) != 0).sum(axis=2).max()
        )

    def seconds(self) -> float:
        """Seconds of the step."""
        return max(self.path(), self.processors() + self.missed(), self.links())

    def without_messages(self) -> StepModel:
        """The same step if messages took no time."""
        machine = replace(self.machine, inside=NO_COST, across=NO_COST)
        return StepModel(self.layout, machine, averages=False)

    def missed(self) -> float:
        """Seconds that ranks which share cores lose because a core is not free when they need it.

        Other ranks cannot make up for the time that a rank of the pipeline has waited. The limit is
        that of any schedule that leaves no core idle while there is work: Graham, "Bounds on
        multiprocessing timing anomalies", SIAM J. Appl. Math. 17, 1969.
        """
        at_once = self._capacities()[1]
        if at_once >= self.node.size:
            return 0.0
        silent = self.without_messages()
        waited = silent.path() - float(silent.work().max())
        return max(0.0, min(waited, (1 - 1 / at_once) * silent.path()))

    def path(self) -> float:
        """Seconds of the critical path."""
        name = self.config.parallel.schedule
        pipeline = makespan(name, self.pp, self.n, tuple(self.costs()))
        own = float((self.averaging_work() + self.optimizing()).max())
        return pipeline + own + self.exposed() + self.tied_sum() + self.agreement()

    def processors(self) -> float:
        """Least seconds that the busiest node's processors need, or all processors of the job."""
        in_node, in_job = self._capacities()
        work = self.work()
        return max(float(self._by_node(work).max()) / in_node, float(work.sum()) / in_job)

    def busy(self) -> float:
        """Seconds that the processors would need if all work were spread evenly."""
        in_node, in_job = self._capacities()
        nodes = len(self._by_node(self.node))
        return float(self.work().sum()) / min(in_node * nodes, in_job)

    def links(self) -> float:
        """Least seconds that the links between nodes need for the bytes of the busiest node."""
        return float(self._by_node(self.traffic()[1]).max()) * self.across.beta

    def work(self) -> Array:
        """Seconds that each rank computes, and that communication takes of its processor."""
        inside, across = self.traffic()
        messages = inside * self.inside.processor + across * self.across.processor
        passes = self._by_rank([sum(module) for module in self.modules()])
        return self.n * passes + self.averaging_work() + self.optimizing() + messages

    def _capacities(self) -> tuple[float, float]:
        """How many ranks can compute at full speed at once on a node, and how many in the job."""
        ranks = self._by_node(np.ones(1))
        in_node = min((self.speed.node or math.inf) / self.speed.rank, float(ranks.max()))
        of_job = min((self.speed.job or math.inf) / self.speed.rank, in_node)
        return in_node, of_job * len(ranks)

    # Computing.

    def modules(self) -> list[tuple[float, float, float]]:
        """Seconds for a micro-batch: forward pass, input gradients, weight gradients.

        The list has embedding, blocks and head. Each of the three takes a third of the computing.
        Weight gradients are also added to those of the other micro-batches. Before the gradients, a
        part that is recomputed repeats its forward pass, or with selective reads and writes what it
        has not kept.
        """
        found = []
        recompute = self.config.memory.recompute
        kept = self.layout.shape.kept(self.layout.parts, recompute)
        for part, keeps in zip(self.layout.parts, kept, strict=True):
            computing = part.flops * self.micro_batch / self.tp / self.speed.rank
            third = computing + part.overhead * self.speed.layer / 3
            added = 3 * part.parameters * self.item / self.machine.memory_bandwidth
            again = third if keeps < part.activations else 0.0
            if recompute == "selective":
                nbytes = 2 * (part.activations - keeps) * self.micro_batch * self.item
                again = nbytes / self.machine.memory_bandwidth
            found.append((third, third + again, third + added))
        return found

    def costs(self) -> Iterator[Costs]:
        """The costs of each virtual stage for a micro-batch, with its messages."""
        modules, parts = self.modules(), self.layout.parts
        for stage, run in enumerate(self.layout.runs):
            rank = stage % self.pp
            own = zip(*(modules[i] for i in run), strict=True)
            forward, back, weight = (sum(times, start=0.0) for times in own)
            lane = self.lane(rank, self.crossing_tensor)
            for i in run:
                one = summing(self.inside, lane, self.tp, self.tensor_nodes, self.summed[i])
                forward += parts[i].sums[0] * one
                back += parts[i].sums[1] * one
            yield Costs(
                forward,
                back,
                weight,
                self._sending(rank, self.crossing_next),
                self._sending(rank, self.crossing_previous),
            )

    def _sending(self, rank: int, crossing: NDArray[np.bool_]) -> float:
        link = self.lane(rank, crossing)
        return link.alpha + self._sent_activation * link.beta

    @property
    def _sent_activation(self) -> float:
        """Bytes that a rank sends to the next or the previous stage."""
        return self.activation / (self.tp if self.config.parallel.sequence_parallel else 1)

    def optimizing(self) -> Array:
        """Seconds to read the gradients, and to read and write parameters and optimizer state."""
        numbers = 3 + 2 * OPTIMIZER_TENSORS[self.config.optimizer.name]
        each = self.state / self.layout.dividing.optimizing
        return numbers * each / self.machine.memory_bandwidth

    # Communicating.

    def lane(self, rank: int, crossing: NDArray[np.bool_]) -> Link:
        """The link of a stage's ranks: that inside a node, or a rank's share of its node's link."""
        nodes = self.node[:, rank][crossing[:, rank]]
        if not nodes.size:
            return self.inside
        return Link(self.across.alpha, self.across.beta * int(np.bincount(nodes).max()))

    def traffic(self) -> tuple[Array, Array]:
        """Bytes that each rank sends in a step: inside its node, and to other nodes."""
        inside, across = np.zeros(self.node.shape), np.zeros(self.node.shape)
        for crossing, nbytes in self._pipeline_traffic():
            inside += np.where(crossing, 0.0, nbytes)
            across += np.where(crossing, nbytes, 0.0)
        for total, nbytes in zip((inside, across), self._tensor_traffic(), strict=True):
            total += nbytes
        return inside, across + self.averaged_across()

    def _pipeline_traffic(self) -> Iterator[tuple[NDArray[np.bool_], Array]]:
        sent = np.full((1, self.pp, 1), float(len(self.layout.runs) // self.pp))
        for crossing, end in ((self.crossing_next, -1), (self.crossing_previous, 0)):
            messages = sent.copy()
            messages[0, end] -= 1
            yield crossing, self.n * self._sent_activation * messages
        ends = np.zeros((1, self.pp, 1))
        ends[0, [0, -1]] = self._tied
        yield self.node[:, :1] != self.node[:, -1:], ends

    def _tensor_traffic(self) -> tuple[Array, Array]:
        parts = zip(self.layout.parts, self.summed, strict=True)
        nbytes = self._by_rank([sum(part.sums) * each for part, each in parts])
        inside, across = halving(self.tp, self.tensor_nodes)
        return self.n * inside * nbytes, self.n * across * nbytes

    # Averaging.

    def averaging_work(self) -> Array:
        """Seconds that averaging inside a node takes on each rank.

        In shared memory each rank reads and writes three times as many numbers as its gradients.
        """
        ranks = self.layout.replicas[1]
        if ranks == 1 or not self.averages:
            return 0.0 * self.state
        if self.machine.device == "cpu":
            return 3 * self.state / self.machine.memory_bandwidth
        return 2 * (ranks - 1) / ranks * self.state * self.inside.beta

    def averaged_across(self) -> Array:
        """Bytes that each rank sends to other nodes to average the gradients.

        A flat sum is a ring of all replicas. A rank sends to another node only if the next replica
        of the ring is there.
        """
        nodes, ranks = self.layout.replicas
        if nodes == 1 or not self.averages:
            return np.zeros((1, 1, 1))
        gradients = self.config.gradients
        flat = gradients.engine == "horovod" or gradients.two_level == "off"
        leaving: Array = (self.node != np.roll(self.node, -1, axis=0)) * 1.0
        parts, share = (self.dp, leaving) if flat else (nodes, 1 / ranks)
        by = self.layout.dividing
        # Each pass gathers parameters forward and backward, and the last one sends gradients.
        again = by.passes + 0.5 if (by.zero, by.scope) == (3, "all") else 1.0
        return again * 2 * (parts - 1) / parts * share * self.state * self._kept(nodes)

    def _kept(self, nodes: int) -> float:
        """Bytes that are sent per step, as a multiple of the gradients' bytes.

        With average_every parameters and optimizer state are sent, once in that number of steps.
        """
        gradients = self.config.gradients
        scheme = compression.parse_scheme(gradients.compression)
        tensors = 1 + OPTIMIZER_TENSORS[self.config.optimizer.name]
        every = gradients.average_every
        return (1.0 if every == 1 else tensors / every) * {
            "none": 1.0,
            "fp16": 2 / self.item,
            "bf16": 2 / self.item,
            "topk": min(1.0, nodes * scheme.number * (4 + self.item) / (2 * self.item)),
            "powersgd": min(1.0, self.layout.shape.low_rank(scheme.number)),
        }[scheme.kind]

    def exposed(self) -> float:
        """Seconds of averaging across nodes that no backward pass hides: see docs/scaling.md."""
        nodes, _ = self.layout.replicas
        sent = float(self._by_node(self.averaged_across()).max()) * self.across.beta
        if not sent:
            return 0.0
        section = self.config.parallel
        early = self.pp == 1 or section.schedule in ("gpipe", "1f1b")
        passes = self._by_rank([back + weight for _, back, weight in self.modules()])
        hidden = float(passes.max()) if early and self.config.gradients.average_every == 1 else 0.0
        bucket = self.config.gradients.bucket_bytes or ASSUMED_BUCKET
        last = sent * min(1.0, bucket / float(self.state.max()))
        return max(last, sent - hidden) + rounds_of_messages(nodes) * self.across.alpha

    @property
    def _tied(self) -> float:
        """Bytes of the tied gradients that the first and the last stage add up."""
        return self.layout.shape.tied / self.tp * self.item * (self.pp > 1)

    def tied_sum(self) -> float:
        """Seconds to add up the tied embedding's gradients of the first and the last stage."""
        crossing = np.broadcast_to(self.node[:, :1] != self.node[:, -1:], self.node.shape)
        nodes = 1 + bool(crossing.any())
        lane = self.lane(0, crossing)
        return summing(self.inside, lane, 2, nodes, self._tied) if self._tied else 0.0

    def agreement(self) -> float:
        """Seconds of the agreement of all ranks at the start of each step."""
        alpha = self.across.alpha if self.node.max() else self.inside.alpha
        return 2 * math.ceil(math.log2(self.node.size)) * alpha

    def _by_rank(self, modules: Sequence[float]) -> Array:
        """Sums over the modules that each pipeline rank has, of shape (1, pp, 1)."""
        runs = self.layout.runs
        sums = [
            sum(modules[i] for run in runs[rank :: self.pp] for i in run) for rank in range(self.pp)
        ]
        return np.array(sums, dtype=float)[None, :, None]

    def _by_node(self, values: NDArray[Any]) -> Array:
        """Sums over the ranks of each node."""
        each = np.broadcast_to(values, self.node.shape).ravel().astype(float)
        return np.bincount(self.node.ravel(), each).astype(float)


def rounds_of_messages(nodes: int) -> int:
    """Number of messages one after the other in a sum over nodes, which is that of a tree.

    A ring never has fewer. docs/scaling.md has the formulas of both.
    """
    return 2 * math.ceil(math.log2(nodes))


def halving(ranks: int, nodes: int) -> tuple[float, float]:
    """What each rank sends in an allreduce: inside its node, and to other nodes.

    Both are multiples of the data's size. The allreduce is a reduce-scatter by halving and a gather
    by doubling; their steps with the larger distances leave the node: Thakur, Rabenseifner and
    Gropp, "Optimization of collective communication operations in MPICH", IJHPCA 19, 2005.
    """
    across = 2 * (nodes - 1) / nodes
    return 2 * (ranks - 1) / ranks - across, across


def summing(inside: Link, across: Link, ranks: int, nodes: int, nbytes: float) -> float:
    """Seconds of such an allreduce of `nbytes` bytes."""
    far = 2 * math.ceil(math.log2(nodes))
    near = 2 * math.ceil(math.log2(ranks)) - far
    share = halving(ranks, nodes)
    latency = near * inside.alpha + far * across.alpha
    return latency + nbytes * (share[0] * inside.beta + share[1] * across.beta)
