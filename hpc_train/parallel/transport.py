"""Send activations and gradients between the ranks of a pipeline, by MPI point-to-point messages.

A receive is posted before its message is due, so that the message finds its buffer waiting. Buffers
return to a pool and are used again. Only the first activation of a kind brings its shape.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hpc_train.collectives.overwrite import bits
from hpc_train.errors import UserError
from hpc_train.mpi.group import Group

AHEAD = 2  # number of receives that are posted before they are waited for
TAGS = 1 << 14  # MPI guarantees tags up to 32767; half of them are for tensors
FORM_TAGS = TAGS  # tags from here on are for shapes
POOLED_FORMS = 16  # shapes whose buffers are kept from step to step; with more, none are

MessageForm = tuple[tuple[int, ...], torch.dtype]


@dataclass(frozen=True)
class Message:
    """One tensor that is sent from one rank to another. Its form is its shape and dtype.

    Args:
        peer: the rank in the pipeline that sends or receives the tensor.
        tag: a number below TAGS, the same on both sides and different for all messages under way.
        kind: all messages of one kind have the same form and go in the same direction.
        what: what the tensor is, for the user, such as "the activation of micro-batch 3".
        told: whether the sender of a kind's first message sends the form, too. If not, the receiver
            sets it with `learn`.
    """

    peer: int
    tag: int
    kind: Hashable
    what: str
    told: bool = True


class Transport:
    """Sends and receives tensors for one rank of a pipeline. Collective to make.

    Args:
        group: the ranks of the pipeline.
        device: the tensors' device. A GPU's tensors go through pinned host memory, unless MPI can
            read the GPU's memory.
    """

    def __init__(self, group: Group, device: torch.device) -> None:
        from mpi4py import MPI  # a pipeline of several ranks has MPI

        from hpc_train.collectives.mpi import pieces, reachable, through_host, work_of

        assert group.comm is not None
        self.group, self.comm, self.device = group, group.comm, device
        self.staged, self._reachable, self._pieces = through_host(device), reachable, pieces
        self._work_of = work_of
        self._counted = group.waiting.traffic.of("pipeline messages", group.link())
        self._byte = MPI.BYTE
        self._forms: dict[Hashable, MessageForm] = {}
        self._sent: list[tuple[Any, Any]] = []
        self._expected: deque[Message] = deque()
        self._posted: deque[tuple[Message, Tensor, list[Any]]] = deque()
        self._pool: dict[MessageForm, deque[tuple[Tensor, Callable[[], None]]]] = {}
        """Free buffers, each with a function that waits until the device has done with it."""

    def expect(self, messages: Iterable[Message]) -> None:
        """Set the messages that will be received, in this order, and post the first receives."""
        self._expected.extend(messages)
        self._post()

    @contextmanager
    def apart(self) -> Iterator[None]:
        """A context for messages whose forms have nothing to do with those of others."""
        forms, self._forms = self._forms, {}
        try:
            yield
        finally:
            self._forms = forms

    def send(self, message: Message, tensor: Tensor) -> None:
        """Begin to send a tensor. It must not change until `flush`.

        Raises:
            UserError: its form differs from that of earlier messages of its kind.
        """
        form = (tuple(tensor.shape), tensor.dtype)
        if message.told and message.kind not in self._forms:
            told = self.comm.isend(form, dest=message.peer, tag=FORM_TAGS + message.tag)
            self._sent.append((told, None))
        known = self._forms.setdefault(message.kind, form)
        if known != form:
            raise UserError(
                f"{message.what} has shape {list(form[0])}, earlier ones had {list(known[0])}",
                "pad all samples to one length",
            )
        near = self._reachable(tensor)
        for piece in self._pieces(bits(near)):  # MPI keeps the order of messages with one tag
            sent = self.comm.Isend([piece, self._byte], dest=message.peer, tag=message.tag)
            self._sent.append((sent, near))
        self._counted.nbytes += near.nbytes

    def learn(self, kind: Hashable, like: Tensor) -> None:
        """Set the form of a kind from a tensor `like` it, if the sender does not send the form."""
        self._forms[kind] = (tuple(like.shape), like.dtype)

    def receive(self) -> Tensor:
        """Wait for the next expected tensor. Give it back with `release`."""
        if not self._posted:
            self._ask_form(self._expected[0])
            self._post()
        message, near, requests = self._posted.popleft()
        what = f"{message.what} from pipeline rank {message.peer}"
        with self.group.waiting(what), self._counted:
            for request in requests:
                request.Wait()
        self._post()
        self._sent = [(request, near) for request, near in self._sent if not request.Test()]
        return near.to(self.device, copy=True) if self.staged else near

    def release(self, tensor: Tensor) -> None:
        """Let the memory of a received tensor be used for later ones."""
        if not self.staged:
            free = self._pool.setdefault((tuple(tensor.shape), tensor.dtype), deque())
            free.append((tensor, self._work_of(tensor)))

    def flush(self) -> None:
        """Wait until everything has been sent."""
        with self.group.waiting("its messages to be taken by the pipeline's other ranks"):
            for request, _ in self._sent:
                request.wait()
        self._sent = []
        if len(self._pool) > POOLED_FORMS:
            self._pool.clear()

    def _post(self) -> None:
        """Post the next receives, up to the first one with an unknown form."""
        while self._expected and len(self._posted) < AHEAD:
            message = self._expected[0]
            form = self._forms.get(message.kind)
            if form is None:
                return
            near = self._free(form)
            requests = [
                self.comm.Irecv([piece, self._byte], source=message.peer, tag=message.tag)
                for piece in self._pieces(bits(near))
            ]
            self._posted.append((self._expected.popleft(), near, requests))

    def _ask_form(self, message: Message) -> None:
        if message.kind not in self._forms:
            with self.group.waiting(f"the shape of {message.what}"):
                form = self.comm.recv(source=message.peer, tag=FORM_TAGS + message.tag)
            self._forms[message.kind] = form

    def _free(self, form: MessageForm) -> Tensor:
        """A buffer that MPI may write to: nothing on the device uses its memory."""
        shape, dtype = form
        if self.staged:
            pinned = self.device.type == "cuda"
            return torch.empty(shape, dtype=dtype, pin_memory=pinned)
        if free := self._pool.get(form):
            near, wait = free.popleft()
        else:  # the device may still be reading the memory that torch gives
            near = torch.empty(shape, dtype=dtype, device=self.device)
            wait = self._work_of(near)
        wait()
        return near
