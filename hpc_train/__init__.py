"""Train PyTorch models on HPC clusters over MPI and Horovod.

Importing this package loads neither torch nor MPI; its names do so when they are first used.
"""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpc_train.config import GradientsSection as GradientsSection
    from hpc_train.config import MemorySection as MemorySection
    from hpc_train.config import RunConfig as RunConfig
    from hpc_train.config.file import load as load_config  # noqa: F401  # under another name
    from hpc_train.data.fork_server import start_workers as start_workers
    from hpc_train.job.program import run as run
    from hpc_train.mpi.runtime import Runtime as Runtime
    from hpc_train.training.loop import Loop as Loop
    from hpc_train.training.options import LoopOptions as LoopOptions
    from hpc_train.training.scoring import HeldOutScores as HeldOutScores
    from hpc_train.training.task import TrainingTask as TrainingTask
    from hpc_train.training.trainer import Trainer as Trainer

__version__ = "0.1.0"
_HOMES = {
    "GradientsSection": ("hpc_train.config", "GradientsSection"),
    "HeldOutScores": ("hpc_train.training.scoring", "HeldOutScores"),
    "MemorySection": ("hpc_train.config", "MemorySection"),
    "Loop": ("hpc_train.training.loop", "Loop"),
    "LoopOptions": ("hpc_train.training.options", "LoopOptions"),
    "RunConfig": ("hpc_train.config", "RunConfig"),
    "Runtime": ("hpc_train.mpi.runtime", "Runtime"),
    "Trainer": ("hpc_train.training.trainer", "Trainer"),
    "TrainingTask": ("hpc_train.training.task", "TrainingTask"),
    "load_config": ("hpc_train.config.file", "load"),
    "run": ("hpc_train.job.program", "run"),
    "start_workers": ("hpc_train.data.fork_server", "start_workers"),
}
__all__ = [*_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        # `import hpc_train` is enough for hpc_train.data.Mixture, whatever was imported before.
        if not name.startswith("_") and find_spec(f"{__name__}.{name}"):
            return importlib.import_module(f"{__name__}.{name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, attribute = _HOMES[name]
    return getattr(importlib.import_module(module), attribute)
