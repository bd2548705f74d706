"""The section `model` of the configuration: the keys of each kind of model, and their defaults."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

from hpc_train.config.spread import at_least
from hpc_train.errors import ConfigError, check_kinds

_OF_TABLES: dict[str, Any] = {
    "dropout": 0.1,
    "numeric": "piecewise_linear",
    "quantiles": [],
    "pretraining": "none",
    "corrupted": None,
    "together": None,
}
_OF_TEXT: dict[str, Any] = {
    "layers": 6,
    "hidden": 384,
    "heads": 6,
    "vocab": None,
    "sequence": 256,
    "dropout": 0.0,
}
_OF_LLAMA: dict[str, Any] = {
    **_OF_TEXT,
    "kv_heads": None,
    "head_width": None,
    "mlp_width": None,
    "rope_theta": 10000.0,
    "rope_factor": 1.0,
    "norm_eps": 1e-5,
    "tie_embeddings": False,
}
_OF_QWEN: dict[str, Any] = {**_OF_LLAMA, "rope_theta": 1e6, "norm_eps": 1e-6}
MODEL_DEFAULTS: dict[str, dict[str, Any]] = {
    "gpt": {**_OF_TEXT, "tie_embeddings": True},
    "llama": _OF_LLAMA,
    "mistral": {**_OF_LLAMA, "rope_theta": 1e6},
    "qwen2": _OF_QWEN,
    "qwen3": _OF_QWEN,
    "tabular": {"layers": 3, "hidden": 64, "heads": 4, **_OF_TABLES},
    "tabular_mlp": {
        "layers": 1,
        "hidden": 128,
        "embedding_width": 16,
        "members": 16,
        **_OF_TABLES,
    },
    "tabular_resnet": {"layers": 2, "hidden": 128, "embedding_width": 16, **_OF_TABLES},
}
"""The keys of section model that each kind has, and their defaults. None stands for what the data
or other keys decide."""
MOST_LAYERS = 10_000  # more are a slip, and building them would take minutes
MLP_MULTIPLE = 128  # of the default mlp_width, which tensor-parallel ranks then divide
LANGUAGE_KINDS = ("gpt", "llama", "mistral", "qwen2", "qwen3")
PRETRAINING_DEFAULTS: dict[str, dict[str, Any]] = {
    "none": {},
    "masked_cells": {"corrupted": 0.3},
    "contrast": {"corrupted": 0.3, "together": 32},
}
"""The keys that each value of model.pretraining has besides, and their defaults."""


@dataclass(frozen=True, kw_only=True)
class ModelSection:
    """The model that is trained."""

    kind: Literal[
        "gpt", "llama", "mistral", "qwen2", "qwen3", "tabular", "tabular_mlp", "tabular_resnet"
    ] = "gpt"
    """The architecture of the model. gpt (as GPT-2), llama, mistral, qwen2 and qwen3 are language
    models. The others are for tables: tabular is a transformer whose tokens are the features,
    tabular_mlp an ensemble of MLPs, and tabular_resnet a residual network. Each kind has keys of
    its own, and no other kind takes them."""
    layers: int | None = None
    """Number of blocks. By default it is 6 for language models, 3 for tabular, 1 for tabular_mlp,
    and 2 for tabular_resnet. A block of tabular_mlp has two layers, and there is one more in
    front."""
    hidden: int | None = None
    """Width of the activations between blocks. By default it is 384 for language models, 64 for
    tabular, and 128 for tabular_mlp and tabular_resnet."""
    heads: int | None = None
    """Number of attention heads of language models and tabular. It divides hidden, unless
    head_width is given. By default it is 6 for language models and 4 for tabular."""
    kv_heads: int | None = None
    """Number of heads of keys and values of llama and its relatives (mistral, qwen2, qwen3). It
    divides heads, and heads / kv_heads heads share each. By default it is heads."""
    head_width: int | None = None
    """Channels of each attention head of llama and its relatives, an even number. By default it is
    hidden / heads."""
    mlp_width: int | None = None
    """Channels inside each MLP of llama and its relatives. By default it is 8/3 of hidden, rounded
    up to a multiple of 128."""
    vocab: int | None = None
    """Vocabulary size of language models. By default it is that of the data."""
    sequence: int | None = None
    """Number of tokens per sample of language models. By default it is 256."""
    dropout: float | None = None
    """Share of activations that training drops: for language models after the embedding and in each
    residual branch, for tabular after each attention and inside of each MLP, for the others after
    each layer. By default it is 0 for language models, and 0.1 for the others."""
    tie_embeddings: bool | None = None
    """Whether the output layer of language models shares the token embedding's weights. By default
    it does for gpt only."""
    rope_theta: float | None = None
    """Base of the rotations that stand for positions in llama and its relatives. By default it is
    10000 for llama, and 1000000 for the others."""
    rope_factor: float | None = None
    """How many times slower the slowest of these rotations are, for long texts, as in Llama 3.1. By
    default it is 1, which changes none."""
    norm_eps: float | None = None
    """Number that the norms of llama and its relatives add to the mean square. By default it is
    0.00001, and 0.000001 for qwen2 and qwen3."""
    numeric: Literal["piecewise_linear", "periodic", "linear"] | None = None
    """How models of tables turn numbers into vectors: by the bins between quantiles of the training
    data, by sines and cosines with trained frequencies, or by one linear layer per feature. By
    default it is piecewise_linear."""
    embedding_width: int | None = None
    """Width of each feature's vector in tabular_mlp and tabular_resnet. By default it is 16."""
    members: int | None = None
    """Number of MLPs of tabular_mlp, which share their matrices and whose predictions are averaged.
    By default it is 16. 1 makes one plain MLP."""
    quantiles: list[float] = field(default_factory=list)
    """Quantiles that a regression of a table predicts, as numbers between 0 and 1. By default it
    predicts the mean."""
    pretraining: Literal["none", "masked_cells", "contrast"] | None = None
    """What a model of tables learns in place of the target: to predict cells that are hidden from
    it, or to tell a row's corrupted copy from those of other rows. By default it learns the
    target."""
    corrupted: float | None = None
    """Share of the cells that pretraining hides or replaces. By default it is 0.3."""
    together: int | None = None
    """Number of neighbours in a step's order whose copies are told from each other, with
    model.pretraining contrast. It divides data.micro_batch. By default it is 32."""

    def __post_init__(self) -> None:
        check_kinds(self, "model")
        self._resolve()
        at_least(self, "model", layers=1, hidden=1, heads=1, vocab=1, sequence=1)
        if self.layers is not None and self.layers > MOST_LAYERS:
            raise ConfigError(f"model.layers is {self.layers}", f"give {MOST_LAYERS} or fewer")
        at_least(self, "model", kv_heads=1, head_width=2, mlp_width=1)
        at_least(self, "model", embedding_width=1, members=1, together=2)
        assert self.hidden is not None  # all kinds have it
        assert self.dropout is not None
        if self.heads is not None and self.head_width is None:
            _check_divides("heads", self.heads, "hidden", self.hidden)
        if "kv_heads" in MODEL_DEFAULTS[self.kind]:
            self._resolve_llama()
        if any(not 0 < level < 1 for level in self.quantiles):
            raise ConfigError(
                f"model.quantiles is {self.quantiles}", "give numbers above 0 and below 1"
            )
        if self.quantiles and self.pretraining not in (None, "none"):
            raise ConfigError(
                f"model.quantiles is given, but model.pretraining {self.pretraining} does not "
                "learn the target",
                "leave model.quantiles out",
            )
        if not 0 <= self.dropout < 1:
            raise ConfigError(f"model.dropout is {self.dropout}", "give a number from 0 to below 1")
        if self.corrupted is not None and not 0 < self.corrupted < 1:
            raise ConfigError(
                f"model.corrupted is {self.corrupted}", "give a number above 0 and below 1"
            )

    @property
    def is_language(self) -> bool:
        """Whether it is a language model, which is trained on text."""
        return self.kind in LANGUAGE_KINDS

    def _resolve_llama(self) -> None:
        """Give the sizes that follow from others their values, and check them."""
        assert self.hidden is not None
        assert self.heads is not None
        defaults = {
            "kv_heads": self.heads,
            "head_width": self.hidden // self.heads,
            "mlp_width": -(-8 * self.hidden // (3 * MLP_MULTIPLE)) * MLP_MULTIPLE,
        }
        for key, value in defaults.items():
            if getattr(self, key) is None:
                object.__setattr__(self, key, value)  # the section is frozen
        assert self.kv_heads is not None
        assert self.head_width is not None
        _check_divides("kv_heads", self.kv_heads, "heads", self.heads)
        if self.head_width % 2:
            raise ConfigError(
                f"each head has {self.head_width} channels, an odd number, but rotations take "
                "pairs of channels",
                "give an even model.head_width",
            )
        for key, least in {"rope_theta": 1, "rope_factor": 1, "norm_eps": 0}.items():
            value = getattr(self, key)
            if not least <= value < math.inf:
                raise ConfigError(f"model.{key} is {value}", f"give {least} or more")

    def _resolve(self) -> None:
        """Give keys that were left out their defaults for this kind.

        Raises:
            ConfigError: a key was given that this kind, or its way of training, does not have.
        """
        known = MODEL_DEFAULTS[self.kind] | PRETRAINING_DEFAULTS[self.pretraining or "none"]
        for key in ("corrupted", "together"):
            if getattr(self, key) is not None and known.get(key) is None:
                raise ConfigError(
                    f"model.{key} is given, but model.pretraining is {self.pretraining or 'none'}",
                    f"leave model.{key} out",
                )
        for key in {key for keys in MODEL_DEFAULTS.values() for key in keys}:
            if getattr(self, key) is None:
                object.__setattr__(self, key, known.get(key))  # the section is frozen
            elif key not in known and getattr(self, key) != []:
                raise ConfigError(
                    f"model.{key} is given, but model.kind {self.kind} does not have it",
                    f"leave model.{key} out",
                )


def _check_divides(key: str, value: int, of: str, whole: int) -> None:
    if whole % value:
        raise ConfigError(
            f"model.{key} {value} does not divide model.{of} {whole}",
            f"nearest that do: {_nearest_divisors(whole, value)}",
        )


def _nearest_divisors(number: int, wanted: int) -> str:
    divisors = [d for d in range(1, number + 1) if number % d == 0]
    below = [d for d in divisors if d < wanted][-1:]
    above = [d for d in divisors if d > wanted][:1]
    return ", ".join(str(d) for d in below + above)
