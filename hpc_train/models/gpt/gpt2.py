"""Convert weights: between our GPT and Hugging Face's GPT-2, and from a GPT of other sizes.

GPT and GPT-2 compute the same. But a GPT-2 stores the weights of linear layers transposed. Its
product for queries, keys and values also has all queries first, then all keys and all values. Ours
goes head by head.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from hpc_train.errors import ConfigError
from hpc_train.models.foreign import (
    Converted,
    check_model_type,
    check_same_sizes,
    fitted,
    own_weights,
    size_in,
)

MODULES = {
    "wte": "embedding.token",
    "wpe": "embedding.position",
    "ln_1": "norm_attention",
    "attn.c_attn": "attention.qkv",
    "attn.c_proj": "attention.out",
    "ln_2": "norm_mlp",
    "mlp.c_fc": "mlp.up",
    "mlp.c_proj": "mlp.down",
    "ln_f": "head.norm",
    "lm_head": "head.output",
}
# Values that config.json leaves out are those of the smallest GPT-2.
SIZES: dict[str, tuple[str, Any]] = {
    "layers": ("n_layer", 12),
    "hidden": ("n_embd", 768),
    "heads": ("n_head", 12),
    "vocab": ("vocab_size", 50257),
    "sequence": ("n_positions", 1024),
    "tie_embeddings": ("tie_word_embeddings", True),
}
COMPUTED: dict[str, tuple[Any, ...]] = {
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
    "layer_norm_epsilon": (1e-5,),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
    "is_causal": (True,),
}


def foreign_weights(
    sizes: Mapping[str, Any], about: Mapping[str, Any], *, whole: bool
) -> Callable[[str], Converted | None]:
    """Choose how weights are converted for a GPT.

    Weights for longer texts give their first positions. Tokens that they lack get the mean of the
    others.

    Args:
        sizes: the sizes of the GPT, by the names of its arguments.
        about: the description beside the weights: a `config.json`, or `about` of a checkpoint.
        whole: whether all of the GPT's tensors are read from there, or only some.

    Returns:
        A function that takes a tensor's name there. It returns None for a tensor to leave out: it
        is not a weight, or repeats another one.

    Raises:
        ConfigError: the weights are of a GPT with other sizes, or of one that computes otherwise.
        DataError: a size in a `config.json` is no number.
    """
    check_model_type("gpt", about)
    if about.get("model_type") != "gpt2":
        return own_weights("gpt", ("heads",), sizes, about, whole=whole)
    about = {name: value for name, value in about.items() if value is not None}
    theirs = {key: size_in(about, name, default) for key, (name, default) in SIZES.items()}
    theirs["sequence"] = min(theirs["sequence"], sizes["sequence"])  # `fitted` makes these equal
    theirs["vocab"] = max(theirs["vocab"], sizes["vocab"])
    check_same_sizes(sizes, theirs if whole else {"heads": theirs["heads"]})
    inner = {"n_inner": (None, 4 * theirs["hidden"])}
    for key, values in {**COMPUTED, **inner}.items():
        if about.get(key, values[0]) not in values:
            raise ConfigError(
                f"the weights are of a GPT-2 whose {key} is {about[key]}, ours has {values[-1]}",
                "give other weights in checkpoint.weights",
            )
    return lambda name: _converted(name, sizes)


def _converted(name: str, sizes: Mapping[str, Any]) -> Converted | None:
    found = re.fullmatch(r"(?:transformer\.)?(?:h\.(\d+)\.)?(.+)\.(weight|bias|masked_bias)", name)
    block, module, kind = found.groups() if found else (None, "", "")
    if module == "attn" or (module == "lm_head" and sizes["tie_embeddings"]):
        return None  # the causal mask, or a second copy of the token embedding
    if module not in MODULES:
        return name, lambda tensor: tensor

    here = f"{MODULES[module]}.{kind}"

    def convert(tensor: Tensor) -> Tensor:
        if module.startswith(("attn.", "mlp.")) and kind == "weight":
            tensor = tensor.t()
        if module == "attn.c_attn":  # (3, H, C/H, ...) there, (H, 3, C/H, ...) here
            by_kind: Tensor = tensor.unflatten(0, (3, sizes["heads"], -1))
            return by_kind.transpose(0, 1).flatten(0, 2)
        return fitted(here, tensor, sizes)

    return (here if block is None else f"blocks.{block}.{here}"), convert


def as_gpt2(sizes: Mapping[str, Any]) -> Callable[[str], list[Converted]]:
    """Make a function that converts our GPT's tensors to those of a GPT-2.

    Args:
        sizes: the sizes of the GPT, by the names of its arguments.

    Returns:
        A function that maps the name of one of our tensors to its GPT-2 name and a conversion, as
        a list of one.
    """
    rows = rows_as_gpt2(sizes)

    def converted(name: str) -> list[Converted]:
        [(theirs, of_rows)] = rows(name)
        inside = re.search(r"\.(attn|mlp)\.\w+\.weight$", theirs)
        return [(theirs, (lambda tensor: of_rows(tensor).t()) if inside else of_rows)]

    return converted


def rows_as_gpt2(sizes: Mapping[str, Any]) -> Callable[[str], list[Converted]]:
    """The same as `as_gpt2`, but weights are not transposed.

    The rows of another tensor that belong to the rows of a weight are converted likewise, such as
    those of an adapter.
    """
    modules = {here: there for there, here in MODULES.items()}

    def converted(name: str) -> list[Converted]:
        path, _, kind = name.rpartition(".")
        block = re.match(r"blocks\.\d+\.", path)
        there = modules[path.removeprefix(block[0] if block else "")]

        def convert(tensor: Tensor) -> Tensor:
            if there != "attn.c_attn":
                return tensor
            by_head: Tensor = tensor.unflatten(0, (sizes["heads"], 3, -1))
            return by_head.transpose(0, 1).flatten(0, 2)

        where = block[0].replace("blocks", "transformer.h") if block else "transformer."
        return [(f"{'' if there == 'lm_head' else where}{there}.{kind}", convert)]

    return converted


def gpt2_config(sizes: Mapping[str, Any]) -> dict[str, Any]:
    """The `config.json` of a GPT-2 with these sizes. It has no special tokens."""
    same = {there: sizes[here] for here, (there, _) in SIZES.items()}
    dropout = {"embd_pdrop": sizes["dropout"], "resid_pdrop": sizes["dropout"], "attn_pdrop": 0.0}
    tokens = {"bos_token_id": None, "eos_token_id": None}
    kind = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}
    return {**kind, **same, **dropout, **tokens, **{k: v[0] for k, v in COMPUTED.items()}}
