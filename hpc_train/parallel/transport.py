"""Activations and gradients between the ranks of a pipeline, over MPI point-to-point.

Receives are posted before their message is due, so that it finds its buffer waiting; buffers go
back to a pool and serve again. The shape of an activation is told once, with the first one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hpc_train.errors import UserError
from hpc_train.mpi.group import Group

AHEAD = 2  # receives that are posted before they are waited for
TAGS = 1 << 14  # MPI promises tags up to 32767
FORM_TAGS = TAGS  # tags from here on tell shapes

MessageForm = tuple[tuple[int, ...], torch.dtype]


@dataclass(frozen=True)
class Message:
    """One tensor on its way.

    Args:
        peer: the rank in the pipeline that sends or receives it.
        tag: the same on both sides, below TAGS; unlike that of all others under way.
        kind: messages of one kind have one form; a kind's forms travel in one direction.
        what: for messages to the user, such as "the activation of micro-batch 3".
        told: whether its sender tells the form of a kind; else `learn` does.
    """

    peer: int
    tag: int
    kind: Hashable
    what: str
    told: bool = True


class Transport:
    """Sends and receives tensors for one rank of a pipeline.

    Args:
        group: the ranks of the pipeline.
        device: where tensors lie; those of a GPU go through pinned host memory unless MPI reads it.
    """

    def __init__(self, group: Group, device: torch.device) -> None:
        from mpi4py import MPI  # a pipeline of several ranks has MPI

        from hpc_train.collectives.mpi import reads_gpu_memory

        assert group.comm is not None
        self.group, self.comm, self.device = group, group.comm, device
        self.staged = device.type == "cuda" and not reads_gpu_memory()
        self._byte = MPI.BYTE
        self._forms: dict[Hashable, MessageForm] = {}
        self._sent: list[tuple[Any, Any]] = []
        self._expected: deque[Message] = deque()
        self._posted: deque[tuple[Message, Tensor, Any]] = deque()
        self._pool: dict[MessageForm, list[Tensor]] = {}

    def expect(self, messages: Iterable[Message]) -> None:
        """Tell which messages will be received, in this order, and post the first ones."""
        self._expected.extend(messages)
        self._post()

    def send(self, message: Message, tensor: Tensor) -> None:
        """Begin to send a tensor, which is left alone until `flush`.

        Raises:
            UserError: it has not the form that its kind had before.
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
        tensor = tensor.detach().contiguous()
        if self.device.type == "cuda":
            torch.cuda.current_stream().synchronize()  # MPI knows nothing of streams
        near = tensor.cpu() if self.staged else tensor
        request = self.comm.Isend([_bytes(near), self._byte], dest=message.peer, tag=message.tag)
        self._sent.append((request, near))

    def learn(self, kind: Hashable, like: Tensor) -> None:
        """Tell the form of a kind that its sender does not tell."""
        self._forms[kind] = (tuple(like.shape), like.dtype)

    def receive(self) -> Tensor:
        """Wait for the next expected tensor. Give it back with `release`."""
        if not self._posted:
            self._ask_form(self._expected[0])
            self._post()
        message, near, request = self._posted.popleft()
        with self.group.waiting(f"{message.what} from pipeline rank {message.peer}"):
            request.Wait()
        self._post()
        self._sent = [(request, near) for request, near in self._sent if not request.Test()]
        return near.to(self.device, copy=True) if self.staged else near

    def release(self, tensor: Tensor) -> None:
        """A received tensor is used up: its memory may serve again."""
        if not self.staged:
            self._pool.setdefault((tuple(tensor.shape), tensor.dtype), []).append(tensor)

    def flush(self) -> None:
        """Wait until everything has been sent."""
        with self.group.waiting("its messages to be taken by the pipeline's other ranks"):
            for request, _ in self._sent:
                request.wait()
        self._sent = []

    def _post(self) -> None:
        """Post the next receives, as far as their forms are known."""
        while self._expected and len(self._posted) < AHEAD:
            message = self._expected[0]
            form = self._forms.get(message.kind)
            if form is None:
                return
            free = self._pool.get(form)
            near = free.pop() if free else self._buffer(form)
            request = self.comm.Irecv(
                [_bytes(near), self._byte], source=message.peer, tag=message.tag
            )
            self._posted.append((self._expected.popleft(), near, request))

    def _ask_form(self, message: Message) -> None:
        if message.kind not in self._forms:
            with self.group.waiting(f"the shape of {message.what}"):
                form = self.comm.recv(source=message.peer, tag=FORM_TAGS + message.tag)
            self._forms[message.kind] = form

    def _buffer(self, form: MessageForm) -> Tensor:
        shape, dtype = form
        if self.staged:
            return torch.empty(shape, dtype=dtype, pin_memory=True)
        return torch.empty(shape, dtype=dtype, device=self.device)


def _bytes(tensor: Tensor) -> Any:
    flat = tensor.view(-1).view(torch.uint8)
    return flat if flat.is_cuda else flat.numpy()
