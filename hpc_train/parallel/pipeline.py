"""Carry out a pipeline schedule, in a short loop over its actions.

A rank alone is a pipeline of one stage. The same loop then accumulates the gradients of its
micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from hpc_train.models.dropout import SampleDropout, SeedsInUse
from hpc_train.mpi.group import Group
from hpc_train.parallel import schedule as schedules
from hpc_train.parallel.graphs import graph_nodes
from hpc_train.parallel.linear import Deferred, compute
from hpc_train.parallel.schedule import Action, Kind, Name, Schedule
from hpc_train.parallel.stages import Stages
from hpc_train.parallel.transport import TAGS, Message, Transport

Forward = Callable[[int, int], Tensor]
"""Runs the model's whole forward pass and its loss.

Takes the numbers of the micro-batch and of the virtual stage.
"""


@dataclass
class Live:
    """The tensors that a virtual stage keeps of a micro-batch until its backward pass has ended."""

    output: Tensor
    seeds: SeedsInUse
    input: Tensor | None = None
    gradient: Tensor | None = None
    deferred: list[tuple[Parameter, Callable[[], Tensor]]] = field(default_factory=list)


class Pipeline:
    """Runs micro-batches through the stages of a model. Every rank of the pipeline makes it.

    Args:
        group: the ranks of the pipeline.
        device: the device of the tensors.
        name: the schedule's name.
        virtual_stages: number of virtual stages of each rank.
        stages: this rank's stages; None for a pipeline of one rank.
        deferred: takes the weight gradients of this rank's linear layers, for zero_bubble.
        dropouts: the dropout layers of this rank's part of the model.
    """

    def __init__(
        self,
        group: Group,
        device: torch.device,
        name: Name = "1f1b",
        virtual_stages: int = 1,
        stages: Stages | None = None,
        deferred: Deferred | None = None,
        dropouts: Sequence[SampleDropout] = (),
    ) -> None:
        self.dropouts = list(dropouts)
        self.group, self.name, self.virtual_stages = group, name, virtual_stages
        self.stages, self.deferred = stages, deferred
        self.virtual = group.size * virtual_stages
        self.transport = Transport(group, device) if group.size > 1 else None
        self.peak_live = 0
        """Largest number of (micro-batch, virtual stage) pairs with activations held at once."""

    @property
    def is_last(self) -> bool:
        """Whether the loss is computed on this rank."""
        return self.group.rank == self.group.size - 1

    def train(
        self,
        forward: Forward,
        forms: Sequence[Hashable],
        weights: Sequence[float] | None = None,
    ) -> list[Tensor]:
        """Compute the gradients of the weighted sum of the micro-batches' losses.

        Collective over the pipeline.

        Args:
            forward: see `Forward`. Its errors are raised on this rank only.
            forms: a value for each micro-batch, such as its number of samples. Micro-batches with
                equal values have activations of the same shape.
            weights: the factor of each micro-batch's loss; by default all have the same, and add up
                to 1. A loss whose weight is 0 adds nothing to the gradients, even if it is NaN.

        Returns:
            The micro-batches' losses, without their weights, on the last rank. An empty list on the
            others.
        """
        made = schedules.build(self.name, self.group.size, len(forms), self.virtual_stages)
        return self._run(made, forward, forms, weights or [1 / len(forms)] * len(forms))

    def evaluate(self, forward: Forward, forms: Sequence[Hashable]) -> list[Tensor]:
        """Compute the losses only, otherwise as `train`. Call it under `torch.no_grad`."""
        made = schedules.forward_only(self.group.size, len(forms), self.virtual_stages)
        with nullcontext() if self.transport is None else self.transport.apart():
            return self._run(made, forward, forms)

    def _run(
        self,
        schedule: Schedule,
        forward: Forward,
        forms: Sequence[Hashable],
        weights: Sequence[float] = (),
    ) -> list[Tensor]:
        actions = schedule[self.group.rank]
        if self.transport is not None:
            received = (self._received(action, forms) for action in actions)
            self.transport.expect(message for message in received if message is not None)
        live: dict[tuple[int, int], Live] = {}
        losses = []
        phases = self.group.waiting.phases
        first = "forward" if torch.is_grad_enabled() else "evaluation"
        for action in actions:
            key = (action.micro_batch, action.virtual_stage)
            if action.kind is Kind.FORWARD:
                with phases(first, self._told(action)):
                    live[key] = self._forward(action, forward, forms)
                last = self._stage(action) == self.virtual - 1
                if last:
                    losses.append(live[key].output.detach())
                if not torch.is_grad_enabled():
                    gone = live.pop(key)
                    if not last:  # what `forward` keeps of the last stage may be views of its input
                        self._release(gone)
            elif action.kind is Kind.WEIGHT:
                with phases("backward", self._told(action)):
                    compute(live[key].deferred)
                self._release(live.pop(key))
            else:
                with phases("backward", self._told(action)):
                    self._backward(action, live[key], forms, weights)
                if action.kind is Kind.BACKWARD:
                    self._release(live.pop(key))
            self.peak_live = max(self.peak_live, len(live))
        if self.transport is not None:
            self.transport.flush()
        return losses

    def _told(self, action: Action) -> str:
        """An action in words, for a listener; "" if nobody listens."""
        if self.group.waiting.phases.listener is None:
            return ""
        stage = f", stage {self._stage(action)}" if self.virtual > 1 else ""
        kind = {Kind.INPUT: "input gradient", Kind.WEIGHT: "weight gradients"}.get(action.kind)
        return f"{kind or action.kind.value} of micro-batch {action.micro_batch + 1}{stage}"

    def _stage(self, action: Action) -> int:
        return action.virtual_stage * self.group.size + self.group.rank

    def _forward(self, action: Action, forward: Forward, forms: Sequence[Hashable]) -> Live:
        if self.stages is None:
            return Live(
                forward(action.micro_batch, action.virtual_stage), SeedsInUse(self.dropouts)
            )
        assert self.transport is not None
        given = None
        if self._stage(action) > 0:
            given = self.transport.receive().detach()
            learns = given.is_floating_point() or given.is_complex()
            given.requires_grad_(torch.is_grad_enabled() and learns)
        with nullcontext() if self.deferred is None else self.deferred.apart():
            output = self.stages.compute(
                action.virtual_stage,
                given,
                lambda: forward(action.micro_batch, action.virtual_stage),
            )
        if self._stage(action) < self.virtual - 1:
            message = self._activation(action.micro_batch, self._stage(action) + 1, forms, +1)
            # A received buffer may be filled again before an output that shares its memory is sent.
            shared = given is not None and _share(output, given)
            self.transport.send(message, output.clone() if shared else output)
            back = self._gradient(action.micro_batch, self._stage(action), forms, +1)
            self.transport.learn(back.kind, output)
        return Live(output, SeedsInUse(self.dropouts), given)

    @contextmanager
    def _pass_of(self, action: Action, live: Live) -> Iterator[None]:
        """Bring back seeds and input of the forward pass, as the backward pass may recompute it."""
        with ExitStack() as stack:
            stack.enter_context(live.seeds.again())
            if self.stages is not None:
                stack.enter_context(self.stages.recomputing(action.virtual_stage, live.input))
            yield

    def _backward(
        self, action: Action, live: Live, forms: Sequence[Hashable], weights: Sequence[float]
    ) -> None:
        if self._stage(action) < self.virtual - 1:
            assert self.transport is not None
            live.gradient = self.transport.receive()
            if live.output.requires_grad:
                with self._pass_of(action, live):
                    torch.autograd.backward(live.output, live.gradient)
        else:
            loss, weight = live.output, weights[action.micro_batch]
            if not weight:
                _send_zeros(loss)
            if weight != 1:
                loss = loss * weight
            with self._pass_of(action, live):
                loss.backward()
        if live.input is not None and self.transport is not None:
            gradient = live.input.grad
            if gradient is None:  # the output does not depend on it
                gradient = torch.zeros_like(live.input)
            if live.gradient is not None and _share(gradient, live.gradient):
                gradient = gradient.clone()
            message = self._gradient(action.micro_batch, self._stage(action) - 1, forms, -1)
            self.transport.send(message, gradient)
        if action.micro_batch == 0:
            live.gradient = None  # autograd may have made it a parameter's `grad`: do not reuse it
        if self.deferred is not None:
            live.deferred = self.deferred.take()

    def _release(self, live: Live) -> None:
        for tensor in (live.input, live.gradient):
            if tensor is not None and self.transport is not None:
                self.transport.release(tensor.detach())

    def _received(self, action: Action, forms: Sequence[Hashable]) -> Message | None:
        """The message that an action waits for; None if it needs none."""
        stage = self._stage(action)
        if action.kind is Kind.FORWARD and stage > 0:
            return self._activation(action.micro_batch, stage, forms, -1)
        if action.kind in (Kind.BACKWARD, Kind.INPUT) and stage < self.virtual - 1:
            return self._gradient(action.micro_batch, stage, forms, +1)
        return None

    def _activation(
        self, micro_batch: int, stage: int, forms: Sequence[Hashable], peer: int
    ) -> Message:
        """Describe the input of a virtual stage. `peer` is -1 or +1: the rank before or after."""
        return Message(
            (self.group.rank + peer) % self.group.size,
            (micro_batch * self.virtual + stage) * 2 % TAGS,
            ("activation", stage, forms[micro_batch]),
            f"the activation of micro-batch {micro_batch + 1}",
        )

    def _gradient(
        self, micro_batch: int, stage: int, forms: Sequence[Hashable], peer: int
    ) -> Message:
        """Describe the gradient of a virtual stage's output; `peer` as above."""
        return Message(
            (self.group.rank + peer) % self.group.size,
            ((micro_batch * self.virtual + stage) * 2 + 1) % TAGS,
            ("gradient", stage, forms[micro_batch]),
            f"the gradient of micro-batch {micro_batch + 1}",
            told=False,
        )


def _share(one: Tensor, other: Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def _send_zeros(loss: Tensor) -> None:
    """Make each step of a loss's backward pass give zeros, where it may give NaN.

    A mean over no items divides by 0, and so does its gradient. The backward pass is not left out,
    because layers may communicate in it with ranks whose losses count.
    """
    for node in graph_nodes(loss):
        if not node.name().endswith("AccumulateGrad"):  # it lasts longer than the pass
            node.register_hook(_zeros)


def _zeros(gradients: tuple[Tensor | None, ...], _: Any) -> tuple[Tensor | None, ...]:
    return tuple(None if one is None else torch.zeros_like(one) for one in gradients)
