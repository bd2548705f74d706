"""Saves and restores the objects that a user registers with a loop, such as schedulers."""

from __future__ import annotations

import gc
import json
import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import xxhash
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.nn import Module, Parameter
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from hpc_train.checkpoint.background import enough_memory
from hpc_train.checkpoint.fileformat import Entry, LocalTensor, torch_dtypes
from hpc_train.checkpoint.parts import as_bytes
from hpc_train.checkpoint.state import ExtraState
from hpc_train.errors import CheckpointMismatch, UserError, plural
from hpc_train.gradients.hooks import after_step, before_step
from hpc_train.mpi.agreement import agreed, same
from hpc_train.mpi.group import Group
from hpc_train.sharding import SliceSpec
from hpc_train.training.group_values import GroupValues, load_in_place, lost_with, put_in_groups
from hpc_train.training.outsiders import held_by, parameters_known
from hpc_train.training.tagged_json import decode, encode

logger = logging.getLogger(__name__)

PREFIX = "registered"
REGISTERED_KINDS = "registered_kinds"
HOW = {"params", "foreach", "fused", "capturable", "differentiable"}
"""Keys of an optimizer's groups that are not saved: they say how it computes, not what."""
OPTIONS, OWN = "", "."
PATHS = {OPTIONS: f"{PREFIX}..groups", OWN: f"{PREFIX}..param_groups"}  # begin their tensors' names
"""The names of the groups' options, and of the values there that are the optimizer's own state."""
OF_GROUPS = "the options of the optimizer's groups (lr ...)", "with loop.mean"
"""What `OPTIONS` are in messages, and in which way all ranks have the same."""


class Registrable(Protocol):
    """An object with a state, such as torch's schedulers, averaged models and GradScaler."""

    def state_dict(self) -> Any:
        """The state: numbers, strings, tensors, and lists, tuples and dicts of them."""

    def load_state_dict(self, state: Any, /) -> Any:
        """Continue from a state that `state_dict` returned."""


def parameters_beside(model: Module, optimizer: Optimizer) -> dict[str, Parameter]:
    """The parameters of a model that require gradients and that an optimizer does not have."""
    own = {id(p) for group in optimizer.param_groups for p in group["params"]}
    return {n: p for n, p in model.named_parameters() if p.requires_grad and id(p) not in own}


class Registered(ExtraState):
    """Saves and restores registered objects by name. All ranks must call each method.

    The options of the optimizer's groups, such as the learning rate, are saved as well if an object
    is registered that changes them. That is an object whose attribute `optimizer` has these groups.
    Values there that are the optimizer's own state (`GroupValues`) are always saved.

    Args:
        group: all ranks.
        optimizer: the loop's optimizer.
        model: the loop's model.
        beside: its parameters from `parameters_beside`.
        copied: whether to copy tensors for a save in the background, because they may change.
        owned: whether this rank writes the tensors. If ranks hold the model together, one does.
        own_gradients: whether the gradients of ranks differ after a backward pass.
        scaled: whether the gradients have a loss scale until the loop's own step.
    """

    def __init__(
        self,
        group: Group,
        optimizer: Optimizer,
        model: Module,
        beside: Mapping[str, Parameter],
        *,
        copied: bool,
        owned: bool,
        own_gradients: bool,
        scaled: bool,
    ) -> None:
        self.group, self.optimizer, self.model, self.beside = group, optimizer, model, beside
        self.copied, self.owned = copied, owned
        self.own_gradients, self.scaled = own_gradients, scaled
        self.things: dict[str, Registrable] = {}
        self._trees: dict[str, Any] = {}
        self._tensors: dict[str, Tensor] = {}
        self._empty: set[str] = set()  # names of objects that had no state when they came
        self._own = GroupValues(optimizer)
        self._apart = False  # whether `_own` differs between ranks
        self.hooks = []
        if not self._own.of_torch:
            self.hooks.append(before_step(optimizer, self._own.before_step))
            self.hooks.append(after_step(optimizer, self._own.after_step))

    def add(self, name: str, thing: Registrable) -> None:
        """Register one more object. Collective.

        Raises:
            UserError: the object has no state, or one that checkpoints cannot hold, or one that
                differs between ranks; or the name is taken or not usable.
        """
        with agreed(self.group):
            self._check(name, thing)
        self.things[name] = thing
        try:
            self.check()
        except Exception:  # raised on all ranks
            del self.things[name]
            raise
        if self._has_nothing(name):
            self._empty.add(name)

    def _check(self, name: str, thing: Registrable) -> None:
        """Check the name and the type of an object."""
        what = f"loop.register({name!r}, ...)"
        if not re.fullmatch(r"[\w-]+", name):
            raise UserError(f"{what} has no usable name", "take letters, digits, _ and -")
        if name in self.things:
            raise UserError(f"{what} was called twice", "give each thing a name of its own")
        if thing is self.optimizer or thing is self.model:
            raise UserError(
                f"{what} was given the loop's own model or optimizer",
                "leave it out: they are saved anyway",
            )
        for method in ("state_dict", "load_state_dict"):
            if not callable(getattr(thing, method, None)):
                raise UserError(
                    f"{what} was given a {type(thing).__name__}, which has no {method}",
                    "give it both state_dict and load_state_dict",
                )
        if isinstance(thing, Optimizer) and self.trains_model(thing):
            self._check_second(what)
        if isinstance(thing, GradScaler) and self.own_gradients:
            raise UserError(
                "torch's GradScaler looks at each rank's own gradients, which differ between "
                "ranks with zero, average_every and reduction adasum",
                'give the loop precision="float16", whose scale all ranks agree on',
            )

    def _check_second(self, what: str) -> None:
        """Refuse another optimizer of the model where only the loop's own can step."""
        if self.own_gradients:
            raise UserError(
                f"{what} was given another optimizer of the model, and zero, average_every and "
                "reduction adasum work with one optimizer",
                "leave zero, average_every and adasum out",
            )
        if self.scaled:
            raise UserError(
                f"{what} was given another optimizer of the model, and with precision float16 only "
                "loop.step() removes the loss scale from the gradients",
                'take precision "bfloat16", or no precision, and register torch\'s GradScaler',
            )

    def check_optimizers(self) -> None:
        """Check that what the registered optimizers train is saved. Collective.

        Warns of parameters of the model whose optimizer, if there is one, is not saved, and of a
        scheduler that is not.

        Raises:
            UserError: an optimizer has parameters that neither the loop's model nor a registered
                object has.
        """
        others = {n: thing for n, thing in self.things.items() if isinstance(thing, Optimizer)}
        known = self.parameters_known()
        with agreed(self.group):
            for name, other in others.items():
                params = [p for group in other.param_groups for p in group["params"]]
                if lost := [parameter for parameter in params if id(parameter) not in known]:
                    raise UserError(
                        f"the optimizer that loop.register({name!r}, ...) was given has "
                        f"{plural(len(lost), 'parameter')} that the loop's model lacks, which "
                        "would be neither averaged nor saved",
                        "give as the model one module that has all that is trained, such as "
                        "torch.nn.ModuleList([model, criterion]); or average them yourself, and "
                        "register an object that has them",
                    )
        self._tell_of_lost_optimizers(others.values())
        self._tell_of_lost_schedulers(others)

    def parameters_known(self) -> set[int]:
        """The ids of the parameters that the loop and the registered objects have."""
        return parameters_known(self.model, self.optimizer, self.things.values())

    def _tell_of_lost_schedulers(self, others: Mapping[str, Optimizer]) -> None:
        # Nothing refers from an optimizer to its schedulers, so they are looked for.
        there = [one for one in gc.get_objects() if issubclass(type(one), LRScheduler)]
        for name, optimizer in {"": self.optimizer, **others}.items():
            kept = (self._steers(thing, optimizer) for thing in self.things.values())
            if any(self._steers(one, optimizer) for one in there) and not any(kept):
                logger.warning(
                    "the optimizer%s has a learning-rate scheduler that is not registered, so a "
                    "resumed run lacks its state: give it to loop.register",
                    name and f" {name!r}",
                )

    def _tell_of_lost_optimizers(self, others: Iterable[Optimizer]) -> None:
        saved = {name for other in others for name in self.shared_with(other)}
        lost = [name for name in self.beside if name not in saved]
        if lost:
            logger.warning(
                "the loop's optimizer does not have %s of the model, such as %s: if another "
                "optimizer does, give it to loop.register, else a resumed run lacks its state, "
                "and a closure of its step returns the loss of its rank alone",
                plural(len(lost), "trained parameter"),
                lost[0],
            )

    def trains_model(self, optimizer: Optimizer) -> bool:
        """Whether an optimizer has a parameter of the model."""
        own = {id(p) for group in optimizer.param_groups for p in group["params"]}
        return any(id(parameter) in own for parameter in self.model.parameters())

    def shared_with(self, optimizer: Optimizer) -> list[str]:
        """The names of the parameters of `beside` that an optimizer has."""
        own = {id(p) for group in optimizer.param_groups for p in group["params"]}
        return [name for name, parameter in self.beside.items() if id(parameter) in own]

    @property
    def scales(self) -> list[float]:
        """The loss scales of torch's GradScalers. A step that is skipped changes its scale."""
        return [one.get_scale() for one in self.things.values() if isinstance(one, GradScaler)]

    @property
    def modules(self) -> list[Module]:
        """The registered objects that are modules, such as averaged models."""
        return [thing for thing in self.things.values() if isinstance(thing, Module)]

    def check(self) -> None:
        """Check that a checkpoint can hold all registered objects. Collective.

        Raises:
            UserError: it cannot, or the ranks have different states.
        """
        with self._together():
            self._look()
        names = ", ".join(f"{n} ({type(thing).__name__})" for n, thing in self.things.items())
        same(self.group, "what loop.register was given", names, "register the same on all ranks")
        self._compare_own()
        for name, tree in self._trees.items():
            named = f"the state of {name!r}, which loop.register was given,", "with loop.mean"
            what, how = OF_GROUPS if name == OPTIONS else named
            with self._together():
                digest = self._digest(name, tree)
            same(self.group, what, digest, f"give all ranks the same state, as {how}")

    def _compare_own(self) -> None:
        """Leave out what the optimizer keeps in its groups if it differs between ranks. Collective.

        With `zero` a rank steps a part of the parameters, and may keep something about these.
        """
        digest = int(self._digest(OWN, self._trees[OWN])[:15], 16)
        of = "a comparison of what the optimizer keeps in its groups"
        apart = self.group.largest(digest, of) != self.group.smallest(digest)
        if apart:
            del self._trees[OWN]
            held = PATHS[OWN]
            self._tensors = {n: t for n, t in self._tensors.items() if not n.startswith(held)}
        if apart and not self._apart and self.group.rank == 0:
            logger.warning(
                "%s keeps %s in its param_groups, which differs between ranks, so checkpoints lack "
                "it: leave zero and average_every out",
                type(self.optimizer).__name__,
                ", ".join(map(repr, sorted(self._own.keys))),
            )
        self._apart = apart

    def tell_of_lost(self) -> None:
        """Warn on rank 0 of state that is not saved. All ranks call it after the first step."""
        for line in lost_with(self.optimizer, self.things.values()):
            if self.group.rank == 0:
                logger.warning("%s", line)
        if self._own.unsaved and self.group.rank == 0:
            logger.warning(
                "%s keeps %s in its param_groups, which checkpoints cannot hold: keep numbers, "
                "texts, tensors or lists of these there",
                type(self.optimizer).__name__,
                ", ".join(map(repr, sorted(self._own.unsaved))),
            )
        if lost := sorted(filter(self._has_nothing, self._empty)) if self.group.rank == 0 else []:
            logger.warning(
                "state_dict() of %s, which loop.register was given, is empty, so nothing of it is "
                "saved: return the state there; for torchmetrics call metric.persistent(True)",
                ", ".join(lost),
            )

    def _has_nothing(self, name: str) -> bool:
        """Whether the last look found no state of an object that seems to have some."""
        thing = self.things[name]
        inside = thing.modules() if isinstance(thing, Module) else []
        stateless = isinstance(thing, Module) and not any(
            isinstance(held, Tensor) for module in inside for held in held_by(module)
        )
        if stateless or isinstance(thing, GradScaler):  # which has none if it is disabled
            return False
        tree = self._trees[name]
        return tree == [] or (
            isinstance(tree, dict) and tree.get("dict", tree.get("OrderedDict")) == []
        )

    def _look(self) -> None:
        """Encode the present states as JSON and tensors."""
        tensors: dict[str, Tensor] = {}
        trees = {
            name: encode(thing.state_dict(), f"{PREFIX}.{name}", tensors)
            for name, thing in self.things.items()
        }
        if any(map(self._steers, self.things.values())):
            options = [
                {key: value for key, value in group.items() if key not in HOW}
                for group in self.optimizer.param_groups
            ]
            trees[OPTIONS] = encode(options, PATHS[OPTIONS], tensors)
        # All ranks compare it, also if some have none.
        trees[OWN] = encode(self._own.present(), PATHS[OWN], tensors)
        self._trees, self._tensors = trees, tensors

    def _steers(self, thing: Any, optimizer: Optimizer | None = None) -> bool:
        """Whether an object changes the options of an optimizer's groups, as a scheduler does.

        Without the argument `optimizer` it is the loop's own.
        """
        # Groups are compared, because the object may have the optimizer that Horovod has wrapped.
        inside = [one for one in held_by(thing) if isinstance(one, LRScheduler)]
        optimizers = [getattr(one, "optimizer", None) for one in (thing, *inside)]
        groups = [group for one in optimizers for group in getattr(one, "param_groups", [])]
        own = (optimizer or self.optimizer).param_groups
        return any(one is other for one in groups for other in own)

    def _digest(self, name: str, tree: Any) -> str:
        """A hash of an object's state: of its JSON and its tensors."""
        found = xxhash.xxh3_128(json.dumps(tree, sort_keys=True).encode())
        begin = PATHS.get(name, f"{PREFIX}.{name}")
        for path, tensor in self._tensors.items():
            if path == begin or path.startswith(f"{begin}."):
                found.update(str((tensor.dtype, tuple(tensor.shape))).encode())
                found.update(as_bytes(tensor.contiguous()).cpu().numpy().data)
        digest: str = found.hexdigest()
        return digest

    def collect(self) -> dict[str, LocalTensor]:
        """The tensors to save, by name. Collective.

        Raises:
            CheckpointError: a rank has too little memory for copies of them.
        """
        self.check()
        with self._together():
            return {
                name: self._held(tensor.clone() if self.copied else tensor)
                for name, tensor in self._tensors.items()
            }

    @contextmanager
    def _together(self) -> Iterator[None]:
        """A block that copies state, and that all ranks end alike."""
        what = "copies of the registered objects"
        with agreed(self.group), enough_memory(what, background=self.copied):
            yield

    def _held(self, tensor: Tensor) -> LocalTensor:
        """A whole tensor, as checkpoints take it."""
        return LocalTensor(tensor, SliceSpec.whole(tuple(tensor.shape)), self.owned)

    def values(self) -> dict[str, Any]:
        """The states without their tensors, as tagged JSON, and the objects' types."""
        kinds = {name: type(thing).__name__ for name, thing in self.things.items()}
        trees = {n: tree for n, tree in self._trees.items() if n != OWN or self._own.keys}
        return {PREFIX: trees, REGISTERED_KINDS: kinds} if trees else {}

    def expect(self, entries: Mapping[str, Entry]) -> dict[str, LocalTensor]:
        """Memory for those tensors of registered objects that the checkpoint has."""
        with agreed(self.group):
            self._look()
            there = self._tensors
            self._tensors = {
                name: torch.empty(
                    entry.shape,
                    dtype=torch_dtypes()[entry.dtype],
                    device=there[name].device if name in there else "cpu",
                )
                for name, entry in entries.items()
                if name.startswith(f"{PREFIX}.") and name.split(".")[1] in ("", *self.things)
            }
        return {name: self._held(tensor) for name, tensor in self._tensors.items()}

    def take(self, values: Mapping[str, Any]) -> None:
        """Restore the saved states.

        Rank 0 warns of objects that only the checkpoint has, or only the loop.

        Raises:
            HpcTrainError: an object is of another type than the saved one, or does not take its
                state.
        """
        saved = values.get(PREFIX, {})
        with agreed(self.group):
            for name, kind in values.get(REGISTERED_KINDS, {}).items():
                now = type(self.things.get(name)).__name__
                if name in self.things and now != kind:
                    raise CheckpointMismatch(
                        f"{name!r} was a {kind} in the checkpoint, but loop.register was given a "
                        f"{now}",
                        "register it under another name: then it starts afresh",
                    )
            for name, thing in self.things.items():
                if name in saved:
                    self._restore(name, thing, decode(saved[name], self._tensors))
            steering = [name for name, thing in self.things.items() if self._steers(thing)]
            if OPTIONS in saved and any(name in saved for name in steering):
                put_in_groups(self.optimizer, decode(saved[OPTIONS], self._tensors))
            if OWN in saved:
                self._own.restore(decode(saved[OWN], self._tensors))
        self._tensors = {}
        if self.group.rank > 0:
            return
        if new := sorted(self.things.keys() - saved.keys()):
            logger.warning("the checkpoint has no state of %s: it starts afresh", ", ".join(new))
        if gone := sorted(saved.keys() - self.things.keys() - {OPTIONS, OWN}):
            logger.warning(
                "the checkpoint has the state of %s, which is no longer registered: it is dropped",
                ", ".join(gone),
            )

    def _restore(self, name: str, thing: Registrable, state: Any) -> None:
        """Restore the state of one object."""
        try:
            if isinstance(thing, Optimizer):
                load_in_place(thing, state)
            else:
                thing.load_state_dict(state)
        except Exception as error:
            raise CheckpointMismatch(
                f"{name!r}, which loop.register was given, does not take the checkpoint's state "
                f"({type(error).__name__}: {error})",
                "make it as before, or register it under another name: then it starts afresh",
            ) from error
