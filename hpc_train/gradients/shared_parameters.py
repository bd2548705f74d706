"""Parameters in memory that the ranks of a node share: one copy per node, updated part by part.

Stage 1 of ZeRO (Rajbhandari et al., "ZeRO: memory optimizations toward training trillion parameter
models", SC 2020, https://arxiv.org/abs/1910.02054) divides the optimizer's work and state over the
ranks. Each rank updates its parts of the parameters. Inside a node no gather is needed, because all
its ranks read the same memory. Between nodes the parts are gathered, which takes as long as the
second half of a sum of gradients does. The forward pass can begin meanwhile: a module waits only
for its own parameters, as in Megatron's distributed optimizer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn import Parameter
from torch.utils.hooks import RemovableHandle

from hpc_train.collectives.coroutines import Coroutine
from hpc_train.collectives.node import NodeMemory, own_pages
from hpc_train.errors import UserError
from hpc_train.gradients.buckets import Bucket, Slab
from hpc_train.gradients.division import BucketParts, Reach
from hpc_train.gradients.progress import Progress
from hpc_train.gradients.slots import DIRECT_WRITER, GradientWriter
from hpc_train.gradients.sums import LevelSums, bucket_begins, cut_memory
from hpc_train.models.initial import InitialValues


class SharedParameters:
    """The parameters of divided buckets, in memory that the node shares. Collective to make.

    Making it reserves the memory. `move` moves the parameters there.

    Args:
        sums: sums of the buckets of all trained parameters.
        division: who owns which part of these buckets, and behind them of buckets of parameters
            that are not trained. A bucket is divided if not every rank needs its whole result.
        progress: advances the gathers between nodes.

    Attributes:
        slabs: for each piece that this rank owns, which is a parameter of its own, its slab of the
            model's parameter.

    Raises:
        SetupError: there is too little shared memory; raised on all ranks of the node.
    """

    SIGNALS = 1  # for each bucket: its parameters are gathered

    def __init__(self, sums: LevelSums, division: BucketParts, progress: Progress) -> None:
        self.sums, self.levels, self.progress = sums, sums.levels, progress
        self.division = division
        self.numbers = [n for n, reach in enumerate(division.reach) if reach is not Reach.RANK]
        self.buckets: list[Bucket] = [division.buckets[number] for number in self.numbers]
        self.home = {p: n for n, bucket in enumerate(self.buckets) for p in bucket.parameters}
        """For each parameter, the index of its bucket in `buckets`."""
        self.memory: NodeMemory | None = None
        if self.levels.node.size > 1:
            first = self.levels.node.rank == 0
            room = bucket_begins(self.buckets)[-1] if first else 0
            signals = max(1, self.SIGNALS * len(self.buckets))
            self.memory = NodeMemory(
                self.levels.node, room, signals, touched=self._touched() if first else 0
            )
        self.slabs: dict[Parameter, Slab] = {}
        self._flats: list[Tensor] = []
        self._round = 0
        self._gathered = [0] * len(self.buckets)
        self._hooks: list[RemovableHandle] = []
        self._places: dict[Parameter, int] = {}

    def move(self, values: InitialValues | None = None) -> None:
        """Move the parameters to the shared memory. Collective.

        Args:
            values: makes their initial values; None: the parameters have them.
        """
        if self.memory is None:
            self._flats = [own_pages(b.nbytes).view(b.dtype) for b in self.buckets]
        else:
            self._flats = cut_memory(
                self.memory.parts[0], self.buckets, bucket_begins(self.buckets)
            )
        for number, bucket, flat in zip(self.numbers, self.buckets, self._flats, strict=True):
            # The rank that updates a part touches it first, so that its memory is near (NUMA).
            for slab in bucket.slabs(*self._filled(number)):
                if values is None:
                    slab.of(flat).copy_(slab.rows_of(slab.parameter.data))
                else:
                    values.fill(slab.parameter, slab.of(flat), slab.first)
            for slab in bucket.slabs(*self.division.own(number)):
                trained = slab.parameter.requires_grad
                self.slabs[Parameter(slab.of(flat), requires_grad=trained)] = slab
        self.levels.node.barrier()  # all is written before anybody reads the parameters
        for index, bucket in enumerate(self.buckets):
            for parameter, view in bucket.views(self._in_use(index)).items():
                parameter.data = view
        self._places = {p: p.data_ptr() for p in self.home}

    def __reduce__(self) -> str:
        """Refuse that a model whose modules wait for these parameters is copied or pickled."""
        raise UserError(
            "a model was copied or pickled while parts of its parameters may be on other nodes "
            "(memory.zero)",
            "do it before the loop is made or after it is closed, or leave private_parameters out",
        )

    def _touched(self) -> int:
        """Bytes of the shared memory that will be used at once."""
        return bucket_begins(self.buckets)[-1]

    def _filled(self, number: int) -> tuple[int, int]:
        """Start and end of what this rank fills of a bucket at the beginning, in elements."""
        return self.division.part(number)

    def gradients(self) -> dict[Parameter, Tensor]:
        """For each piece of `slabs` that is trained, its part of the averaged gradient."""
        return {
            piece: self.sums.result(self.numbers[self.home[slab.parameter]], slab)
            for piece, slab in self.slabs.items()
            if piece.requires_grad
        }

    def _in_use(self, index: int) -> Tensor:
        """The buffer of a bucket of the parameters that the model computes with."""
        return self._flats[index]

    def views(self) -> dict[Parameter, Tensor]:
        """The parameters in the memory that the node shares."""
        pairs = zip(self.buckets, self._flats, strict=True)
        return {p: view for bucket, flat in pairs for p, view in bucket.views(flat).items()}

    def bring_all(self) -> None:
        """Copy all parameters to where the model computes. Here they are there already."""

    def writer(self) -> GradientWriter:
        """Writes the gradients of this rank's backward passes to its buckets."""
        return DIRECT_WRITER

    def take_changes(self) -> None:
        """Take over what others have written to parameters, before the optimizer's step."""

    def forget(self) -> None:
        """Forget copies of parameters, because a checkpoint has others. Collective."""

    def moved_away(self) -> list[Parameter]:
        """The parameters that no longer lie in the shared memory."""
        return [p for p, place in self._places.items() if p.data_ptr() != place]

    def hide_gathers(self, model: nn.Module) -> None:
        """Let `update` return at once; each module waits for its own parameters before it runs.

        Nobody may read a parameter elsewhere, unless `wait` was called.
        """
        for module, used in users_of_parameters(model):
            needed = {self.home[p] for p in used if p in self.home}
            if needed:
                hook = partial(self._before_module, sorted(needed))
                self._hooks.append(module.register_forward_pre_hook(hook))

    def _before_module(self, needed: Sequence[int], *_: Any) -> None:
        if any(self._gathered[index] < self._round for index in needed):
            self.wait(needed)

    def update(self) -> None:
        """Bring all ranks the parts that the others have updated. Collective.

        With hidden gathers, `wait` has to be called before parameters are read outside of modules.
        """
        self._round += 1
        # The forward pass uses the last bucket first.
        for index in reversed(range(len(self.buckets))):
            self.progress.start(self._gather(index, self._round))
        if not self._hooks:
            self.wait()

    def wait(self, needed: Sequence[int] = ()) -> None:
        """Wait until parameters are the updated ones: those of some buckets, or all."""
        indices = needed or range(len(self.buckets))

        def there() -> Coroutine[None]:
            yield lambda: all(self._gathered[index] == self._round for index in indices)

        with self.levels.whole.waiting("the parameters that other ranks update"):
            self.progress.complete(there())

    def _gather(self, index: int, round_: int) -> Coroutine[None]:
        number = self.numbers[index]
        if self.division.reach[number] is Reach.JOB and self.levels.owns:
            begin, end = self.division.part(number)
            part, chunks = self._flats[index][begin:end], self.division.chunks(number)
            tag = len(self.sums.buckets) + number
            yield from self.sums.gather(part, chunks, tag)
        if self.memory is not None:
            self.memory.tell(index, round_)
            yield from self.memory.wait(index, round_, range(self.levels.owners))
        self._gathered[index] = round_

    def release(self) -> None:
        """Give each rank its own copy of the parameters, and free the memory. Collective."""
        self.wait()
        for hook in self._hooks:
            hook.remove()
        for parameter, place in self._places.items():
            if parameter.data_ptr() == place:
                parameter.data = parameter.data.clone()
        self.slabs, self._flats, self._hooks = {}, [], []
        self.close()

    def close(self) -> None:
        """Free the memory, in which no parameter is, or none any more. Collective."""
        if self.memory is not None:
            self.memory.close()


def users_of_parameters(model: nn.Module) -> Iterator[tuple[nn.Module, list[Parameter]]]:
    """The modules that use parameters, and which ones; a compiled module uses those inside of it.

    torch.compile would cut its graph at the hooks of modules inside of a compiled one. The compiled
    module's own hooks lie outside of the graph. A module inside of a compiled one that another
    module has, too, has a hook of its own.
    """
    seen: set[nn.Module] = set()

    def walk(module: nn.Module) -> Iterator[tuple[nn.Module, list[Parameter]]]:
        if module in seen:
            return
        seen.add(module)
        compiled = _is_compiled(module)
        if used := list(module.parameters(recurse=compiled)):
            yield module, used
        for inner in () if compiled else module.children():
            yield from walk(inner)

    yield from walk(model)


def _is_compiled(module: nn.Module) -> bool:
    """Whether torch.compile has made the module's `forward`.

    A gate or a recomputation has it as `original`.
    """
    forward: Any = module.forward
    while inner := getattr(forward, "original", None):
        forward = inner
    return hasattr(forward, "_torchdynamo_orig_callable")
