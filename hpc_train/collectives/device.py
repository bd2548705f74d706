"""Sums in the memory of the ranks' GPUs, by the libraries that torch has for it.

They are NCCL for NVIDIA's GPUs, RCCL for AMD's, which torch calls NCCL as well, and XCCL for
Intel's. Their groups are torch's own, and the ranks find each other over MPI. None of them is
torch's default group, so a program can still make that one.

A sum that one GPU has begun keeps that GPU busy until all others have begun it. Calls such as
torch.cuda.synchronize wait for it, and a rank that waits there tells the others nothing. So a sum
begins on a GPU only when the programs of all ranks have come to it.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from hpc_train.collectives.coroutines import Coroutine
from hpc_train.errors import HpcTrainError, SetupError, UserError, first_line
from hpc_train.mpi.agreement import agreed, all_arrive, settle
from hpc_train.mpi.group import Group

logger = logging.getLogger(__name__)

BACKENDS = {"cuda": "ProcessGroupNCCL", "xpu": "ProcessGroupXCCL"}
"""Torch's class for the GPUs of a type."""
CONNECT_SECONDS = 300.0  # after which ranks that are not connected give up
# Otherwise a thread of torch ends the process when a sum fails, with a trace of C++.
OWN_HANDLING = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
MPI_INSTEAD = "use engine mpi"


class DeviceCollectives:
    """Sums tensors in the memory of GPUs, beside what the GPUs compute.

    An operation sees the work that the caller's stream has by then. All ranks must begin the same
    operations in the same order. A thread advances their coroutines, so that they go on whatever
    the program waits for.

    Collective to make.

    Args:
        group: two or more ranks, which have claimed a GPU each.
        device: this rank's GPU.

    Raises:
        SetupError: torch has no library for these GPUs, or it does not work.
    """

    claimed: ClassVar[bool] = False

    def __init__(self, group: Group, device: torch.device) -> None:
        self.device = device
        with agreed(group):
            kind = _backend_for(device)
            self._gpu: Any = None if device.type == "cpu" else getattr(torch, device.type)
            self._stream: Any = self._gpu and self._gpu.Stream(device)
        self._counted = group.waiting.traffic.of("gradient sums", group.link())
        self._store = _store(group)
        self.group = group.duplicate()
        self._begun = self._passed = 0
        self._backend: Any = None

        def connect() -> None:
            self._backend = kind(self._store, group.rank, group.size, kind.Options())
            one = torch.ones(1, device=device)
            self._backend.allreduce([one], dist.AllreduceOptions()).wait()
            if int(one) != group.size:
                raise ValueError(f"the sum of 1 over them is {int(one)}")

        _connected_within(group, connect)

    @classmethod
    def claim(cls, group: Group, device: torch.device) -> Callable[[], None]:
        """Take the ranks' GPUs for one averager; returns a function that gives them back.

        Collective.

        Raises:
            UserError: another averager has them, or two ranks share a GPU. NCCL needs all
                operations of a GPU in the same order on all ranks, and nothing orders those of two
                averagers.
        """
        with agreed(group):
            if cls.claimed:
                raise UserError(
                    "engine nccl sums for one averager at a time, and another one is open",
                    f"close that one, let one optimizer have all parameters, or {MPI_INSTEAD}",
                )
        _check_own(group, device)
        cls.claimed = True
        return lambda: setattr(cls, "claimed", False)

    def sum_(self, flat: Tensor) -> Coroutine[None]:
        """Begin to replace a contiguous tensor by its sum over the ranks."""
        return self._summed(
            self._mark(),
            lambda: self._backend.allreduce([flat], dist.AllreduceOptions()),
            flat.nbytes,
        )

    def sum_part(self, flat: Tensor, part: Tensor) -> Coroutine[None]:
        """Begin to sum a rank's equal part of a tensor over the ranks.

        Args:
            flat: contiguous, (ranks x n,).
            part: (n,), gets the sum of the elements from rank x n on.
        """
        return self._summed(
            self._mark(),
            lambda: self._backend._reduce_scatter_base(part, flat, dist.ReduceScatterOptions()),
            flat.nbytes,
        )

    def _mark(self) -> Any:
        """An event of the work that the caller's stream has by now."""
        return self._gpu and self._gpu.current_stream(self.device).record_event()

    def _summed(self, mark: Any, begin: Callable[[], Any], nbytes: int) -> Coroutine[None]:
        assert self.group.comm is not None
        turn = self._begun
        self._begun += 1
        with self._counted:
            yield self.group.comm.Ibarrier()
            # A later barrier may be seen to have ended before an earlier one.
            yield lambda: self._passed == turn
            self._passed += 1
            with self._behind(mark):
                begun = begin()
            yield begun.is_completed
        self._counted.nbytes += nbytes
        try:
            begun.wait()
            failure = getattr(begun, "exception", lambda: None)()
        except RuntimeError as error:
            failure = error
        if failure is not None:
            raise HpcTrainError(
                f"a sum over the GPUs of {self.group.size} ranks failed on rank {self.group.rank} "
                f"of them ({self.group.host}): {first_line(failure)}",
                f"set NCCL_DEBUG=INFO to see why, or {MPI_INSTEAD}",
            )

    def _behind(self, mark: Any) -> AbstractContextManager[Any]:
        """Let work begin behind an event, on a stream of its own."""
        if self._gpu is None:
            return nullcontext()
        self._stream.wait_event(mark)
        context: AbstractContextManager[Any] = self._gpu.stream(self._stream)
        return context

    def close(self) -> None:
        """End the connections. Collective."""
        self.group.barrier()
        # Torch 2.5 has another name for it.
        backend = self._backend
        (backend.shutdown if hasattr(backend, "shutdown") else backend._shutdown)()
        self.group.barrier()  # the first rank has what connects the others
        self.group.close()


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
                f"start as many ranks on each node as it has GPUs, or {MPI_INSTEAD}",
            )


def _backend_for(device: torch.device) -> Any:
    """Torch's class for groups of these GPUs."""
    name = BACKENDS.get(device.type, "")
    kind = getattr(dist, name, None)
    if not (hasattr(kind, "Options") and hasattr(dist, "TCPStore")):
        raise SetupError(
            f"torch {torch.__version__} has no {name or 'such sums'} for {device.type}",
            f"{MPI_INSTEAD}, or install the torch that is built for this machine's GPUs",
        )
    os.environ.setdefault(*OWN_HANDLING)
    return kind


def _store(group: Group) -> Any:
    """What torch's ranks find each other by. Collective."""
    inside = group.link() == "inside"
    host = "127.0.0.1" if inside else group.from_first(lambda: group.host)
    store = None
    with agreed(group):
        if group.rank == 0:
            store = _store_at(host, 0, first=True)
    port = group.from_first(lambda: 0 if store is None else store.port)
    with agreed(group):
        return store or _store_at(host, port, first=False)


def _store_at(host: str, port: int, *, first: bool) -> Any:
    try:
        return dist.TCPStore(  # type: ignore[attr-defined]
            *(host, port), is_master=first, wait_for_workers=False
        )
    except RuntimeError as error:
        raise SetupError(
            f"port {port} of {host} cannot be opened: {first_line(error)}",
            f"{MPI_INSTEAD} if ranks may not open ports",
        ) from None


def _connected_within(group: Group, connect: Callable[[], None]) -> None:
    """Connect the GPUs of the ranks. Collective.

    A rank that fails does so alone, and the others wait in the library, which has no time limit. So
    this rank's failure is logged at once, and all ranks give up after CONNECT_SECONDS.

    Raises:
        SetupError: it failed on some rank.
    """
    failures: list[SetupError] = []

    def tried() -> None:
        try:
            connect()
        except Exception as error:  # noqa: BLE001  it is raised in the main thread
            failures.append(
                SetupError(
                    f"the GPUs of {group.size} ranks cannot be connected: {first_line(error)}",
                    f"set NCCL_DEBUG=INFO to see why, or {MPI_INSTEAD}",
                )
            )

    thread = threading.Thread(target=tried, name="connect", daemon=True)
    with group.waiting(f"the connection of the GPUs of {group.size} ranks"):
        thread.start()
        thread.join(CONNECT_SECONDS)
        if failures:
            logger.error("rank %d (%s): %s", group.rank, group.host, failures[0])
        if thread.is_alive() or not all_arrive(group, CONNECT_SECONDS):
            raise (failures or [_late(group)])[0]
    settle(group, failures[0] if failures else None)


def _late(group: Group) -> SetupError:
    return SetupError(
        f"the GPUs of {group.size} ranks are not connected after {CONNECT_SECONDS:.0f} s",
        f"look for a rank that told an error, set NCCL_DEBUG=INFO, or {MPI_INSTEAD}",
    )


def gpu_uuid(device: torch.device) -> str:
    """The UUID of a GPU; "" for a processor, and where torch does not tell it."""
    if device.type == "cpu":
        return ""
    return str(getattr(getattr(torch, device.type).get_device_properties(device), "uuid", ""))
