"""Gradient averaging over the ranks that share the work of a batch."""

from hpc_train.gradients.averager import GradientAverager, average_gradients
from hpc_train.gradients.scaling import LossScaler

__all__ = ["GradientAverager", "LossScaler", "average_gradients"]
