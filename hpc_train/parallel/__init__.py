"""Tensor, sequence and pipeline parallelism: how a model is spread over ranks."""
