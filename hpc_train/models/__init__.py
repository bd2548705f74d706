"""Plain PyTorch modules that know nothing of ranks. Each architecture has a folder.

Importing this package does not load torch. The first use of `GPT` does.
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
