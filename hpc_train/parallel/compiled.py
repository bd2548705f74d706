"""Compiles a model's blocks and losses with torch.compile.

Each block is compiled by itself: blocks that are alike share their code, so the time to compile
does not grow with their number, and hooks between blocks work as before. A loss over a large
vocabulary reads and writes more memory than many blocks, so torch's modules of losses are compiled,
too.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
from torch import nn

from hpc_train.errors import SetupError
from hpc_train.models.dropout import SampleDropout
from hpc_train.parallel.recompute import block_names

VERSIONS = 64  # of a block: for training and validation, for each size of a micro-batch


def compile_blocks(model: nn.Module, device: torch.device) -> None:
    """Let torch.compile make the code of a model's blocks and losses, when each is first used.

    The masks of `SampleDropout` are left out: they would be compiled for each layer anew.

    Args:
        model: the model, whose blocks are those of `recompute`, which may be called afterwards.
        device: where the model will be.

    Raises:
        UserError: the model names no blocks, or a block lies inside another one.
        SetupError: blocks for processors are to be compiled, and there is no C++ compiler.
    """
    from torch import _dynamo  # here, because it takes as long to load as torch itself
    from torch._inductor import config as inductor

    names = block_names(model, "run.compile")
    if device.type == "cpu":
        _check_compiler()
    limit = "recompile_limit" if hasattr(_dynamo.config, "recompile_limit") else "cache_size_limit"
    setattr(_dynamo.config, limit, max(VERSIONS, getattr(_dynamo.config, limit)))
    inductor.fallback_random = True  # so that nn.Dropout draws what it would draw without
    if not hasattr(SampleDropout.dropped, "_torchdynamo_disable"):
        SampleDropout.dropped = torch.compiler.disable(  # type: ignore[method-assign]
            SampleDropout.dropped
        )
    for name in [*names, *_losses_outside(model, names)]:
        module = model.get_submodule(name)
        module.forward = torch.compile(module.forward)


def _losses_outside(model: nn.Module, blocks: Sequence[str]) -> list[str]:
    """The names of torch's modules of losses that are not parts of blocks."""
    inside = tuple(f"{name}." for name in blocks)
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.modules.loss._Loss)
        and name not in blocks
        and not name.startswith(inside)
    ]


def _check_compiler() -> None:
    from torch._inductor import cpp_builder, exc

    try:
        cpp_builder.get_cpp_compiler()
    except (exc.InvalidCxxCompiler, OSError):
        raise SetupError(
            f"run.compile is true, and there is no C++ compiler ({os.environ.get('CXX', 'g++')})",
            "load a module that has one, let the variable CXX name it, or leave run.compile out",
        ) from None
