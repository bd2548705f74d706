"""The section that says which parameters of a trained model are trained further."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from hpc_train.config.spread import at_least
from hpc_train.errors import ConfigError, check_kinds


@dataclass(frozen=True, kw_only=True)
class FinetuneSection:
    """Which parameters are trained, if not all. The run starts from checkpoint.weights."""

    lora: int = 0
    """Rank of the adapters that are trained beside linear layers (LoRA). 0 adds no adapters."""
    alpha: float | None = None
    """The results of an adapter are multiplied by alpha / lora. By default alpha is lora."""
    lora_layers: list[str] = field(default_factory=list)
    """Shell patterns of the names of the linear layers that get adapters. By default all those
    between the model's first stage and its head do."""
    head: bool = False
    """Whether the model's head, the last of its stages, is trained. A weight that it shares with
    the embedding is trained in both."""
    patterns: list[str] = field(default_factory=list)
    """Shell patterns of the names of parameters that are trained besides. By default none are, but
    without lora, head and patterns all parameters are."""

    def __post_init__(self) -> None:
        check_kinds(self, "finetune")
        at_least(self, "finetune", lora=0)
        for key, given in (("alpha", self.alpha is not None), ("lora_layers", self.lora_layers)):
            if given and not self.lora:
                raise ConfigError(
                    f"finetune.{key} is given, but finetune.lora is 0",
                    f"give finetune.lora a rank, such as 8, or leave finetune.{key} out",
                )
        if self.alpha is not None and not 0 < self.alpha < math.inf:
            raise ConfigError(f"finetune.alpha is {self.alpha}", "give a finite number above 0")

    @property
    def active(self) -> bool:
        """Whether only some of the model's parameters are trained."""
        return bool(self.lora or self.head or self.patterns)
