"""Maps each value of `model.kind` to the shape of its architecture. A shape builds its module."""

from __future__ import annotations

from hpc_train.models.gpt.shape import GptShape
from hpc_train.models.shape import Shape

SHAPES: dict[str, type[Shape]] = {
    "gpt": GptShape,
}
