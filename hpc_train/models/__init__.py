"""Plain PyTorch modules that know nothing of ranks."""

from hpc_train.models.gpt import GPT

__all__ = ["GPT"]
