"""Parameters that are divided over nodes, and gathered stage by stage: stage 3 of ZeRO.

Each node keeps its chunks of the parameters (Rajbhandari et al., "ZeRO: memory optimizations toward
training trillion parameter models", SC 2020, https://arxiv.org/abs/1910.02054). When a stage of the
model is about to compute, its parameters are gathered from the other nodes. All ranks of the node
read this one copy, so the memory that it takes does not grow with the ranks of a node. When the
next stage is reached, the pages of the chunks that other nodes own are given back.

A parameter keeps its address. So nothing that refers to it has to be changed, such as what autograd
has saved for the backward pass.
"""

from __future__ import annotations

import socket
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn import Parameter

from hpc_train.collectives.coroutines import Coroutine
from hpc_train.errors import SetupError
from hpc_train.gradients.division import BucketParts, Reach
from hpc_train.gradients.progress import Progress
from hpc_train.gradients.shared_parameters import SharedParameters, users_of_parameters
from hpc_train.gradients.sums import LevelSums
from hpc_train.host.pages import give_back
from hpc_train.models.gate import Gate, attend
from hpc_train.mpi.agreement import agreed


class StreamedParameters(SharedParameters):
    """`SharedParameters` whose divided buckets are there only while a stage needs them.

    All ranks must pass the same gates in the same order, forward and backward. Collective to make.

    Args:
        sums, division, progress: as for `SharedParameters`.
        gates: the gates of this rank's stages, in the order of the forward pass.

    Raises:
        SetupError: there is too little shared memory, or its pages cannot be given back; raised on
            all ranks of the node.
    """

    SIGNALS = 2  # a bucket is gathered; a rank no longer needs it

    def __init__(
        self, sums: LevelSums, division: BucketParts, progress: Progress, gates: Sequence[Gate]
    ) -> None:
        self.gates = list(gates)
        super().__init__(sums, division, progress)
        self.streamed = {
            index for index, n in enumerate(self.numbers) if division.reach[n] is Reach.JOB
        }
        """Indices of the buckets that are divided over nodes."""
        self._steady = {
            index for index, number in enumerate(self.numbers) if number >= len(sums.buckets)
        }
        """Indices of the buckets that are not trained, which no step changes."""
        self._of_stage = [self._needed_by(gate.module) for gate in gates]
        self._there: set[int] = set()  # buckets that are gathered, or are being gathered
        self._rounds = [0] * len(self.buckets)
        self._dropped = [0] * len(self.buckets)
        try:
            with agreed(self.levels.node):
                self._try_to_give_back()
        except SetupError:
            if self.memory is not None:
                self.memory.close()
            raise

    def _touched(self) -> int:
        whole = super()._touched()
        stages = [sum(p.nbytes for p in gate.module.parameters()) for gate in self.gates]
        pairs = [sum(stages[place : place + 2]) for place in range(len(stages))]
        return min(whole, whole // self.levels.nodes + max(pairs, default=0))

    def _needed_by(self, module: nn.Module) -> list[int]:
        found = {self.home[p] for p in module.parameters() if p in self.home}
        return sorted(found & self.streamed, reverse=True)  # the forward pass uses the last first

    def _try_to_give_back(self) -> None:
        """Try with memory that holds nothing yet.

        Raises:
            SetupError: it fails.
        """
        if self.memory is None or not self.streamed or self.levels.node.rank:
            return
        try:
            self._give_back(self.memory.parts[0])
        except OSError as error:
            raise SetupError(
                f"the shared memory of {socket.gethostname()} cannot be given back page by page "
                f"({error.strerror}), as memory.zero 3 does",
                "let all ranks write to /dev/shm, or set memory.zero 2",
            ) from None

    def _give_back(self, tensor: Tensor) -> None:
        give_back(tensor.data_ptr(), tensor.nbytes, shared=self.memory is not None)

    @property
    def divided(self) -> Collection[Parameter]:
        """The parameters that are divided over nodes."""
        return [p for p, index in self.home.items() if index in self.streamed]

    def _filled(self, number: int) -> tuple[int, int]:
        return self.division.own(number)

    def attend(self, model: nn.Module) -> None:
        """Gather parameters from now on when a stage is about to compute."""
        attend(self.gates, self)
        for module, _ in users_of_parameters(model):
            self._hooks.append(module.register_forward_pre_hook(self._advance))

    def _advance(self, *_: Any) -> None:
        """Let messages move on: a hook before a module's forward pass."""
        self.progress.advance()

    def before_forward(self, place: int) -> None:
        """Bring the parameters of a stage, and begin to bring those of the next one."""
        last = place == len(self.gates) - 1  # a backward pass will begin where this pass ends
        self._bring(place, place - 1 if last else place + 1)

    def before_backward(self, place: int) -> None:
        """Bring the parameters of a stage, and begin to bring those of the one before."""
        self._bring(place, place - 1 if place else 1)

    def _bring(self, place: int, then: int) -> None:
        now = self._of_stage[place]
        ahead = self._of_stage[then] if 0 <= then < len(self.gates) else []
        for index in sorted(self._there - {*now, *ahead}):
            self._drop(index)
        self._start([*now, *ahead])
        if all(self._gathered[index] == self._rounds[index] for index in now):
            self.progress.advance()
        else:
            self.wait(now)

    def _start(self, wanted: Iterable[int]) -> None:
        for index in wanted:
            if index not in self._there:
                self._there.add(index)
                self._rounds[index] += 1
                self.progress.start(self._gather(index, self._rounds[index]))

    def _gather(self, index: int, round_: int) -> Coroutine[None]:
        yield lambda: self._dropped[index] == round_ - 1
        yield from super()._gather(index, round_)

    def _drop(self, index: int) -> None:
        self._there.remove(index)
        self.progress.start(self._freed(index, self._rounds[index]))

    def _freed(self, index: int, round_: int) -> Coroutine[None]:
        """Give a bucket's pages back as soon as no rank of the node needs them."""
        yield lambda: self._gathered[index] == round_  # a gather that goes on ends first
        if self.memory is not None:
            signal = len(self.buckets) + index
            self.memory.tell(signal, round_)
            yield from self.memory.wait(signal, round_, range(self.levels.node.size))
        self._empty(index)
        self._dropped[index] = round_

    def _empty(self, index: int) -> None:
        """Give back what other nodes own of this rank's part of a bucket."""
        number = self.numbers[index]
        begin, end = self.division.part(number)
        own, last = self.division.own(number)
        for first, behind in ((begin, own), (last, end)):
            self._give_back(self._flats[index][first:behind])

    def forget(self) -> None:
        """Forget the parameters of other nodes, because all have changed. Collective."""
        self._forget(self._there)

    def _forget(self, indices: Collection[int]) -> None:
        for index in sorted(indices):
            self._drop(index)

    def update(self) -> None:
        """Forget the old parameters of other nodes, and begin to bring those of the first stage."""
        self._forget(self._there - self._steady)
        if self.gates:
            self._start(self._of_stage[0])

    def wait(self, needed: Sequence[int] = ()) -> None:
        """Wait until the gathers of some buckets have ended, or all that has begun."""
        indices = needed or range(len(self.buckets))

        def there() -> Coroutine[None]:
            yield lambda: all(self._gathered[n] == self._rounds[n] for n in indices)

        with self.levels.whole.waiting("parameters of other nodes"):
            self.progress.complete(there())

    def release(self) -> None:
        """Free the memory. Divided parameters have no elements from then on. Collective."""
        attend(self.gates, None)
        self.forget()
        with self.levels.whole.waiting("parameters of other nodes"):
            self.progress.finish()
        for parameter in self.divided:
            parameter.data = parameter.data.new_empty(0)
        super().release()
