"""The ranks of a node share the parameters' memory, and each updates its part of them.

Stage 1 of ZeRO (Rajbhandari et al., "ZeRO: memory optimizations toward training trillion parameter
models", SC 2020, https://arxiv.org/abs/1910.02054) divides the optimizer's state over the ranks,
and all ranks gather the new parameters after each step. Inside a node no gather is needed, because
the parameters lie in memory that all its ranks read. With p ranks on a node, optimizer time and
state per rank shrink by a factor of p, and each rank needs only its own part of the averaged
gradients.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

from hpc_train.collectives import connect
from hpc_train.collectives.coroutines import drive
from hpc_train.collectives.node import NodeMemory
from hpc_train.errors import HpcTrainError, UserError
from hpc_train.gradients.buckets import Bucket, Slab
from hpc_train.gradients.mpi import BucketAverager
from hpc_train.gradients.progress import Progress
from hpc_train.gradients.slots import Slot
from hpc_train.gradients.sums import LevelSums, cut_memory, memory_bytes
from hpc_train.mpi.levels import Levels

WHOLE = {"LBFGS", "Adafactor", "Muon"}
"""Optimizers of torch whose update of an element depends on other elements."""


def check_divisible(optimizer: Optimizer) -> None:
    """Check that an optimizer can be divided over ranks.

    Raises:
        UserError: the optimizer has a state already, or does not treat each element by itself.
    """
    if optimizer.state:
        raise UserError(
            "the optimizer has a state already, which memory.zero would have to divide",
            "set up averaging first, then restore the state",
        )
    if WHOLE & {kind.__name__ for kind in type(optimizer).__mro__}:
        raise UserError(
            f"memory.zero gives each rank rows of the parameters, and {type(optimizer).__name__} "
            "does not treat each element by itself",
            "leave zero out, or take another optimizer",
        )


class ShardedAverager(BucketAverager):
    """`BucketAverager` whose optimizer updates this rank's slabs, in memory that the node shares.

    The optimizer's groups hold the slabs in place of the shared parameters, whose `grad` is not
    used. The optimizer must treat each element by itself, as SGD and Adam do, and have no state yet
    (`check_divisible`). Between `average` and the end of `step` nobody may use the parameters.

    Args:
        model, optimizer, progress: as for `BucketAverager`.
        levels: the ranks by nodes.
        buckets: buckets of all trained parameters.
        sums: sums of these buckets. The parameters of a bucket are shared if its result is not
            whole.

    Raises:
        SetupError: there is too little shared memory. All ranks of the node raise it, and model and
            optimizer stay as they are.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        levels: Levels,
        buckets: list[Bucket],
        sums: LevelSums,
        progress: Progress,
    ) -> None:
        divided = [bucket for bucket, whole in zip(buckets, sums.whole, strict=True) if not whole]
        self.memory: NodeMemory | None = None
        if levels.node.size > 1:
            room = memory_bytes(divided) if levels.node.rank == 0 else 0
            self.memory = NodeMemory(levels.node, room, signals=1, touch=False)
        super().__init__(model, optimizer, levels.whole, lambda _: (buckets, sums), progress)
        self.levels = levels
        self.shards = connect(levels.node)
        self.shared = {p: p.data for b in divided for p in b.parameters}
        self.slabs: dict[Parameter, Slab] = {}
        """For each piece that the optimizer has as a parameter, its slab of the model's one."""
        self._gradients: dict[Parameter, Tensor] = {}
        self._steps = 0
        self._share_parameters(sums, divided)
        self._groups = [list(group["params"]) for group in optimizer.param_groups]
        self._divide_optimizer()
        self._remember()

    def _share_parameters(self, sums: LevelSums, divided: list[Bucket]) -> None:
        """Move the parameters to memory that all ranks of the node can read. Collective."""
        if self.memory is None:
            flats = [torch.empty(b.numel, dtype=b.dtype) for b in divided]
        else:
            self.at_close.append(self.memory.close)
            flats = cut_memory(self.memory.parts[0], divided)
        numbers = [number for number, whole in enumerate(sums.whole) if not whole]
        for number, bucket, flat in zip(numbers, divided, flats, strict=True):
            for slab in bucket.slabs(*sums.part(number)):
                mine = slab.of(flat)
                # The rank that updates a slab touches it first, so that its memory is near (NUMA).
                mine.copy_(slab.rows_of(slab.parameter.data))
                piece = Parameter(mine)
                self.slabs[piece] = slab
                self._gradients[piece] = slab.of(sums.flats[number])
        self.levels.node.barrier()  # all slabs are written before anybody reads the parameters
        for bucket, flat in zip(divided, flats, strict=True):
            for parameter, view in bucket.views(flat).items():
                parameter.data = view
        self._places = {p: p.data_ptr() for p in self.shared}

    def _divide_optimizer(self) -> None:
        pieces = {slab.parameter: piece for piece, slab in self.slabs.items()}
        for group in self.optimizer.param_groups:
            kept = [p if p not in self.shared else pieces.get(p) for p in group["params"]]
            group["params"] = [p for p in kept if p is not None]

    def _zero_grad(self, set_to_none: bool = True) -> None:
        super()._zero_grad(set_to_none)
        for parameter in self.shared:
            parameter.grad = None

    def _publish(self, used: Sequence[bool]) -> None:
        pairs = list(zip(self._filling.slots, used, strict=True))
        for slot, flag in pairs:
            if slot.parameter in self.shared:
                # The promise only shows that there is a gradient: a look at it raises (`_look`).
                slot.parameter.grad = slot.pending if flag else None
            else:
                slot.publish(used=flag)
        there = {slot.parameter for slot, flag in pairs if flag}
        for piece, gradient in self._gradients.items():
            piece.grad = gradient if self.slabs[piece].parameter in there else None

    def _check(self) -> tuple[bool, HpcTrainError | None]:
        """Check as `BucketAverager` does, and that parameters still lie in shared memory."""
        moved = [p for p, where in self._places.items() if p.data_ptr() != where]
        if moved or self._changed():
            what = "model has moved a parameter" if moved else "optimizer has got other parameters"
            return False, UserError(
                f"memory.zero shares parameters between ranks, and the {what}",
                "convert the model and change the optimizer before averaging is set up",
            )
        return super()._check()

    def _adopt(self) -> None:
        """Do nothing: `_check` refuses parameters that came later."""

    def refresh(self) -> None:
        """Refuse parameters that came later.

        Raises:
            UserError: the optimizer's parameters have changed.
        """
        if self._changed():
            raise UserError(
                "memory.zero shares the parameters that were there when it was set up",
                "add parameters before, or leave zero out",
            )

    def _look(self, slot: Slot) -> Tensor:
        if slot.parameter not in self.shared:
            return super()._look(slot)
        raise UserError(
            "with memory.zero no rank has the whole gradient of a parameter",
            "call the averager's `norm` and `scale_`; in a Loop or Trainer use its clipping",
        )

    def parts(self) -> list[tuple[Parameter, Tensor]]:
        """The averaged gradients that this rank counts. Across its node, each is counted once."""
        kept = [p for p in self.trained if p not in self.shared]
        whole = [(p, p.grad) for p in kept if p.grad is not None]
        mine = [(s.parameter, p.grad) for p, s in self.slabs.items() if p.grad is not None]
        return mine + (whole if self.levels.node.rank == 0 else [])

    def norm(self) -> Tensor:
        """The 2-norm of all averaged gradients, a float64 scalar. Collective."""
        square = get_total_norm([part for _, part in self.parts()]).double().square()
        self.shards.sum_(square)
        return square.sqrt()

    def _own(self) -> list[Tensor]:
        kept = [p for p in self.trained if p not in self.shared]
        return [p.grad for p in [*self.slabs, *kept] if p.grad is not None]

    def _after_step(self) -> None:
        """Wait until the node's other ranks have updated their slabs, too."""
        super()._after_step()
        if self.memory is None:
            return
        self._steps += 1
        self.memory.tell(0, self._steps)
        updated = self.memory.wait(0, self._steps, range(self.levels.owners))
        with self.group.waiting("the optimizer's step of the ranks of its node"):
            drive(updated, polite=self.progress.polite)

    def close(self) -> None:
        """Give each rank its own copy of the parameters. Collective.

        The optimizer has all parameters again, and its state is cleared.
        """
        for parameter in self.shared:
            if parameter.data_ptr() == self._places[parameter]:
                parameter.data = parameter.data.clone()
        for group, parameters in zip(self.optimizer.param_groups, self._groups, strict=True):
            group["params"] = parameters
        self.optimizer.state.clear()
        self.slabs, self._gradients = {}, {}
        super().close()
