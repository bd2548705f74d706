"""Apply a tensor-parallel plan to a plain module. The plan says how ranks share which layers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from inspect import signature
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from hpc_train.collectives import Collectives
from hpc_train.collectives.regions import check_divided
from hpc_train.errors import ConfigError, UserError
from hpc_train.models.dropout import SampleDropout
from hpc_train.models.hooks import has_hooks
from hpc_train.models.initial import LORA_A, LORA_B
from hpc_train.models.linear import Linear
from hpc_train.models.lora import Adapter, LoraLinear, is_plain_linear
from hpc_train.models.rms_norm import HeadNorm
from hpc_train.models.tabular.members import MemberScale
from hpc_train.parallel.linear import TOKENS, Deferred, ParallelLinear
from hpc_train.parallel.vocabulary import VocabParallelCrossEntropy, VocabParallelEmbedding
from hpc_train.sharding import SliceSpec

Style = Literal["colwise", "rowwise", "vocab", "sequence"]
CUT_BY_ROWS = (
    "weight",
    "bias",
    LORA_B,
)  # parameters that are cut by rows in all styles but rowwise
STYLES = ("colwise", "rowwise", "vocab", "sequence")


def parallelize(
    module: nn.Module,
    plan: Mapping[str, str],
    over: Collectives,
    *,
    sequence_parallel: bool = False,
    deferred: Deferred | None = None,
) -> dict[str, SliceSpec]:
    """Replace layers, in place, by this rank's parts of them. The results stay the same.

    The styles are:

    - colwise, for a Linear: each rank computes its part of the outputs. A `SampleDropout` on such
      outputs needs this style, too. Each rank then draws its part of the mask. So does the
      `MemberScale` of an ensemble. A `HeadNorm` on such outputs needs it as well, so that the
      gradients of its weight, which each rank has whole, are summed over the ranks.
    - rowwise, for a Linear: each rank takes its part of the inputs, which are the outputs of a
      colwise layer.
    - vocab: for an Embedding, the Linear that computes the logits, and their CrossEntropyLoss.
      Embedding and loss may have no options other than ignore_index and reduction mean or none.
    - sequence: for a module such as an embedding of positions. With sequence parallelism the
      module gets this rank's part of its input along the last dimension; else nothing changes.

    Layers with hooks, weight_norm or another parametrization have no style. What lies between a
    colwise and a rowwise layer sees this rank's part of the last dimension. It must compute each
    element by itself, and have no parameters but those of a `HeadNorm`.

    With `sequence_parallel` all modules between those layers see only this rank's part of the
    tokens (dimension 1). They must treat each token by itself. The gradients of their parameters
    have to be summed over the ranks.

    Args:
        module: the whole module, the same on all ranks, with the same weights.
        plan: maps names of modules to styles; `*` stands for any one part of a dotted name.
        over: the tensor-parallel group.
        sequence_parallel: cut the tokens between the layers.
        deferred: takes the weight gradients of linear layers, to be computed later. None computes
            them at once.

    Returns:
        Maps names of parameters to the slices that this rank has. It has the other ones whole.

    Raises:
        UserError: a style is unknown, no style cuts the tokens though `sequence_parallel` is on,
            the module that the plan names does not exist or does not fit its style, the plan has
            only one of colwise and rowwise, or two layers share a parameter and the plan cuts it in
            only one of them.
        ConfigError: a layer cannot be divided by the number of ranks.
    """
    sharing = _Sharing(over, sequence_parallel and over.group.size > 1, deferred)
    named = dict(module.named_parameters(remove_duplicate=False))
    specs: dict[str, SliceSpec] = {}
    styles = resolve(module, plan)
    if sharing.cut and not {"vocab", "sequence"} & {*styles.values()}:
        raise UserError(
            "parallel.sequence_parallel is on, but no layer of the tensor plan cuts the tokens",
            "leave it out, or give an embedding of tokens the style vocab or sequence",
        )
    for name, style in styles.items():
        specs |= sharing.replace(module, name, style)
    for name, layer in list(module.named_modules()):
        if sharing.cut and isinstance(layer, SampleDropout) and layer.section is None:
            layer.section = (TOKENS, over.group.rank, over.group.size)
        whole = type(layer) in (nn.Linear, Linear, LoraLinear) and _replaceable(layer)
        if deferred is not None and whole:
            module.set_submodule(name, sharing.linear(layer, "whole"))
    _check_tied(module, named)
    if over.group.size > 1:
        _check_pairs(styles)
        # In eval mode torch's TransformerEncoderLayer would read the weights as if they were whole.
        torch.backends.mha.set_fastpath_enabled(False)
    return specs


def _check_pairs(styles: Mapping[str, Style]) -> None:
    """Check that a plan which divides outputs also has a layer that takes such parts."""
    pair: tuple[Style, Style] = "colwise", "rowwise"
    for style, other in (pair, pair[::-1]):
        here = [name for name, given in styles.items() if given == style]
        if here and other not in styles.values():
            raise UserError(
                f"tensor plan: {here[0]} is {style}, and no layer is {other}",
                "a colwise layer divides its outputs over the ranks: give the Linear that takes "
                "them the style rowwise",
            )


def _check_tied(module: nn.Module, before: Mapping[str, Parameter]) -> None:
    """Check that names which belonged to one parameter still do."""
    first: dict[Parameter, str] = {}
    for name, parameter in before.items():
        other = first.setdefault(parameter, name)
        if module.get_parameter(name) is not module.get_parameter(other):
            raise UserError(
                f"tensor plan: {other} and {name} are one parameter, but are cut differently",
                "give both layers, or none, styles that cut it",
            )


def resolve(module: nn.Module, plan: Mapping[str, str]) -> dict[str, Style]:
    """Map each module that a plan's patterns match to its style.

    Raises:
        UserError: a pattern matches no module, or a style does not exist.
    """
    found: dict[str, Style] = {}
    for pattern, style in plan.items():
        if style not in STYLES:
            raise UserError(f"tensor plan: {pattern} is {style!r}", f"use {', '.join(STYLES)}")
        for name in matching(module, pattern, "tensor plan"):
            found[name] = style  # type: ignore[assignment]
    return found


def matching(module: nn.Module, pattern: str, what: str) -> list[str]:
    """Names of the submodules that a pattern matches, in the module's own order.

    Raises:
        UserError: the pattern matches none.
    """
    expression = re.compile(re.escape(pattern).replace(r"\*", r"[^.]+"))
    every = module.named_modules(remove_duplicate=False)  # a module may have several names
    names = [name for name, _ in every if name and expression.fullmatch(name)]
    if not names:
        raise UserError(f"{what}: the model has no module {pattern}", "name it as the model does")
    return names


class _Sharing:
    """Replaces layers by this rank's parts of them."""

    def __init__(self, over: Collectives, cut: bool, deferred: Deferred | None) -> None:
        self.over, self.cut, self.deferred = over, cut, deferred
        self.parts: dict[tuple[Parameter, int], Parameter] = {}
        # The replacements by layer and style, and the slices that their own parameters are.
        self.made: dict[tuple[nn.Module, Style], tuple[nn.Module, dict[str, SliceSpec]]] = {}

    def replace(self, root: nn.Module, name: str, style: Style) -> dict[str, SliceSpec]:
        """Replace one layer. Returns the slices of its parameters by their full names."""
        layer = root.get_submodule(name)
        if (layer, style) not in self.made:  # one that several names share is replaced once
            try:
                specs = self.specs(layer, style)
            except ValueError as error:
                remedy = "take sizes that parallel.tp divides"
                raise ConfigError(f"{name}: {error}", remedy) from None
            new = self.part_of(layer, style)
            if new is None:
                raise UserError(
                    f"tensor plan: style {style} of {name} does not fit this "
                    f"{type(layer).__name__}",
                    "a style takes a plain layer, without hooks or parametrizations: see "
                    "hpc_train.parallel.parallelize",
                )
            self.made[layer, style] = self.made[new, style] = new, specs
        new, specs = self.made[layer, style]
        if new is not layer:
            root.set_submodule(name, new)
        if self.over.group.size == 1:
            return {}
        return {f"{name}.{own}": spec for own, spec in specs.items()}

    def specs(self, layer: nn.Module, style: Style) -> dict[str, SliceSpec]:
        """The slices of a layer's parameters that this rank takes, by their names in the layer.

        Raises:
            ValueError: the ranks cannot divide them.
        """
        dims = {"weight": 1, LORA_A: 1} if style == "rowwise" else dict.fromkeys(CUT_BY_ROWS, 0)
        if isinstance(layer, MemberScale):
            dims = {"weight": 1, "bias": 1}
        if isinstance(layer, HeadNorm):
            dims = {}
        return {
            own: self.spec(parameter, dims[own])
            for own, parameter in layer.named_parameters(recurse=False)
            if style != "sequence" and own in dims
        }

    def part_of(self, layer: nn.Module, style: Style) -> nn.Module | None:
        """The module that replaces a layer; None if the style does not fit the layer."""
        if style == "sequence":
            if self.cut:
                layer.register_forward_pre_hook(self._cut_input, with_kwargs=True)
            return layer
        if not _replaceable(layer):
            return None
        if isinstance(layer, nn.Linear):
            return self.linear(layer, "rowwise" if style == "rowwise" else "colwise")
        if isinstance(layer, nn.Embedding) and style == "vocab":
            weight = self.part(layer.weight, 0)
            return VocabParallelEmbedding(weight, self.over, cut_output=self.cut)
        if isinstance(layer, nn.CrossEntropyLoss) and style == "vocab":
            how = layer.reduction
            return VocabParallelCrossEntropy(self.over, layer.ignore_index, reduction=how)
        if isinstance(layer, SampleDropout) and style == "colwise":
            layer.section = (-1, self.over.group.rank, self.over.group.size)
            return layer
        if isinstance(layer, HeadNorm) and style == "colwise":
            layer.divided = self.over.group.size > 1
            return layer
        if isinstance(layer, MemberScale) and style == "colwise":
            layer.weight, layer.bias = self.part(layer.weight, 1), self.part(layer.bias, 1)
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
        adapter = None
        if isinstance(layer, LoraLinear):
            a = self.part(layer.lora_a, 1 if style == "rowwise" else None)
            b = self.part(layer.lora_b, 0 if style == "colwise" else None)
            adapter = Adapter(a, b, layer.scale)
        over, cut, deferred = self.over, self.cut, self.deferred
        return ParallelLinear(
            weight, bias, style, over, cut=cut, deferred=deferred, adapter=adapter
        )

    def part(self, parameter: Tensor, dim: int | None) -> Parameter:
        """This rank's part of a parameter. Layers that share the parameter share the part."""
        assert isinstance(parameter, Parameter)  # torch types those of its layers as tensors
        if self.over.group.size == 1 or dim is None:
            return parameter
        if (parameter, dim) not in self.parts:
            spec = self.spec(parameter, dim)
            part = parameter.detach().narrow(dim, spec.start, spec.stop - spec.start)
            self.parts[parameter, dim] = Parameter(part.clone(), parameter.requires_grad)
        return self.parts[parameter, dim]

    def spec(self, parameter: Parameter, dim: int) -> SliceSpec:
        """The slice of the parameter that this rank holds."""
        group = self.over.group
        return SliceSpec.part(tuple(parameter.shape), dim, group.rank, group.size)

    def _cut_input(
        self, layer: nn.Module, args: tuple[Any, ...], how: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if args:
            return (self._part_of(args[0]), *args[1:]), how
        first = next(iter(signature(layer.forward).parameters), "")
        if first not in how:
            raise UserError(
                f"tensor plan: a {type(layer).__name__} of style sequence is called without input",
                "give it the tensor to cut as its first argument",
            )
        return args, how | {first: self._part_of(how[first])}

    def _part_of(self, tokens: Tensor) -> Tensor:
        """This rank's part along the last dimension."""
        check_divided(tokens.shape[-1], self.over)
        group = self.over.group
        return tokens.chunk(group.size, -1)[group.rank]


def _replaceable(layer: nn.Module) -> bool:
    """Whether a layer has no hooks and no options that its replacement would ignore."""
    if isinstance(layer, SampleDropout):  # it is not replaced
        return True
    if has_hooks(layer):
        return False
    match layer:
        case nn.Linear():
            return is_plain_linear(layer) or type(layer) is LoraLinear
        case nn.Embedding():
            options = layer.max_norm or layer.scale_grad_by_freq or layer.sparse
            return layer.padding_idx is None and not options
        case nn.CrossEntropyLoss():
            plain = layer.weight is None and not layer.label_smoothing
            return plain and layer.reduction in ("mean", "none")
    return isinstance(layer, MemberScale | HeadNorm)
