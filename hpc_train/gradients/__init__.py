"""Gradient averaging over the ranks that share the work of a batch."""

from hpc_train.gradients.averager import GradientAverager, average_gradients

__all__ = ["GradientAverager", "average_gradients"]
