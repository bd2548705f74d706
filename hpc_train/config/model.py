"""The section `model` of the configuration: the keys of each kind of model, and their defaults."""

from __future__ import annotations

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
MODEL_DEFAULTS: dict[str, dict[str, Any]] = {
    "gpt": {
        "layers": 6,
        "hidden": 384,
        "heads": 6,
        "vocab": None,
        "sequence": 256,
        "dropout": 0.0,
        "tie_embeddings": True,
    },
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
PRETRAINING_DEFAULTS: dict[str, dict[str, Any]] = {
    "none": {},
    "masked_cells": {"corrupted": 0.3},
    "contrast": {"corrupted": 0.3, "together": 32},
}
"""The keys that each value of model.pretraining has besides, and their defaults."""


@dataclass(frozen=True, kw_only=True)
class ModelSection:
    """The model that is trained."""

    kind: Literal["gpt", "tabular", "tabular_mlp", "tabular_resnet"] = "gpt"
    """The architecture of the model. gpt is for text. The others are for tables: tabular is a
    transformer whose tokens are the features, tabular_mlp an ensemble of MLPs, and tabular_resnet a
    residual network. Each kind has keys of its own, and no other kind takes them."""
    layers: int | None = None
    """Number of blocks. By default it is 6 for gpt, 3 for tabular, 1 for tabular_mlp, and 2 for
    tabular_resnet. A block of tabular_mlp has two layers, and there is one more in front."""
    hidden: int | None = None
    """Width of the activations between blocks. By default it is 384 for gpt, 64 for tabular, and
    128 for tabular_mlp and tabular_resnet."""
    heads: int | None = None
    """Number of attention heads of gpt and tabular. It divides hidden. By default it is 6 for gpt
    and 4 for tabular."""
    vocab: int | None = None
    """Vocabulary size of gpt. By default it is that of the data."""
    sequence: int | None = None
    """Number of tokens per sample of gpt. By default it is 256."""
    dropout: float | None = None
    """Share of activations that training drops: for gpt after the embedding and in each residual
    branch, for tabular after each attention and inside of each MLP, for the others after each
    layer. By default it is 0 for gpt, and 0.1 for the others."""
    tie_embeddings: bool | None = None
    """Whether the output layer of gpt shares the token embedding's weights. By default it does."""
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
        at_least(self, "model", embedding_width=1, members=1, together=2)
        assert self.hidden is not None  # all kinds have it
        assert self.dropout is not None
        if self.heads is not None and self.hidden % self.heads:
            near = _nearest_divisors(self.hidden, self.heads)
            raise ConfigError(
                f"model.heads {self.heads} does not divide model.hidden {self.hidden}",
                f"nearest that do: {near}",
            )
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


def _nearest_divisors(number: int, wanted: int) -> str:
    divisors = [d for d in range(1, number + 1) if number % d == 0]
    below = [d for d in divisors if d < wanted][-1:]
    above = [d for d in divisors if d > wanted][:1]
    return ", ".join(str(d) for d in below + above)
