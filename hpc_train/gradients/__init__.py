"""Gradient averaging over the ranks that share the work of a batch."""

from hpc_train.gradients.averager import GradientAverager, average_gradients
from hpc_train.gradients.options import AveragingOptions
from hpc_train.gradients.scaling import LossScaler

__all__ = ["AveragingOptions", "GradientAverager", "LossScaler", "average_gradients"]
