"""What the conversions of other programs' weights share, and of our own for other sizes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hpc_train.errors import ConfigError, DataError

logger = logging.getLogger(__name__)

Converted = tuple[str, Callable[[Tensor], Tensor]]
"""The name that a tensor gets, and a function that converts the tensor."""


MODEL_TYPES = {
    "gpt": "gpt2",
    "llama": "llama",
    "mistral": "mistral",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
}
"""Hugging Face's `model_type` of each `model.kind` of language models."""


def check_model_type(kind: str, about: Mapping[str, Any]) -> None:
    """Check that a `config.json` is not that of another kind of model.

    Args:
        kind: `model.kind`.
        about: the content of the `config.json`, or something else.

    Raises:
        ConfigError: it is.
    """
    given = about.get("model_type", MODEL_TYPES[kind])
    for other, theirs in MODEL_TYPES.items():
        if other != kind and given == theirs:
            raise _other_kind(theirs, kind, other)
    if given != MODEL_TYPES[kind]:
        raise ConfigError(
            f"checkpoint.weights are of a model of model_type {given}, which is not read",
            f"give weights of {', '.join(MODEL_TYPES.values())}",
        )


def _other_kind(theirs: str, kind: str, other: str) -> ConfigError:
    return ConfigError(
        f"checkpoint.weights are those of a {theirs}, but model.kind is {kind}",
        f"set --model.kind {other}",
    )


def own_weights(
    kind: str,
    keys: Sequence[str],
    sizes: Mapping[str, Any],
    about: Mapping[str, Any],
    *,
    whole: bool,
) -> Callable[[str], Converted]:
    """Choose how weights of our own are converted for a language model of other sizes.

    Args:
        kind: `model.kind`.
        keys: the sizes that the shapes of tensors do not show.
        sizes: the sizes of the model, by the names of its arguments.
        about: `about` of a checkpoint, or anything for weights with our names.
        whole: whether all of the model's tensors are read from there, or only some.

    Raises:
        ConfigError: the weights are of another kind of model, or of one with other sizes.
    """
    saved = about.get("shape", {})
    theirs = about.get("kind", kind)
    if theirs != kind and theirs in MODEL_TYPES:
        raise _other_kind(theirs, kind, theirs)
    # Tensors show the other sizes. An output layer of its own would silently be left out.
    keys = [*keys, "tie_embeddings"] if whole else keys
    check_same_sizes(sizes, {key: saved[key] for key in keys if key in saved})
    if whole and saved.get("layers", 0) > sizes["layers"]:
        logger.warning(
            "the weights have %d layers, and this model takes the first %d of them",
            saved["layers"],
            sizes["layers"],
        )
    return lambda name: (name, lambda tensor: fitted(name, tensor, sizes))


def size_in(about: Mapping[str, Any], name: str, default: Any) -> Any:
    """A size in a `config.json`, or another value that decides what a model computes.

    Args:
        about: the content of the `config.json`.
        name: the key.
        default: the value of a key that is left out. The value has its type.

    Raises:
        DataError: it has another type, or is below 0.
    """
    value = about.get(name, default)
    if isinstance(default, float) and type(value) is int:
        value = float(value)
    if type(value) is not type(default) or value < 0:
        words = {bool: "true or false", float: "a number"}
        kind = words.get(type(default), "a whole number")
        raise DataError(
            f"{name} is {value!r} in the config.json of checkpoint.weights", f"write {kind} there"
        )
    return value


def check_same_sizes(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> None:
    """Check that two models have the same sizes. The error names all keys to set.

    Raises:
        ConfigError: they do not.
    """
    unlike = {f"model.{key}": value for key, value in theirs.items() if value != ours[key]}
    if unlike:
        mine = {key: ours[key.removeprefix("model.")] for key in unlike}
        have = ", ".join(f"{key} {str(value).lower()}" for key, value in mine.items())
        need = " ".join(f"--{key} {str(value).lower()}" for key, value in unlike.items())
        raise ConfigError(f"checkpoint.weights are not those of a model with {have}", f"set {need}")


def fitted(name: str, tensor: Tensor, sizes: Mapping[str, Any]) -> Tensor:
    """A tensor by our name, of a model for longer texts or with fewer tokens, for ours."""
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
