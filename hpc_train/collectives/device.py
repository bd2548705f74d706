"""Sums in the memory of the ranks' GPUs, by the libraries that torch has for it.

They are NCCL for NVIDIA's GPUs, RCCL for AMD's, which torch calls NCCL as well, and XCCL for
Intel's. Their groups are torch's own, and the ranks find each other over MPI. None of them is
torch's default group, so a program can still make that one.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hpc_train.collectives.coroutines import Coroutine
from hpc_train.errors import SetupError, UserError
from hpc_train.mpi.agreement import agreed
from hpc_train.mpi.group import Group

BACKENDS = {"cuda": "ProcessGroupNCCL", "xpu": "ProcessGroupXCCL"}
"""Torch's class for the GPUs of a type."""
# The watch of hpc_train ends a job whose ranks do not come. Torch would end it after 10 minutes,
# without a word of what the ranks were doing.
OPERATION_TIMEOUT = timedelta(days=365)
STORE_TIMEOUT = timedelta(minutes=5)  # for ranks to find each other


class DeviceCollectives:
    """Sums tensors in the memory of GPUs, beside what the GPUs compute.

    An operation begins after the work that the caller's stream has by then. All ranks must begin
    the same operations in the same order.

    Collective to make.

    Args:
        group: two or more ranks, each with a GPU of its own.
        device: this rank's GPU.
        purpose: what the operations are for, as `Traffic` names it.

    Raises:
        UserError: two ranks share a GPU.
        SetupError: torch has no library for these GPUs, or it does not work.
    """

    def __init__(self, group: Group, device: torch.device, *, purpose: str) -> None:
        self.group, self.device = group, device
        _check_own(group, device)
        self._counted = group.waiting.traffic.of(f"{purpose} sums", group.link())
        self._store = _store(group)
        with agreed(group):
            self._backend = _backend(self._store, group, device)
        with agreed(group), group.waiting(f"the connection of the GPUs of {group.size} ranks"):
            self._try()

    def _try(self) -> None:
        """Sum for the first time, which connects the ranks."""
        total = torch.ones(1, device=self.device)
        try:
            self._backend.allreduce([total], dist.AllreduceOptions()).wait()
            right = int(total) == self.group.size
        except RuntimeError as error:
            raise SetupError(
                f"the GPUs of {self.group.size} ranks cannot be connected: {_first_line(error)}",
                "set NCCL_DEBUG=INFO to see why, or use engine mpi",
            ) from None
        if not right:
            raise SetupError(
                f"the sum of 1 over the GPUs of {self.group.size} ranks is {int(total)}",
                "use engine mpi",
            )

    def sum_(self, flat: Tensor) -> Coroutine[None]:
        """Begin to replace a contiguous tensor by its sum over the ranks."""
        begun = self._backend.allreduce([flat], dist.AllreduceOptions())
        return self._ended(begun, flat.nbytes)

    def sum_part(self, flat: Tensor, part: Tensor) -> Coroutine[None]:
        """Begin to sum a rank's equal part of a tensor over the ranks.

        Args:
            flat: contiguous, (ranks x n,).
            part: (n,), gets the sum of the elements from rank x n on.
        """
        begun = self._backend._reduce_scatter_base(part, flat, dist.ReduceScatterOptions())
        return self._ended(begun, flat.nbytes)

    def _ended(self, begun: Any, nbytes: int) -> Coroutine[None]:
        with self._counted:
            yield begun.is_completed
        self._counted.nbytes += nbytes
        begun.wait()  # raises what went wrong

    def close(self) -> None:
        """End the connections. Collective."""
        self.group.barrier()
        # Torch 2.5 has another name for it.
        backend = self._backend
        (backend.shutdown if hasattr(backend, "shutdown") else backend._shutdown)()
        self.group.barrier()  # the first rank has what connects the others


def _check_own(group: Group, device: torch.device) -> None:
    """Check that no two ranks share a GPU, because they would wait for each other for ever."""
    users: dict[tuple[str, str], list[int]] = {}
    for rank, gpu in enumerate(group.gathered((group.host, gpu_uuid(device)))):
        users.setdefault(gpu, []).append(rank)
    for (host, name), ranks in users.items():
        if name and len(ranks) > 1:
            raise UserError(
                f"ranks {ranks[0]} and {ranks[1]} share a GPU of {host}, and engine nccl needs one "
                "for each rank",
                "start as many ranks on each node as it has GPUs, or use engine mpi",
            )


def _store(group: Group) -> Any:
    """What torch's ranks find each other by. Collective."""
    inside = group.link() == "inside"
    host = "127.0.0.1" if inside else group.from_first(lambda: group.host)
    store = None
    with agreed(group):
        if group.rank == 0:
            store = _connected(host, 0, first=True)
    port = group.from_first(lambda: 0 if store is None else store.port)
    with agreed(group):
        return store or _connected(host, port, first=False)


def _connected(host: str, port: int, *, first: bool) -> Any:
    try:
        return dist.TCPStore(  # type: ignore[attr-defined]
            *(host, port), is_master=first, wait_for_workers=False, timeout=STORE_TIMEOUT
        )
    except RuntimeError as error:
        raise SetupError(
            f"port {port} of {host} cannot be opened: {_first_line(error)}",
            "use engine mpi if ranks may not open ports",
        ) from None


def _backend(store: Any, group: Group, device: torch.device) -> Any:
    """Torch's group of the ranks, not yet connected."""
    name = BACKENDS.get(device.type, "")
    kind = getattr(dist, name, None)
    if kind is None:
        raise SetupError(
            f"torch {torch.__version__} has no {name or 'such sums'} for {device.type}",
            "use engine mpi, or install the torch that is built for this machine's GPUs",
        )
    options = kind.Options()
    options._timeout = OPERATION_TIMEOUT
    return kind(store, group.rank, group.size, options)


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def gpu_uuid(device: torch.device) -> str:
    """The UUID of a GPU; "" for a processor, and where torch does not tell it."""
    if device.type == "cpu":
        return ""
    return str(getattr(getattr(torch, device.type).get_device_properties(device), "uuid", ""))
