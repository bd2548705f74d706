"""Walks through autograd's graph of a loss, and finds parameters that it uses past the stages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor
from torch.nn import Parameter
from torch.utils._pytree import tree_leaves


def graph_nodes(result: Tensor, without: Iterable[Any] = ()) -> Iterator[Any]:
    """The nodes of a result's graph.

    Args:
        result: what was computed.
        without: nodes at which the walk turns back. They are left out, too.
    """
    todo, seen = [result.grad_fn], {None, *without}
    while todo:
        node: Any = todo.pop()
        if node not in seen:
            seen.add(node)
            yield node
            todo += [following for following, _ in node.next_functions]


def parameters_in(result: Tensor, without: Iterable[Any] = ()) -> Iterator[Parameter]:
    """The leaves of a result's graph, such as parameters; `without` as for `graph_nodes`."""
    for node in graph_nodes(result, without):
        if node.name().endswith("AccumulateGrad"):
            yield node.variable


class Passages:
    """The nodes of a graph at which the stages of a forward pass begin and end."""

    def __init__(self) -> None:
        self.nodes: list[Any] = []
        self.wanted = False
        """Whether stages are noted. It ends if one returns an object that may hide tensors."""

    def noted(self, stage: Callable[..., Any], args: Any, how: Any) -> Any:
        """Call a stage, and note the tensors among its arguments and its results."""
        result = stage(*args, **how)
        if self.wanted:
            found = tree_leaves(result)
            self.wanted = all(isinstance(one, Tensor | int | float | str | None) for one in found)
            for one in [*found, *tree_leaves((args, how))]:
                if isinstance(one, Tensor):
                    self.nodes.append(one.grad_fn)
                    if one._base is not None:  # its graph goes on if a view changes in place
                        self.nodes.append(one._base.grad_fn)
        return result
