"""Put a tensor-parallel plan on a plain module: which layers the ranks share, and how."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal

from torch import Tensor, nn
from torch.nn import Parameter

from hpc_train.collectives import Collectives
from hpc_train.errors import ConfigError, UserError
from hpc_train.models.dropout import SampleDropout
from hpc_train.models.linear import Linear
from hpc_train.parallel.linear import TOKENS, Deferred, ParallelLinear
from hpc_train.parallel.vocabulary import VocabParallelCrossEntropy, VocabParallelEmbedding
from hpc_train.sharding import SliceSpec

Style = Literal["colwise", "rowwise", "vocab", "sequence"]
STYLES = ("colwise", "rowwise", "vocab", "sequence")


def parallelize(
    module: nn.Module,
    plan: Mapping[str, str],
    over: Collectives,
    *,
    sequence_parallel: bool = False,
    deferred: Deferred | None = None,
) -> dict[str, SliceSpec]:
    """Replace layers by parts of them, in place; the ranks then compute what the whole would.

    Styles:

    - colwise, a Linear: each rank has its part of the outputs. A `SampleDropout` on such outputs is
      given the style, too, so that each rank draws its part of the mask.
    - rowwise, a Linear: each rank takes its part of the inputs, as a colwise layer left them.
    - vocab: an Embedding, the Linear that makes the logits, and the CrossEntropyLoss over them,
      Embedding and loss without options other than ignore_index.
    - sequence: without sequence parallelism nothing; with it the module, such as an embedding of
      positions, is given this rank's part of its input along its last dimension.

    With `sequence_parallel` all that lies between those layers sees its part of the tokens
    (dimension 1) and has to treat each token by itself; gradients of parameters there are parts of
    a sum over the ranks.

    Args:
        module: the same on all ranks, weights too.
        plan: styles by module name; `*` stands for any one part of a dotted name.
        over: the tensor-parallel group.
        sequence_parallel: cut the tokens between the layers.
        deferred: where weight gradients of linear layers are left for later, if at all.

    Returns:
        Which parts of which parameters this rank has, by name; those not named it has whole.

    Raises:
        UserError: the plan names a module that does not exist or has not the type for its style, or
            cuts a parameter that two layers share in one of them only.
        ConfigError: a layer cannot be divided by the number of ranks.
    """
    sharing = _Sharing(over, sequence_parallel and over.group.size > 1, deferred)
    named = dict(module.named_parameters(remove_duplicate=False))
    specs: dict[str, SliceSpec] = {}
    for name, style in resolve(module, plan).items():
        specs |= sharing.replace(module, name, style)
    for name, layer in list(module.named_modules()):
        if sharing.cut and isinstance(layer, SampleDropout) and layer.section is None:
            layer.section = (TOKENS, over.group.rank, over.group.size)
        if deferred is not None and type(layer) in (nn.Linear, Linear):
            module.set_submodule(name, sharing.linear(layer, "whole"))
    _check_tied(module, named)
    return specs


def _check_tied(module: nn.Module, before: Mapping[str, Parameter]) -> None:
    """Check that names that stood for one parameter do so still."""
    first: dict[Parameter, str] = {}
    for name, parameter in before.items():
        other = first.setdefault(parameter, name)
        if module.get_parameter(name) is not module.get_parameter(other):
            raise UserError(
                f"tensor plan: {other} and {name} are one parameter, but not cut alike",
                "give both layers, or none, styles that cut it",
            )


def resolve(module: nn.Module, plan: Mapping[str, str]) -> dict[str, Style]:
    """Styles by the modules' own names.

    Raises:
        UserError: a pattern fits no module, or a style does not exist.
    """
    found: dict[str, Style] = {}
    for pattern, style in plan.items():
        if style not in STYLES:
            raise UserError(f"tensor plan: {pattern} is {style!r}", f"use {', '.join(STYLES)}")
        for name in matching(module, pattern, "tensor plan"):
            found[name] = style  # type: ignore[assignment]
    return found


def matching(module: nn.Module, pattern: str, what: str) -> list[str]:
    """Names of the submodules that a pattern fits, in the module's own order.

    Raises:
        UserError: it fits none.
    """
    expression = re.compile(re.escape(pattern).replace(r"\*", r"[^.]+"))
    names = [name for name, _ in module.named_modules() if name and expression.fullmatch(name)]
    if not names:
        raise UserError(f"{what}: the model has no module {pattern}", "name it as the model does")
    return names


class _Sharing:
    """Replaces layers by this rank's parts of them."""

    def __init__(self, over: Collectives, cut: bool, deferred: Deferred | None) -> None:
        self.over, self.cut, self.deferred = over, cut, deferred
        self.parts: dict[tuple[Parameter, int], Parameter] = {}

    def replace(self, root: nn.Module, name: str, style: Style) -> dict[str, SliceSpec]:
        """Replace one layer; returns the parts of its parameters, by their full names."""
        layer = root.get_submodule(name)
        dims = {"weight": 1} if style == "rowwise" else {"weight": 0, "bias": 0}
        try:
            specs = {
                f"{name}.{own}": self.spec(parameter, dims[own])
                for own, parameter in layer.named_parameters(recurse=False)
                if style != "sequence" and own in dims
            }
        except ValueError as error:
            raise ConfigError(f"{name}: {error}", "take sizes that parallel.tp divides") from None
        new = self.part_of(layer, style)
        if new is None:
            raise UserError(
                f"tensor plan: {name} is {style}, which this {type(layer).__name__} cannot be",
                "see hpc_train.parallel.parallelize for what each style takes",
            )
        if new is not layer:
            root.set_submodule(name, new)
        return specs if self.over.group.size > 1 else {}

    def part_of(self, layer: nn.Module, style: Style) -> nn.Module | None:
        """What takes a layer's place; None if the style is not for it."""
        if style == "sequence":
            if self.cut:
                layer.register_forward_pre_hook(self._cut_input)
            return layer
        if not _replaceable(layer):
            return None
        if isinstance(layer, nn.Linear):
            return self.linear(layer, "rowwise" if style == "rowwise" else "colwise")
        if isinstance(layer, nn.Embedding) and style == "vocab":
            weight = self.part(layer.weight, 0)
            return VocabParallelEmbedding(weight, self.over, cut_output=self.cut)
        if isinstance(layer, nn.CrossEntropyLoss) and style == "vocab":
            return VocabParallelCrossEntropy(self.over, layer.ignore_index)
        if isinstance(layer, SampleDropout) and style == "colwise":
            layer.section = (-1, self.over.group.rank, self.over.group.size)
            return layer
        return None

    def linear(
        self, layer: nn.Linear, style: Literal["whole", "colwise", "rowwise"]
    ) -> ParallelLinear:
        """This rank's part of a linear layer."""
        weight = self.part(layer.weight, {"whole": None, "colwise": 0, "rowwise": 1}[style])
        bias = layer.bias
        if bias is not None:
            bias = self.part(bias, 0 if style == "colwise" else None)
        return ParallelLinear(weight, bias, style, self.over, cut=self.cut, deferred=self.deferred)

    def part(self, parameter: Tensor, dim: int | None) -> Parameter:
        """This rank's part of a parameter; one that two layers share stays shared."""
        assert isinstance(parameter, Parameter)  # torch types those of its layers as tensors
        if self.over.group.size == 1 or dim is None:
            return parameter
        if (parameter, dim) not in self.parts:
            spec = self.spec(parameter, dim)
            part = parameter.detach().narrow(dim, spec.start, spec.stop - spec.start)
            self.parts[parameter, dim] = Parameter(part.clone(), parameter.requires_grad)
        return self.parts[parameter, dim]

    def spec(self, parameter: Parameter, dim: int) -> SliceSpec:
        """Which part it is."""
        group = self.over.group
        return SliceSpec.part(tuple(parameter.shape), dim, group.rank, group.size)

    def _cut_input(self, layer: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        group = self.over.group
        return (args[0].chunk(group.size, -1)[group.rank], *args[1:])


def _replaceable(layer: nn.Module) -> bool:
    """Whether a layer computes no more than what takes its place."""
    match layer:
        case nn.Linear():
            return type(layer).forward in (nn.Linear.forward, Linear.forward)
        case nn.Embedding():
            options = layer.max_norm or layer.scale_grad_by_freq or layer.sparse
            return layer.padding_idx is None and not options
        case nn.CrossEntropyLoss():
            plain = layer.weight is None and not layer.label_smoothing
            return plain and layer.reduction == "mean"
    return isinstance(layer, SampleDropout)
