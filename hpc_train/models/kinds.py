"""Maps each value of `model.kind` to the shape of its architecture. A shape builds its module."""

from __future__ import annotations

from hpc_train.models.gpt.shape import GptShape
from hpc_train.models.llama.shape import LlamaShape, MistralShape, Qwen2Shape, Qwen3Shape
from hpc_train.models.shape import Shape
from hpc_train.models.tabular.shape import TabularMlpShape, TabularResnetShape, TabularShape

SHAPES: dict[str, type[Shape]] = {
    "gpt": GptShape,
    "llama": LlamaShape,
    "mistral": MistralShape,
    "qwen2": Qwen2Shape,
    "qwen3": Qwen3Shape,
    "tabular": TabularShape,
    "tabular_mlp": TabularMlpShape,
    "tabular_resnet": TabularResnetShape,
}
