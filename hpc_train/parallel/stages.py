"""Divide a model into pipeline stages without taking its forward pass apart.

The model names its stage modules. Its forward pass calls them one after another, each with the
result of the one before as its first argument. A rank keeps only its own modules. Yet every rank
runs the model's forward pass as it is written. Modules before this rank's return the activation
that was received from the rank before. The first module after this rank's ends the forward pass
with an exception, which carries the activation that it was called with.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hpc_train.errors import UserError
from hpc_train.models.gate import Gate
from hpc_train.parallel.graphs import Passages, parameters_in
from hpc_train.parallel.received import depends_on_received, received
from hpc_train.parallel.runs import stage_names

APART = (
    "let a stage use only the result of the stage before; modules that a skip connection spans can "
    "be one stage"
)
LOSSES_SEEN = 2  # micro-batches whose losses are searched for parameters
REMEDY = "let it call each of its `stages` once and in order, with the result of the stage before"


class _Leave(Exception):
    """Carries an activation out of the forward pass at the end of a run of modules."""

    def __init__(self, activation: Tensor) -> None:
        super().__init__()
        self.activation = activation


class _ElsewhereError(UserError, AttributeError):
    """An attribute is on another rank. As an AttributeError it lets `hasattr` return False."""


class _Absent(nn.Module):
    """Stands where a module of another rank was.

    Args:
        name: the name of the module in the model.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        self._absent = name

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            # A copy that is being made has no name yet.
            stage = self.__dict__.get("_absent", "")
            raise _ElsewhereError(
                f"the program reads `{name}` of stage {stage}, which is on another rank",
                "let the forward pass only call its stages, for instance "
                "`for layer in self.layers: x = layer(x)`",
            ) from None


@dataclass
class Cursor:
    """The state of one forward pass through a run of modules. Modules are given by position.

    Args:
        run: the modules to compute.
        activation: the input of the first of them; None if it is the model's first module.
        due: the module that the forward pass has to call next.
        again: whether modules are recomputed during the backward pass.
        entered: whether the first module has got the activation. If the model calls its `forward`
            directly, no hook has run.
        graded: whether the pass computes gradients.
        outside: the saved buffers in no stage or in stages of several ranks, as `Stages._outside`
            has them before the part of the pass in which they must not change.
        passages: where the modules lie in the graph.
    """

    run: range
    activation: Tensor | None = None
    due: int = 0
    again: bool = False
    entered: bool = False
    graded: bool = field(default_factory=torch.is_grad_enabled)
    outside: dict[str, tuple[Tensor, int]] | None = None
    passages: Passages = field(default_factory=Passages)


class Stages:
    """This rank's virtual stages of a model. Each is a run of consecutive stage modules.

    Args:
        model: the whole model; modules of other ranks are removed from it in place.
        names: names of its stage modules, from `stage_names`.
        mine: this rank's runs, as positions in `names`.
    """

    def __init__(self, model: nn.Module, names: Sequence[str], mine: Sequence[range]) -> None:
        self.runs = list(mine)
        self.names = list(names)
        self._model = model
        self._cursor: Cursor | None = None  # the pass under way, if any
        self._losses_seen = 0
        kept = {position for run in mine for position in run}
        elsewhere = {
            id(buffer)
            for position, name in enumerate(names)
            if position not in kept
            for buffer in model.get_submodule(name).buffers()
        }
        for position, name in enumerate(names):
            if position not in kept:
                model.set_submodule(name, _Absent(name))
            module = model.get_submodule(name)
            original = module.forward if position in kept else None
            module.forward = _Visit(self, position, original)
            # It comes before all hooks of the program, which see what the stage is called with.
            enter = partial(self._enter, position)
            module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True)
        inside = {module for name in names for module in model.get_submodule(name).modules()}
        self._between = [(n, m) for n, m in model.named_modules() if m not in inside]
        self._shared = {
            f"{name}.{key}": (module, key)
            for name, module in model.named_modules()
            for key, buffer in module._buffers.items()
            if module in inside
            and id(buffer) in elsewhere
            and key not in module._non_persistent_buffers_set
        }
        """The saved buffers that stages of other ranks have, too: module and key, by name."""

    def compute(
        self, virtual_stage: int, activation: Tensor | None, forward: Callable[[], Tensor]
    ) -> Tensor:
        """Compute one of this rank's runs.

        Args:
            virtual_stage: the number of the run on this rank.
            activation: the last activation of the run before; None for the model's first run.
            forward: runs the whole model and its loss.

        Returns:
            The run's last activation. For the model's last run, the result of `forward`.

        Raises:
            UserError: the forward pass did not call each of the modules once, in the order of the
                stages, with a tensor as its first argument. Or it changes a buffer outside of them,
                or one that stages of several ranks share.
        """
        cursor = Cursor(self.runs[virtual_stage], activation)
        cursor.passages.wanted = cursor.graded and self._losses_seen < LOSSES_SEEN
        if virtual_stage:  # what comes before the first stage happens in each of the rank's passes
            cursor.outside = self._outside()
        with self._under_way(cursor):
            try:
                result = forward()
            except _Leave as leave:
                # This closes context managers of the model, such as torch.utils.checkpoint's hooks.
                traceback.clear_frames(leave.__traceback__)
                self._check_outside(cursor)
                return leave.activation
            except RuntimeError as error:  # torch has no type for it
                if activation is None or "a leaf Variable that requires grad" not in str(error):
                    raise
                name = self.names[cursor.run[0]]
                raise UserError(
                    f"stage {name} changes its input in place, which another rank has computed",
                    "let it make a new tensor (`inplace=False`), or make it one stage with the "
                    "module before",
                ) from None
        if cursor.due < len(self.names):
            raise UserError(f"the forward pass did not reach {self._due(cursor)}", REMEDY)
        self._check_own(cursor, "the end of the forward pass", result)
        self._check_outside(cursor)
        if cursor.passages.wanted:
            self._losses_seen += 1
            self._check_parameters(cursor.passages, result)
        return result

    def recomputing(
        self, virtual_stage: int, activation: Tensor | None
    ) -> AbstractContextManager[None]:
        """A context for the backward pass of a run, in which modules may be computed again.

        torch.utils.checkpoint computes them again. They start with the activation that `compute`
        was given.
        """
        return self._under_way(Cursor(self.runs[virtual_stage], activation, again=True))

    @contextmanager
    def _under_way(self, cursor: Cursor) -> Iterator[None]:
        self._cursor = cursor
        try:
            yield
        finally:
            self._cursor = None

    def _due(self, cursor: Cursor) -> str:
        """The name of the module that the forward pass has to call next."""
        return [*self.names, "the end"][cursor.due]

    def _enter(self, position: int, _: nn.Module, args: Any, how: Any) -> Any:
        """Give a run's first module its activation, and leave the forward pass after its last."""
        cursor = self._cursor
        if cursor is None:
            return None
        if position > cursor.run[-1]:
            return self.visit(position, None, args, how)  # it raises _Leave
        if position == cursor.run[0] and cursor.activation is not None and args:
            cursor.entered = True
            return (cursor.activation, *args[1:]), how
        return None

    def visit(self, position: int, original: Callable[..., Any] | None, args: Any, how: Any) -> Any:
        """Handle the call of a stage module: compute it, skip it, or leave the forward pass."""
        cursor, name = self._cursor, self.names[position]
        if cursor is None:  # called by itself
            if original is None:
                raise UserError(
                    f"stage {name} belongs to another rank", "call it in the model's forward"
                )
            return original(*args, **how)
        if not cursor.again:
            self._advance(cursor, position, args)
        if position > cursor.run[0] and not cursor.again:
            self._check_own(cursor, f"stage {name}", (args, how))
        if position > cursor.run[-1]:
            self._check_gradient(cursor, args[0])
            raise _Leave(args[0])
        if position < cursor.run[0]:
            # A new tensor each time, as a wrapper of the module may make it part of a graph.
            assert cursor.activation is not None
            return received(cursor.activation)
        if position == cursor.run[0] and cursor.activation is not None:
            if not cursor.entered:
                args = (cursor.activation, *args[1:])
            if not cursor.again:
                self._check_own(cursor, f"stage {name}", (args, how))
        assert original is not None  # a run has modules of this rank only
        return cursor.passages.noted(original, args, how)

    def _advance(self, cursor: Cursor, position: int, args: Any) -> None:
        """Note that a stage module is called. It must be the next one, and its input a tensor."""
        name = self.names[position]
        if position != cursor.due:
            raise UserError(f"the forward pass calls {name} before {self._due(cursor)}", REMEDY)
        if position > 0 and not (args and isinstance(args[0], Tensor)):
            raise UserError(f"the first argument of stage {name} is not a tensor", REMEDY)
        cursor.due += 1
        if cursor.outside is None:
            cursor.outside = self._outside()

    def _check_own(self, cursor: Cursor, where: str, values: Any) -> None:
        """Refuse values that depend on stages of other ranks, beside the activation."""
        if depends_on_received(values):
            before = self.names[cursor.run[0]]
            raise UserError(
                f"{where} uses a result of stages before {before}, from another rank; only "
                "the result of the stage directly before reaches a stage",
                APART,
            )

    def _check_parameters(self, passages: Passages, loss: Tensor) -> None:
        """Refuse a loss that uses parameters of this rank where each rank has others."""
        last = self.names[-1]
        whole = {*self._model.get_submodule(last).parameters()}  # each layout has these on one rank
        own = {p: n for n, p in self._model.named_parameters() if p not in whole}
        for parameter in parameters_in(loss, passages.nodes):
            if parameter in own:
                raise UserError(
                    f"the loss uses parameter {own[parameter]} itself, but the parameters of other "
                    "stages are on other ranks",
                    "let it use only what the model returns, and optimizer.weight_decay in place "
                    "of a penalty",
                )

    def _outside(self) -> dict[str, tuple[Tensor, int]]:
        """The saved buffers in no stage or in stages of several ranks, with counts of changes."""
        found = {
            f"{name}.{key}" if name else key: buffer
            for name, module in self._between
            for key, buffer in module._buffers.items()
            if key not in module._non_persistent_buffers_set
        }
        found |= {name: module._buffers.get(key) for name, (module, key) in self._shared.items()}
        return {n: (buffer, buffer._version) for n, buffer in found.items() if buffer is not None}

    def _check_outside(self, cursor: Cursor) -> None:
        """Refuse changes of buffers that the rank which saves them does not make once."""
        now = self._outside()
        for name, (buffer, version) in (cursor.outside or {}).items():
            if name not in now or now[name][0] is not buffer or now[name][1] != version:
                if name in self._shared:
                    raise UserError(
                        f"the forward pass changes buffer {name}, which stages of several pipeline "
                        "ranks share, so each rank would have another value",
                        "give each of these stages a module of its own, or use a smaller "
                        "parallel.pp",
                    )
                raise UserError(
                    f"the forward pass changes buffer {name}, which is in none of the model's "
                    "stages, so checkpoints would hold a wrong value",
                    "add its module to `stages`, or make it a part of one of them",
                )

    def _check_gradient(self, cursor: Cursor, activation: Tensor) -> None:
        """Refuse an activation that needs a gradient and was computed without one."""
        if not cursor.graded or torch.is_grad_enabled() or activation.requires_grad:
            return
        given = cursor.activation is not None and cursor.activation.requires_grad
        mine = (self._model.get_submodule(self.names[position]) for position in cursor.run)
        if given or any(p.requires_grad for module in mine for p in module.parameters()):
            raise UserError(
                f"stage {self.names[cursor.run[-1]]} is computed without its gradient",
                "let each torch.utils.checkpoint begin and end in one stage, or give it "
                "use_reentrant=False",
            )


@dataclass
class _Visit:
    """Takes the place of a stage module's `forward`."""

    stages: Stages
    position: int
    original: Callable[..., Any] | None

    def __call__(self, *args: Any, **how: Any) -> Any:
        return self.stages.visit(self.position, self.original, args, how)


def gates_of(model: nn.Module) -> list[Gate]:
    """Put a gate in front of each of this rank's stage modules, in the order of the forward pass.

    Args:
        model: the model, after its other stages were removed.

    Raises:
        UserError: as `stage_names`.
    """
    gates: list[Gate] = []
    for name in stage_names(model):
        module = model.get_submodule(name)
        if isinstance(module, _Absent):
            continue
        visit = module.forward
        if isinstance(visit, _Visit):  # it may skip the module, or pass on what was received
            assert visit.original is not None
            gates.append(Gate(module, name, visit.original, None))
            visit.original = gates[-1]
        else:
            gates.append(Gate(module, name, visit, gates[-1] if gates else None))
            module.forward = gates[-1]
    return gates
