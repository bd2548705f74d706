"""Divide a model into pipeline stages without taking its forward pass apart.

The model names its stages: modules that its forward pass calls one after the other, each with the
last one's result as its first argument. A rank keeps its own modules. The model's forward pass runs
on every rank as it is written: modules before this rank's hand on the activation that came from
the rank before, and where a module behind them is called, the pass is left with what it was given.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from itertools import permutations
from typing import Any

import torch
from torch import Tensor, nn

from hpc_train.errors import UserError
from hpc_train.parallel.divide import divide
from hpc_train.parallel.tensor import matching

REMEDY = "let it call each of its `stages` once, in their order, with the last one's result"


class _Leave(Exception):
    """Carries an activation out of the forward pass at the end of a run of modules."""

    def __init__(self, activation: Tensor) -> None:
        super().__init__()
        self.activation = activation


class _Absent(nn.Module):
    """Stands where a module of another rank was."""


@dataclass
class Cursor:
    """Where a forward pass begins and ends: positions of modules, and the activation to start with.

    Args:
        run: the modules that are computed.
        activation: the result of the module before the first of them; None at the model's begin.
        due: the module that is called next.
        again: whether modules are computed a second time, in the backward pass.
        graded: whether the pass computes gradients.
    """

    run: range
    activation: Tensor | None = None
    due: int = 0
    again: bool = False
    graded: bool = field(default_factory=torch.is_grad_enabled)


class Stages:
    """The virtual stages of a model that one rank has: runs of its modules.

    Args:
        model: loses the modules of other ranks, in place.
        names: its stage modules, from `stage_names`.
        mine: this rank's runs of them.
    """

    def __init__(self, model: nn.Module, names: Sequence[str], mine: Sequence[range]) -> None:
        self.runs = list(mine)
        self.names = list(names)
        self._model = model
        self._cursor: Cursor | None = None  # of the pass under way
        kept = {position for run in mine for position in run}
        for position, name in enumerate(names):
            if position not in kept:
                model.set_submodule(name, _Absent())
            module = model.get_submodule(name)
            original = module.forward if position in kept else None
            module.forward = _Visit(self, position, original)

    def compute(
        self, chunk: int, activation: Tensor | None, forward: Callable[[], Tensor]
    ) -> Tensor:
        """Compute one of this rank's runs.

        Args:
            chunk: which.
            activation: what the run before gave; None for the model's first.
            forward: runs the whole model and its loss.

        Returns:
            The run's last activation; what `forward` returns, for the model's last.

        Raises:
            UserError: the forward pass did not call each of the modules once, in the order of the
                stages, with a tensor as its first argument.
        """
        cursor = Cursor(self.runs[chunk], activation)
        with self._under_way(cursor):
            try:
                result = forward()
            except _Leave as leave:
                # What the model has open, such as the hooks of torch.utils.checkpoint, ends here.
                traceback.clear_frames(leave.__traceback__)
                return leave.activation
        if cursor.due < len(self.names):
            raise UserError(f"the forward pass did not come to {self._due(cursor)}", REMEDY)
        return result

    def recomputing(self, chunk: int, activation: Tensor | None) -> AbstractContextManager[None]:
        """The backward pass of one of this rank's runs, which may compute modules again.

        So it is under torch.utils.checkpoint. They start with what `compute` was given.
        """
        return self._under_way(Cursor(self.runs[chunk], activation, again=True))

    @contextmanager
    def _under_way(self, cursor: Cursor) -> Iterator[None]:
        self._cursor = cursor
        try:
            yield
        finally:
            self._cursor = None

    def _due(self, cursor: Cursor) -> str:
        """The name of the module that is called next."""
        return [*self.names, "the end"][cursor.due]

    def visit(self, position: int, original: Callable[..., Any] | None, args: Any, how: Any) -> Any:
        """A stage module is called: compute it, skip it, or leave."""
        cursor, name = self._cursor, self.names[position]
        if cursor is None:  # called by itself
            if original is None:
                raise UserError(f"stage {name} is another rank's", "call it in the model's forward")
            return original(*args, **how)
        if not cursor.again:
            self._check(cursor, position, args)
            cursor.due += 1
        if position > cursor.run[-1]:
            self._check_gradient(cursor, args[0])
            raise _Leave(args[0])
        if position < cursor.run[0]:
            # A tensor of its own: whoever wraps the module may take it into its graph.
            assert cursor.activation is not None
            return cursor.activation.detach().requires_grad_(cursor.activation.requires_grad)
        if position == cursor.run[0] and cursor.activation is not None:
            args = (cursor.activation, *args[1:])
        assert original is not None  # a run has modules of this rank only
        return original(*args, **how)

    def _check(self, cursor: Cursor, position: int, args: Any) -> None:
        name = self.names[position]
        if position != cursor.due:
            raise UserError(f"the forward pass calls {name} before {self._due(cursor)}", REMEDY)
        if position > 0 and not (args and isinstance(args[0], Tensor)):
            raise UserError(f"the first argument of stage {name} is not a tensor", REMEDY)

    def _check_gradient(self, cursor: Cursor, activation: Tensor) -> None:
        """Refuse an activation that should have a gradient and was computed without."""
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


def stage_names(model: nn.Module) -> list[str]:
    """The modules that a model names as its stages, in the order of its forward pass.

    Raises:
        UserError: it names none, or one of them lies in another, or some parameter is in none.
    """
    patterns = getattr(model, "stages", None)
    if not patterns:
        raise UserError(
            f"parallel.pp is above 1, but {type(model).__name__} has no attribute `stages`",
            "name its modules in the order of its forward pass: docs/how-to/parallel.md",
        )
    names = [name for pattern in patterns for name in matching(model, pattern, "stages")]
    for outer, inner in permutations(names, 2):
        if f"{inner}.".startswith(f"{outer}."):
            raise UserError(f"stages: {inner} is part of {outer}", "name each module once")
    for name, _ in model.named_parameters():
        if not any(name.startswith(f"{stage}.") for stage in names):
            raise UserError(f"parameter {name} is in none of the model's stages", "add its module")
    return names


def costs(model: nn.Module, names: Sequence[str]) -> list[float]:
    """What each stage module costs, by its matrix products: elements of its linear weights."""
    found = []
    for name in names:
        layers = [m for m in model.get_submodule(name).modules() if isinstance(m, nn.Linear)]
        found.append(float(sum(layer.weight.numel() for layer in layers)))
    return found if any(found) else [1.0] * len(found)


def runs_of(model: nn.Module, names: Sequence[str], ranks: int, chunks: int) -> list[list[range]]:
    """Divide the stage modules by cost; for each pipeline rank its runs, the first chunk first.

    Virtual stage c * ranks + r is chunk c of rank r, as in Narayanan et al., "Efficient large-scale
    language model training on GPU clusters using Megatron-LM", https://arxiv.org/abs/2104.04473.

    Raises:
        UserError: there are fewer modules than virtual stages.
    """
    parts = ranks * chunks
    if len(names) < parts:
        of = f"{ranks} ranks" + (f" x {chunks} virtual stages" if chunks > 1 else "")
        raise UserError(
            f"the model has {len(names)} stage modules, too few for {of} of a pipeline",
            f"parallel.pp x parallel.virtual_stages can be up to {len(names)}",
        )
    divided = divide(costs(model, names), parts)
    return [[divided[c * ranks + r] for c in range(chunks)] for r in range(ranks)]
