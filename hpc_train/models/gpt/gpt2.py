"""Convert weights: between our GPT and Hugging Face's GPT-2, and from a GPT of other sizes.

GPT and GPT-2 compute the same. But a GPT-2 stores the weights of linear layers transposed. Its
product for queries, keys and values also has all queries first, then all keys and all values. Ours
goes head by head.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from hpc_train.errors import ConfigError, DataError

logger = logging.getLogger(__name__)

Converted = tuple[str, Callable[[Tensor], Tensor]]
"""The name that a tensor gets, and a function that converts the tensor."""

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
    if about.get("model_type") != "gpt2":
        saved = about.get("shape", {})
        # Tensors show the other sizes. An output layer of its own would silently be left out.
        keys = ("heads", "tie_embeddings") if whole else ("heads",)
        _check_sizes(sizes, {key: saved[key] for key in keys if key in saved})
        if whole and saved.get("layers", 0) > sizes["layers"]:
            logger.warning(
                "the weights have %d layers, of which this model takes the first %d",
                saved["layers"],
                sizes["layers"],
            )
        return lambda name: (name, lambda tensor: _fitted(name, tensor, sizes))
    about = {name: value for name, value in about.items() if value is not None}
    theirs = {key: _size(about, name, default) for key, (name, default) in SIZES.items()}
    theirs["sequence"] = min(theirs["sequence"], sizes["sequence"])  # `_fitted` makes these equal
    theirs["vocab"] = max(theirs["vocab"], sizes["vocab"])
    _check_sizes(sizes, theirs if whole else {"heads": theirs["heads"]})
    inner = {"n_inner": (None, 4 * theirs["hidden"])}
    for key, values in {**COMPUTED, **inner}.items():
        if about.get(key, values[0]) not in values:
            raise ConfigError(
                f"the weights are of a GPT-2 whose {key} is {about[key]}, ours has {values[-1]}",
                "give other weights in checkpoint.weights",
            )
    return lambda name: _converted(name, sizes)


def _size(about: Mapping[str, Any], name: str, default: Any) -> Any:
    """A size in a `config.json`, or another value that decides which tensors there are."""
    value = about.get(name, default)
    if type(value) is not type(default) or value < 0:
        kind = "true or false" if isinstance(default, bool) else "a whole number"
        raise DataError(
            f"{name} is {value!r} in the config.json of checkpoint.weights", f"write {kind} there"
        )
    return value


def _check_sizes(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> None:
    """Check that two models have the same sizes. The error names all keys to set."""
    unlike = {f"model.{key}": value for key, value in theirs.items() if value != ours[key]}
    if unlike:
        have = ", ".join(f"{key} {ours[key.removeprefix('model.')]}" for key in unlike)
        need = " ".join(f"--{key} {str(value).lower()}" for key, value in unlike.items())
        raise ConfigError(f"checkpoint.weights are not those of a model with {have}", f"set {need}")


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
        return _fitted(here, tensor, sizes)

    return (here if block is None else f"blocks.{block}.{here}"), convert


def _fitted(name: str, tensor: Tensor, sizes: Mapping[str, Any]) -> Tensor:
    """The tensor of this name in our GPT, of a GPT for longer texts or with fewer tokens."""
    if name == "embedding.position.weight":
        return tensor[: sizes["sequence"]]
    if name in ("embedding.token.weight", "head.output.weight"):
        return _more_tokens(name, tensor, sizes["vocab"])
    return tensor


def _more_tokens(name: str, embedding: Tensor, vocab: int) -> Tensor:
    """Enlarge an embedding (V, C) to `vocab` rows, for instance so that ranks can share it evenly.

    New tokens, which training has not seen, get the mean of the others. The exponential of a mean
    of logits is at most the mean of their exponentials. So each new token gets a probability of at
    most 1/V. With zeros a new token would be the likeliest one if all other logits are negative.
    """
    more = vocab - len(embedding)
    if more <= 0:
        return embedding
    if not embedding.is_meta:
        logger.warning(
            "%s lacks %d tokens of the vocabulary: they start as the mean of its own", name, more
        )
    mean = embedding.mean(0, keepdim=True, dtype=torch.float64).to(embedding.dtype)
    return torch.cat([embedding, mean.expand(more, -1)])


def as_gpt2(sizes: Mapping[str, Any]) -> Callable[[str], Converted]:
    """Make a function that converts our GPT's tensors to those of a GPT-2.

    Args:
        sizes: the sizes of the GPT, by the names of its arguments.

    Returns:
        A function that maps the name of one of our tensors to its GPT-2 name and a conversion.
    """
    rows = rows_as_gpt2(sizes)

    def converted(name: str) -> Converted:
        theirs, of_rows = rows(name)
        inside = re.search(r"\.(attn|mlp)\.\w+\.weight$", theirs)
        return theirs, (lambda tensor: of_rows(tensor).t()) if inside else of_rows

    return converted


def rows_as_gpt2(sizes: Mapping[str, Any]) -> Callable[[str], Converted]:
    """The same as `as_gpt2`, but weights are not transposed.

    The rows of another tensor that belong to the rows of a weight are converted likewise, such as
    those of an adapter.
    """
    modules = {here: there for there, here in MODULES.items()}

    def converted(name: str) -> Converted:
        path, _, kind = name.rpartition(".")
        block = re.match(r"blocks\.\d+\.", path)
        there = modules[path.removeprefix(block[0] if block else "")]

        def convert(tensor: Tensor) -> Tensor:
            if there != "attn.c_attn":
                return tensor
            by_head: Tensor = tensor.unflatten(0, (sizes["heads"], 3, -1))
            return by_head.transpose(0, 1).flatten(0, 2)

        where = block[0].replace("blocks", "transformer.h") if block else "transformer."
        return f"{'' if there == 'lm_head' else where}{there}.{kind}", convert

    return converted


def config_json(sizes: Mapping[str, Any]) -> dict[str, Any]:
    """The `config.json` of a GPT-2 with these sizes. The special tokens are left empty."""
    same = {there: sizes[here] for here, (there, _) in SIZES.items()}
    dropout = {"embd_pdrop": sizes["dropout"], "resid_pdrop": sizes["dropout"], "attn_pdrop": 0.0}
    tokens = {"bos_token_id": None, "eos_token_id": None}
    kind = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}
    return {**kind, **same, **dropout, **tokens, **{k: v[0] for k, v in COMPUTED.items()}}
