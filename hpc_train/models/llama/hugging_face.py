"""Convert weights: from and to Hugging Face's Llama, Mistral, Qwen2 and Qwen3.

Both compute the same. But Hugging Face has a matrix each for queries, keys, values, gate and up.
Ours join the rows of the first three, and those of the last two, in groups (see `module`).
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
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
from hpc_train.models.llama.rotary import HIGH_FREQUENCY, LOW_FREQUENCY, ORIGINAL_LENGTH

logger = logging.getLogger(__name__)

LLAMA_MODULES = {
    "embed_tokens": "embedding.token",
    "input_layernorm": "norm_attention",
    "self_attn.q_norm": "attention.query_norm",
    "self_attn.k_norm": "attention.key_norm",
    "self_attn.o_proj": "attention.out",
    "post_attention_layernorm": "norm_mlp",
    "mlp.down_proj": "mlp.down",
    "norm": "head.norm",
    "lm_head": "head.output",
}
JOINED = {
    "attention.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.gate_up": ("mlp.gate_proj", "mlp.up_proj"),
}
"""The matrices whose rows one of ours has, in the order that they have within a group."""
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
# What config.json leaves out has the values of the smallest common model with that class.
LLAMA_SIZES: dict[str, tuple[str, Any]] = {
    "layers": ("num_hidden_layers", 32),
    "hidden": ("hidden_size", 4096),
    "heads": ("num_attention_heads", 32),
    "mlp_width": ("intermediate_size", 11008),
    "vocab": ("vocab_size", 32000),
    "tie_embeddings": ("tie_word_embeddings", False),
    "norm_eps": ("rms_norm_eps", 1e-6),
}
PARTLY = ("heads", "kv_heads", "head_width", "rope_theta", "rope_factor", "norm_eps")
"""Sizes that are the same even if only some tensors are taken."""
LLAMA_COMPUTED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "is_causal": (True,),
    "attention_bias": (False,),
    "mlp_bias": (False,),
}
ORIGINAL = "original_max_position_embeddings"
ROPE = {
    "low_freq_factor": LOW_FREQUENCY,
    "high_freq_factor": HIGH_FREQUENCY,
    ORIGINAL: ORIGINAL_LENGTH,
}


LONG = 131_072  # max_position_embeddings of Llama 3.1 to 3.3
ALL_BEFORE = ("max_window_layers", 28)  # the number of layers in front of those with windows
LAYER_TYPES = ("full_attention", "sliding_attention")
NO_WINDOW = "sliding_window is null"  # a key of ours beside those of a config.json


class ForeignWeights:
    """Names and converts the tensors of a Hugging Face model for ours.

    A call with their name gives ours, and a function that converts the tensor. Several of theirs
    may have one name here: `join` makes one tensor of them.

    Args:
        sizes: the sizes of our model, by the names of its arguments.
    """

    def __init__(self, sizes: Mapping[str, Any]) -> None:
        self.sizes = sizes

    def __call__(self, name: str) -> Converted | None:
        """Our name for a tensor, and its conversion; None for a tensor to leave out."""
        # A model without a head has no `model.` in front.
        found = re.fullmatch(r"(?:model\.)?(?:layers\.(\d+)\.)?(.+)\.(weight|bias)", name)
        block, module, kind = found.groups() if found else (None, "", "")
        if module == "lm_head" and self.sizes["tie_embeddings"]:
            module = "embed_tokens"  # a second copy, which `join` compares
        if name.endswith("rotary_emb.inv_freq"):
            return None  # old files have the angles of `Rotary`
        here = LLAMA_MODULES.get(module) or next(
            (h for h, all_ in JOINED.items() if module in all_), ""
        )
        if not here:
            return name, lambda tensor: tensor
        ours = f"{here}.{kind}" if block is None else f"blocks.{block}.{here}.{kind}"
        return ours, lambda tensor: fitted(ours, tensor, self.sizes)

    def join(self, name: str, theirs: Mapping[str, Tensor]) -> Tensor:
        """The tensor of our name, made of all of theirs that have this name, by their names.

        Raises:
            KeyError: one of them is missing; with its name.
            ConfigError: two are to be one, and differ.
        """
        found = re.fullmatch(r"blocks\.(\d+)\.(.+)\.(\w+)", name)
        if found is None or found[2] not in JOINED:
            first, *others = theirs.values()
            if any(not one.is_meta and not torch.equal(one, first) for one in others):
                raise ConfigError(
                    f"{' and '.join(theirs)} of checkpoint.weights differ, but "
                    "model.tie_embeddings is true",
                    "set --model.tie_embeddings false, and tie_word_embeddings false in its "
                    "config.json",
                )
            return first
        block, matrix, kind = found.groups()
        parts = {their.removeprefix("model."): part for their, part in theirs.items()}
        wanted = [f"layers.{block}.{module}.{kind}" for module in JOINED[matrix]]
        if lacking := [f"model.{part}" for part in wanted if part not in parts]:
            raise KeyError(*lacking)
        count = groups_of(self.sizes, matrix)
        grouped = [parts[part].unflatten(0, (count, -1)) for part in wanted]
        return torch.cat(grouped, 1).flatten(0, 1)


def groups_of(sizes: Mapping[str, Any], matrix: str) -> int:
    """The number of groups in which the rows of one of our joined matrices lie."""
    kv_heads: int = sizes["kv_heads"]
    return kv_heads if matrix == "attention.qkv" else math.gcd(sizes["mlp_width"], kv_heads)


def llama_weights(
    kind: str, sizes: Mapping[str, Any], about: Mapping[str, Any], *, whole: bool
) -> Callable[[str], Converted | None]:
    """Choose how weights are converted for a model. Arguments but the first are as for GPT-2.

    Args:
        kind: `model.kind`.
        sizes: the sizes of our model, by the names of its arguments.
        about: the description beside the weights: a `config.json`, or `about` of a checkpoint.
        whole: whether all of the model's tensors are read from there, or only some.

    Returns:
        A function that takes a tensor's name there. It returns None for a tensor to leave out.

    Raises:
        ConfigError: the weights are of a model with other sizes, or of one that computes otherwise.
        DataError: a size in a `config.json` is no number.
    """
    check_model_type(kind, about)
    if about.get("model_type") != kind:
        return own_weights(kind, PARTLY, sizes, about, whole=whole)
    without_window = "sliding_window" in about and about["sliding_window"] is None
    about = {name: value for name, value in about.items() if value is not None}
    about[NO_WINDOW] = without_window
    theirs = {key: size_in(about, name, default) for key, (name, default) in LLAMA_SIZES.items()}
    theirs["kv_heads"] = size_in(about, "num_key_value_heads", theirs["heads"])
    width = theirs["hidden"] // max(1, theirs["heads"])
    theirs["head_width"] = size_in(about, "head_dim", 128 if kind == "qwen3" else width)
    theirs["vocab"] = max(theirs["vocab"], sizes["vocab"])  # `fitted` makes these equal
    theirs |= _rope(about)
    check_same_sizes(sizes, theirs if whole else {key: theirs[key] for key in PARTLY})
    for key, values in LLAMA_COMPUTED.items():
        if about.get(key, values[0]) not in values:
            raise _computes_otherwise(f"{key} is {about[key]}, ours has {values[0]}")
    _check_length(about, sizes["sequence"])
    return ForeignWeights(sizes)


def _computes_otherwise(what: str) -> ConfigError:
    return ConfigError(
        f"checkpoint.weights are of a model whose {what}", "give other weights there"
    )


def _rope(about: Mapping[str, Any]) -> dict[str, float]:
    """The keys of rotations. transformers 5 writes `rope_parameters`, older ones `rope_scaling`.

    Raises:
        ConfigError: ours has other rotations, or there are two tables that differ.
    """
    tables = [about[key] for key in ("rope_scaling", "rope_parameters") if about.get(key)]
    first, *others = [_rotations(about, table) for table in tables or [{}]]
    if any(other != first for other in others):
        raise ConfigError(
            "rope_scaling and rope_parameters differ in the config.json of checkpoint.weights",
            "leave there the one with which the weights were trained",
        )
    return first


def _rotations(about: Mapping[str, Any], given: Any) -> dict[str, float]:
    """The keys of rotations of a table, as transformers takes them."""
    if not isinstance(given, dict):
        raise _computes_otherwise(f"rope_scaling is {given}, ours has a table")
    if nested := [key for key, value in given.items() if isinstance(value, dict)]:
        raise _computes_otherwise(f"{nested[0]} has rotations of its own")
    theta = size_in({**about, **given}, "rope_theta", 10000.0)
    how = given.get("rope_type", given.get("type", "default"))
    if how == "default":
        return {"rope_theta": theta, "rope_factor": 1.0}
    if how != "llama3":
        raise _computes_otherwise(f"rope_type is {how}, ours has default or llama3")
    length = about.get("max_position_embeddings")
    given = {**given, ORIGINAL: about.get(ORIGINAL, given.get(ORIGINAL, length))}
    for key, value in ROPE.items():
        if given.get(key, value) != value:
            raise _computes_otherwise(f"{key} is {given[key]}, ours has {value:g}")
    return {"rope_theta": theta, "rope_factor": size_in(given, "factor", 1.0)}


def _check_length(about: Mapping[str, Any], sequence: int) -> None:
    """Check that no token attends over a window only, and warn of longer texts than before."""
    window = size_in(about, "sliding_window", 4096) if _has_windows(about) else None
    if window is not None and sequence > window:
        raise ConfigError(
            f"checkpoint.weights are of a model whose tokens attend to {window} tokens at most, "
            f"but model.sequence is {sequence}",
            f"set --model.sequence {window}, or less",
        )
    most = size_in(about, "max_position_embeddings", sequence)
    if sequence > most:
        logger.warning(
            "model.sequence is %d, but the weights are of a model for at most %d tokens",
            sequence,
            most,
        )


def _has_windows(about: Mapping[str, Any]) -> bool:
    """Whether a layer of the model attends over a window. A null in the file was left out."""
    if about["model_type"] == "mistral":  # which does not read `layer_types`
        return not about.get(NO_WINDOW, False)
    if "layer_types" in about:
        types = about["layer_types"]
        for one in types if isinstance(types, list) else [types]:
            if one not in LAYER_TYPES:
                raise _computes_otherwise(f"layer_types has {one}, ours has full_attention")
        return LAYER_TYPES[1] in types
    layers, before = (size_in(about, *key) for key in (LLAMA_SIZES["layers"], ALL_BEFORE))
    return bool(about.get("use_sliding_window")) and before < layers


def converted_names(sizes: Mapping[str, Any]) -> Callable[[str], list[Converted]]:
    """Make a function that converts our tensors to those of a Hugging Face model.

    Args:
        sizes: the sizes of our model, by the names of its arguments.

    Returns:
        A function that maps the name of one of our tensors to the names of theirs that are made of
        it, each with its conversion. Rows of an adapter are converted as those of its weight.
    """
    there = {
        ours: theirs if theirs == "lm_head" else f"model.{theirs}"
        for theirs, ours in LLAMA_MODULES.items()
    }

    def converted(name: str) -> list[Converted]:
        path, _, kind = name.rpartition(".")
        inside = re.fullmatch(r"blocks\.(\d+)\.(.+)", path)
        if inside is None:
            return [(f"{there[path]}.{kind}", lambda tensor: tensor)]
        block, module = inside.groups()
        if module not in JOINED:
            theirs = there[module].removeprefix("model.")
            return [(f"model.layers.{block}.{theirs}.{kind}", lambda tensor: tensor)]
        count, rows = groups_of(sizes, module), _rows(sizes, module)
        return [
            (f"model.layers.{block}.{one}.{kind}", _taker(count, sum(rows[:i]), rows[i]))
            for i, one in enumerate(JOINED[module])
        ]

    return converted


def _rows(sizes: Mapping[str, Any], matrix: str) -> list[int]:
    """The number of rows that each of the joined matrices has in a group."""
    if matrix == "attention.qkv":
        width = sizes["head_width"]
        return [sizes["heads"] // sizes["kv_heads"] * width, width, width]
    return [sizes["mlp_width"] // groups_of(sizes, matrix)] * 2


def _taker(groups: int, first: int, rows: int) -> Callable[[Tensor], Tensor]:
    """Makes a function that takes some rows of each group."""

    def take(tensor: Tensor) -> Tensor:
        taken: Tensor = tensor.unflatten(0, (groups, -1)).narrow(1, first, rows)
        return taken.flatten(0, 1)

    return take


def llama_config(kind: str, sizes: Mapping[str, Any]) -> dict[str, Any]:
    """The `config.json` of a Hugging Face model. It has no special tokens.

    Args:
        kind: `model.kind`.
        sizes: the sizes of our model, by the names of its arguments.
    """
    scaling, most = None, sizes["sequence"]
    if sizes["rope_factor"] != 1:
        most = max(most, LONG)
        scaling = {"rope_type": "llama3", "factor": sizes["rope_factor"], **ROPE}
    rest: dict[str, Any] = {
        "num_key_value_heads": sizes["kv_heads"],
        "head_dim": sizes["head_width"],
        "max_position_embeddings": most,
        "rope_theta": sizes["rope_theta"],
        "rope_scaling": scaling,
        "hidden_act": "silu",
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    if kind == "mistral":
        rest["sliding_window"] = None
    elif kind == "llama":
        rest |= {"attention_bias": False, "mlp_bias": False}
    elif kind == "qwen3":
        rest["attention_bias"] = False
    same = {theirs: sizes[ours] for ours, (theirs, _) in LLAMA_SIZES.items()}
    return {"model_type": kind, "architectures": [ARCHITECTURES[kind]], **same, **rest}
