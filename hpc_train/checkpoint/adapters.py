"""Writes the adapters of a checkpoint alone, as PEFT has them (`peft` of Hugging Face)."""

from __future__ import annotations

import json
from pathlib import Path

from torch import Tensor

from hpc_train import files
from hpc_train.checkpoint.export import Conversion, check_absent, write_tensors
from hpc_train.checkpoint.merged import MergedTensors
from hpc_train.checkpoint.optimizer_state import parameter_of
from hpc_train.checkpoint.state import OPTIMIZER
from hpc_train.errors import ConfigError
from hpc_train.models.lora import is_adapter

_REMEDY = "export the whole model: leave out --to, or give --to hf"
FILE, CONFIG = "adapter_model.safetensors", "adapter_config.json"


def export_adapters(path: Path, folder: Path, convert: Conversion, *, transposed: bool) -> int:
    """Write a folder that PEFT opens beside the base model.

    Args:
        path: a checkpoint.
        folder: the folder to make, with `adapter_model.safetensors` and `adapter_config.json`.
        convert: of the names and rows of layers' weights, before these are transposed.
        transposed: whether the base model stores the weights of its layers transposed.

    Returns:
        The number of tensors that were written.

    Raises:
        ConfigError: the model has no adapters, more than adapters was trained, or the folder has
            such a file, or cannot be written.
        CheckpointError: the checkpoint is damaged.
    """
    saved = MergedTensors(path)
    if saved.adapters is None:
        raise ConfigError(f"{path} has no adapters", _REMEDY)
    slots = (name for name in saved.saved.names if name.startswith(OPTIMIZER))
    if others := [n for n in dict.fromkeys(map(parameter_of, slots)) if not is_adapter(n)]:
        raise ConfigError(f"more than adapters was trained in {path}, such as {others[0]}", _REMEDY)
    target = folder / FILE
    check_absent(target, folder / CONFIG)
    tensors: dict[str, Tensor] = {}
    modules = []
    for layer in saved.adapters.layers:
        a, b = saved.adapter(layer)
        for theirs, of_rows in convert(f"{layer}.weight"):
            modules.append(theirs.removesuffix(".weight"))
            tensors[f"base_model.model.{modules[-1]}.lora_A.weight"] = a
            tensors[f"base_model.model.{modules[-1]}.lora_B.weight"] = of_rows(b)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None,
        "r": saved.adapters.rank,
        "lora_alpha": saved.adapters.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": transposed,
        "target_modules": modules,
        "inference_mode": True,
    }
    folder.mkdir(parents=True, exist_ok=True)
    forms = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    write_tensors(forms, iter(tensors.items()), target)
    files.write_text(folder / CONFIG, json.dumps(config, indent=2) + "\n")
    return len(tensors)
