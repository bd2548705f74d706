"""Plain PyTorch modules that know nothing of ranks: a folder for each architecture.

Importing this package does not load torch; `GPT` loads it when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpc_train.models.gpt.module import GPT

__all__ = ["GPT"]


def __getattr__(name: str) -> Any:
    if name != "GPT":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from hpc_train.models.gpt.module import GPT

    return GPT
