"""Sums of gradients by Horovod's DistributedOptimizer. `horovod` describes how it is used."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import SGD

from hpc_train.gradients.buckets import Bucket
from hpc_train.gradients.profile import Profile
from hpc_train.mpi.group import Group

if TYPE_CHECKING:
    from hpc_train.collectives.coroutines import Coroutine

NEVER = 1 << 60  # backward passes in a step: a number that is never reached


class FlatForm:
    """A compression for Horovod, which gives it a buffer in place of the tensor in `grad`.

    Args:
        compression: a class of hvd.Compression, applied to the buffers.
    """

    def __init__(self, compression: Any) -> None:
        self.compression = compression
        self.flats: dict[int, Tensor] = {}
        """Buffers, by id of the tensor that stands for them in `grad`."""

    def compress(self, stand: Tensor) -> tuple[Tensor, Any]:
        """The tensor that Horovod is to sum, and the context for `decompress`."""
        near, context = self.compression.compress(self.flats[id(stand)])
        return near, (stand, context)

    def decompress(self, total: Tensor, context: tuple[Tensor, Any]) -> Tensor:
        """Put the sum into the buffer; Horovod writes what this returns to `grad`."""
        stand, inner = context
        flat = self.flats[id(stand)]
        if total is not flat:
            flat.copy_(self.compression.decompress(total, inner))
        return stand


class DistributedSums:
    """Implements `Sums` by hvd.DistributedOptimizer, which begins the sums by itself.

    Operations have the parameters' names, which Horovod's timeline shows.

    Collective to make.

    Args:
        hvd: the module horovod.torch, initialised.
        group: the ranks.
        process_set: Horovod's process set of the same ranks.
        names: names of the model's parameters.
        buckets: one parameter each, on any device.
        compression: a class of hvd.Compression.

    Attributes:
        stands: for each parameter with elements, the value of `grad` while Horovod looks at it: a
            tensor of the parameter's shape and type without memory.
    """

    early = True
    made: ClassVar[int] = 0
    """The last object's number: several may share a process set, but their names must differ."""

    def __init__(
        self,
        hvd: Any,
        group: Group,
        process_set: Any,
        names: dict[Parameter, str],
        buckets: Sequence[Bucket],
        compression: Any,
    ) -> None:
        self.flats = [torch.zeros(b.numel, dtype=b.dtype, device=b.device) for b in buckets]
        self.profile = Profile()
        self._counted = group.waiting.traffic.of("gradient sums", group.link())
        self.stands: dict[Parameter, Tensor] = {}
        form, label = FlatForm(compression), self.label(group)
        named = []
        for number, (bucket, flat) in enumerate(zip(buckets, self.flats, strict=True)):
            (parameter,) = bucket.parameters
            if flat.numel():
                self.stands[parameter] = parameter.detach().new_zeros(()).expand(parameter.shape)
                form.flats[id(self.stands[parameter])] = flat
                named.append((f"{label}.{names.get(parameter, f'outside-{number}')}", parameter))
        self._distributed: Any = None  # stays None if there are no parameters
        if named:
            with torch.enable_grad():  # Horovod finds the graph's nodes that accumulate gradients
                self._distributed = hvd.DistributedOptimizer(
                    SGD(self.stands, lr=0.0),
                    named_parameters=named,
                    compression=form,
                    backward_passes_per_step=NEVER,
                    op=hvd.Sum,
                    process_set=process_set,
                )

    @classmethod
    def label(cls, group: Group) -> str:
        """A prefix for the names of operations that no other sums of these ranks use. Collective.

        All ranks get the same one.
        """
        cls.made = group.largest(cls.made) + 1
        return f"gradients.{cls.made}"

    def begin(self, number: int) -> Coroutine[None]:
        """Do nothing: Horovod's hooks or `synchronize` begin the sum."""
        yield from ()

    def begin_in(self, passes: int) -> None:
        """Begin sums in the step's backward pass number `passes`, or for 0 in `synchronize`."""
        if self._distributed is not None:
            self._distributed.set_backward_passes_per_step(passes or NEVER)

    def hide(self, parameter: Parameter) -> Callable[[], None]:
        """Hide a gradient that comes too late from Horovod's hook, which would raise an error.

        Returns:
            A function to call after that hook.
        """
        handles, delay = self._distributed._handles, self._distributed._allreduce_delay
        begun = handles.pop(parameter)
        delay[parameter] = 2  # the hook counts this down, and begins a sum only at 0

        def show() -> None:
            handles[parameter], delay[parameter] = begun, 0

        return show

    def synchronize(self) -> None:
        """Begin the sums that have not begun, and wait for all sums. Collective."""
        if self._distributed is None:
            return
        begin = time.perf_counter()
        before = {parameter: parameter.grad for parameter in self.stands}
        for parameter, stand in self.stands.items():
            parameter.grad = stand  # Horovod sums what it finds in `grad`
        with self._counted:
            self._distributed.synchronize()
        self._counted.nbytes += sum(flat.nbytes for flat in self.flats)
        for parameter, gradient in before.items():
            parameter.grad = gradient
        took = time.perf_counter() - begin
        for flat in self.flats:
            self.profile.add(0.0, took / len(self.flats), flat.nbytes)

    def close(self) -> None:
        """Remove Horovod's hooks from the parameters."""
        if self._distributed is not None:
            self.begin_in(0)
            # Horovod has no call for that. Its hooks are freed with the nodes that they hang on.
            self._distributed._grad_accs.clear()
        self._distributed, self.flats, self.stands = None, [], {}
