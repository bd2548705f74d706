"""Plain PyTorch modules that know nothing of ranks. Each architecture has a folder.

Importing this package does not load torch. The first use of a model does.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpc_train.models.gpt.module import GPT
    from hpc_train.models.llama.module import Llama
    from hpc_train.models.tabular.module import TabularMlp, TabularResnet
    from hpc_train.models.tabular.transformer import TabularTransformer

_HOMES = {
    "GPT": "gpt.module",
    "Llama": "llama.module",
    "TabularMlp": "tabular.module",
    "TabularResnet": "tabular.module",
    "TabularTransformer": "tabular.transformer",
}
__all__ = ["GPT", "Llama", "TabularMlp", "TabularResnet", "TabularTransformer"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"hpc_train.models.{_HOMES[name]}"), name)
