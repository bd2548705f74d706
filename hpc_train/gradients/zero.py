"""The ranks of a node share the parameters' memory, and each updates its part of them.

Stage 1 of ZeRO (Rajbhandari et al., "ZeRO: memory optimizations toward training trillion parameter
models", SC 2020, https://arxiv.org/abs/1910.02054) divides the optimizer's state over the ranks,
and all gather the new parameters after each step. Inside a node nobody has to gather: parameters
lie in memory that all its ranks read. Optimizer time and state shrink by the ranks of a node, and
each rank needs its own part of the averaged gradients only.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from hpc_train.collectives import connect
from hpc_train.collectives.node import NodeMemory
from hpc_train.collectives.steps import run
from hpc_train.errors import UserError
from hpc_train.gradients.buckets import Bucket, Slab
from hpc_train.gradients.mpi import MpiAverager
from hpc_train.gradients.progress import Progress
from hpc_train.gradients.sums import LevelSums, cut_memory, memory_bytes
from hpc_train.mpi.levels import Levels


class ShardedAverager(MpiAverager):
    """`MpiAverager` whose optimizer updates this rank's slabs, in memory that the node shares.

    The optimizer's groups hold the slabs in place of the parameters; `grad` of the parameters
    stays None. It must treat each element by itself, as SGD, Adam and their kin do, and have no
    state yet. Between `average` and the end of `step` nobody may use the parameters.

    Args:
        model, optimizer, progress, backward_passes: as for `MpiAverager`.
        levels: the ranks by nodes.
        buckets: of all trained parameters.
        sums: of these buckets; those whose result is not whole are shared.

    Raises:
        SetupError: there is too little shared memory; raised on all ranks of the node, which leaves
            model and optimizer as they are.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        levels: Levels,
        buckets: list[Bucket],
        sums: LevelSums,
        progress: Progress,
        backward_passes: int,
    ) -> None:
        if optimizer.state:
            raise UserError(
                "the optimizer has a state already, which memory.zero would have to divide",
                "set up averaging first, then restore the state",
            )
        divided = [bucket for bucket, whole in zip(buckets, sums.whole, strict=True) if not whole]
        self.memory: NodeMemory | None = None
        if levels.node.size > 1:
            room = memory_bytes(divided) if levels.node.rank == 0 else 0
            self.memory = NodeMemory(levels.node, room, signals=1, touch=False)
        super().__init__(model, optimizer, levels.whole, buckets, sums, progress, backward_passes)
        self.levels = levels
        self.shards = connect(levels.node)
        self.shared = {p: p.data for b in divided for p in b.parameters}
        self.slabs: dict[Parameter, Slab] = {}
        """This rank's parts of parameters, as the optimizer has them."""
        self._gradients: dict[Parameter, Tensor] = {}
        self._steps = 0
        self._share_parameters(sums, divided)
        self._groups = [list(group["params"]) for group in optimizer.param_groups]
        self._divide_optimizer()

    def _share_parameters(self, sums: LevelSums, divided: list[Bucket]) -> None:
        """Put the parameters where the node's ranks can all read them. Collective."""
        if self.memory is None:
            flats = [torch.empty(b.numel, dtype=b.dtype) for b in divided]
        else:
            self.at_close.append(self.memory.close)
            flats = cut_memory(self.memory.parts[0], divided)
        numbers = [number for number, whole in enumerate(sums.whole) if not whole]
        for number, bucket, flat in zip(numbers, divided, flats, strict=True):
            for slab in bucket.slabs(*sums.part(number)):
                mine = slab.of(flat)
                # Whoever touches memory first has it near: that is who updates it.
                mine.copy_(slab.rows_of(slab.parameter.data))
                piece = Parameter(mine)
                self.slabs[piece] = slab
                self._gradients[piece] = slab.of(sums.flats[number])
        self.levels.node.barrier()
        for bucket, flat in zip(divided, flats, strict=True):
            for parameter, view in bucket.views(flat).items():
                parameter.data = view

    def _divide_optimizer(self) -> None:
        pieces = {slab.parameter: piece for piece, slab in self.slabs.items()}
        for group in self.optimizer.param_groups:
            kept = [p if p not in self.shared else pieces.get(p) for p in group["params"]]
            group["params"] = [p for p in kept if p is not None]

    def _publish(self) -> None:
        for parameter, view in self._views.items():
            if parameter not in self.shared:
                parameter.grad = view
        for piece, gradient in self._gradients.items():
            piece.grad = gradient

    def parts(self) -> list[tuple[Parameter, Tensor]]:
        """The averaged gradients of which this rank speaks for the ranks of its node."""
        whole = [(p, self._views[p]) for p in self._views if p not in self.shared]
        mine = [(self.slabs[p].parameter, gradient) for p, gradient in self._gradients.items()]
        return mine + (whole if self.levels.node.rank == 0 else [])

    def norm(self) -> Tensor:
        """The 2-norm of all averaged gradients, a float64 scalar. Collective."""
        square = super().norm().square()
        self.shards.sum_(square)
        return square.sqrt()

    def _own(self) -> list[Tensor]:
        whole = [view for p, view in self._views.items() if p not in self.shared]
        return [*self._gradients.values(), *whole]

    def step(self) -> None:
        """Take the optimizer's step, and wait for that of the node's other ranks. Collective."""
        super().step()
        if self.memory is None:
            return
        self._steps += 1
        self.memory.tell(0, self._steps)
        updated = self.memory.wait(0, self._steps, range(self.levels.owners))
        with self.group.waiting("the optimizer's step of the ranks of its node"):
            run(updated, polite=self.progress.polite)

    def close(self) -> None:
        """Give each rank parameters of its own; the optimizer's state is gone. Collective."""
        for parameter in self.shared:
            parameter.data = parameter.data.clone()
        for group, parameters in zip(self.optimizer.param_groups, self._groups, strict=True):
            group["params"] = parameters
        self.optimizer.state.clear()
        self.slabs, self._gradients = {}, {}
        super().close()
