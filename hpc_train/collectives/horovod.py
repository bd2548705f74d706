"""Collectives over a Horovod process set; on GPUs by NCCL, if Horovod was built with it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, ClassVar

from torch import Tensor

from hpc_train.collectives.overwrite import bits, bring_back
from hpc_train.collectives.protocol import WIDENED, Pending, check_has_dimension
from hpc_train.mpi import runtime
from hpc_train.mpi.group import Group

NAMES_PER_KIND = 16  # this number of operations of one kind can be under way


class HorovodCollectives:
    """Implements `Collectives` on the process set of the group's ranks.

    Horovod tells operations apart by their names. Every rank numbers its operations of each kind;
    as all ranks begin them in the same order, the numbers agree. Horovod orders ranks as the job
    does, so gathering and scattering need a group whose ranks ascend.

    Collective to make.

    Args:
        group: the ranks; their process set must be registered (`runtime.start_horovod`).
        hvd: the module horovod.torch, initialised.

    Raises:
        ValueError: the group has no communicator, or Horovod no process set of its ranks.
    """

    made: ClassVar[int] = 0
    """The last object's number: several may share a process set, but their names must differ."""

    def __init__(self, group: Group, hvd: Any) -> None:
        if group.comm is None:
            raise ValueError("this group has no communicator: use AloneCollectives")
        self.group = group
        self.hvd = hvd
        with group.waiting("the ranks of a Horovod process set"):
            told = group.comm.allgather((hvd.rank(), HorovodCollectives.made))
        self.ranks = [rank for rank, _ in told]
        self._ascends = self.ranks == sorted(self.ranks)
        self.process_set = runtime.process_set(hvd, self.ranks)
        HorovodCollectives.made = 1 + max(made for _, made in told)
        self._label = f"hpc_train.{self.process_set.process_set_id}.{HorovodCollectives.made}"
        self._counts: Counter[str] = Counter()  # operations, by kind
        self._last: dict[str, Begun] = {}  # the last operation of each name

    def sum_(self, tensor: Tensor) -> None:
        """Replace the tensor by its sum over the ranks."""
        self.start_sum_(tensor).wait()

    def max_(self, tensor: Tensor) -> None:
        """Replace the tensor by its elementwise maximum over the ranks."""
        self._reduce("max", tensor, self.hvd.Max).wait()

    def broadcast_(self, tensor: Tensor, root: int = 0) -> None:
        """Replace the tensor by that of rank `root`."""
        near = _plain(tensor)
        self._begin(
            f"broadcast {root}",
            near,
            lambda name: self.hvd.broadcast_async_(
                bits(near), self.ranks[root], name=name, process_set=self.process_set
            ),
            lambda _: bring_back(tensor, near),
        ).wait()

    def start_sum_(self, tensor: Tensor) -> Pending:
        """Begin `sum_`."""
        return self._reduce("sum", tensor, self.hvd.Sum)

    def start_gather(self, tensor: Tensor, dim: int) -> Pending:
        """Begin to put the ranks' tensors together along a dimension."""
        first = self._first(tensor, dim)
        shape = (self.group.size * first.shape[0], *first.shape[1:])
        return self._begin(
            "gather",
            first,
            lambda name: self.hvd.allgather_async(
                bits(first), name=name, process_set=self.process_set
            ),
            lambda bits: _moved(bits.view(tensor.dtype).view(shape), dim),
        )

    def start_sum_scatter(self, tensor: Tensor, dim: int) -> Pending:
        """Begin to sum over the ranks and keep this rank's part along a dimension."""
        first = _wide(self._first(tensor, dim))
        return self._begin(
            "sum_scatter",
            first,
            lambda name: self.hvd.reducescatter_async(
                first, op=self.hvd.Sum, name=name, process_set=self.process_set
            ),
            lambda part: _moved(part, dim).to(tensor.dtype),
        )

    @property
    def overlaps(self) -> bool:
        """True: Horovod's thread communicates while this one computes."""
        return True

    def close(self) -> None:
        """Do nothing: process sets and threads belong to Horovod."""

    def _first(self, tensor: Tensor, dim: int) -> Tensor:
        """The tensor with a dimension moved to the front, where Horovod gathers and cuts."""
        check_has_dimension(tensor)
        if not self._ascends:
            raise ValueError(f"Horovod would reorder ranks {self.ranks}: gather over MPI")
        return _plain(tensor.movedim(dim, 0))

    def _reduce(self, kind: str, tensor: Tensor, operation: Any) -> Pending:
        near = _wide(_plain(tensor))
        return self._begin(
            kind,
            near,
            lambda name: self.hvd.allreduce_async_(
                near, op=operation, name=name, process_set=self.process_set
            ),
            lambda _: bring_back(tensor, near),
        )

    def _begin(
        self,
        kind: str,
        tensor: Tensor,
        start: Callable[[str], Any],
        finish: Callable[[Tensor], Tensor],
    ) -> Begun:
        """Begin an operation, with a name that an earlier one of its kind, shape and type had.

        NAMES_PER_KIND operations of a kind can be under way; one more waits for the first of them.
        """
        # Names recur because Horovod's ranks agree on known names by a few bits, and on new ones by
        # whole requests.
        kind = f"{kind} {tensor.dtype} {list(tensor.shape)}"
        name = f"{self._label}.{kind}.{self._counts[kind] % NAMES_PER_KIND}"
        self._counts[kind] += 1
        if name in self._last:
            self._last[name].finish_here()
        begun = Begun(self, start(name), finish)
        self._last[name] = begun
        return begun


class Begun:
    """Implements `Pending` for a Horovod handle."""

    def __init__(
        self, owner: HorovodCollectives, handle: Any, finish: Callable[[Tensor], Tensor]
    ) -> None:
        self.owner, self.handle = owner, handle
        self._finish: Callable[[Tensor], Tensor] | None = finish
        self._found: Tensor | None = None

    def wait(self) -> Tensor:
        """Wait for Horovod's thread; returns the result."""
        self.finish_here()
        assert self._found is not None, "waited for twice"
        assert self._finish is not None
        result = self._finish(self._found)
        self._finish = self._found = None  # the owner keeps this object, and not the tensors
        return result

    def finish_here(self) -> None:
        """Wait for Horovod's thread, and keep the result for `wait`."""
        if self.handle is not None:
            with self.owner.group.waiting(f"Horovod, over {self.owner.group.size} ranks"):
                self._found = self.owner.hvd.synchronize(self.handle)
            self.handle = None

    def done(self) -> bool:
        """Whether Horovod's thread has finished the operation."""
        return self.handle is None or bool(self.owner.hvd.poll(self.handle))


def _plain(tensor: Tensor) -> Tensor:
    """The tensor as Horovod takes it: contiguous, and with its own numbers in memory."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def _wide(near: Tensor) -> Tensor:
    """The tensor in a type in which Horovod is to add it."""
    return near.float() if near.dtype in WIDENED else near


def _moved(result: Tensor, dim: int) -> Tensor:
    """A result with its first dimension moved back to `dim`."""
    return result.movedim(0, dim).contiguous()
