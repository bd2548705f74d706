"""`hpc-train checkpoint`: list, verify, diff and export. To list takes no torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from hpc_train import files
from hpc_train.checkpoint import headers
from hpc_train.checkpoint.directory import find, newest
from hpc_train.errors import EXIT_FAILURE, CheckpointError, CheckpointMismatch, ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

SHOWN = 20  # differences, unless all are asked for


def show_list(run: str) -> int:
    """Print the checkpoints of a run directory; no tensor is read."""
    for found in headers.listed(Path(run)):
        complete = "complete" if found.finite else "complete, but with numbers that are not finite"
        size, when = f"{found.nbytes / 2**20:.1f} MiB", f"{found.written:%Y-%m-%d %H:%M}"
        print(f"{found.path.name}  {size:>12}  {when}  {found.damage or complete}")
    return 0


def verify(source: str, *, every: bool) -> int:
    """Read all bytes of a checkpoint, or of every one of a run; returns 1 if any is damaged."""
    path = newest(Path(source))
    if every and not Path(source).is_dir():
        raise ConfigError(f"--all, and {source} is one file", "give a run directory")
    if not every:
        return _verify(path)
    return max([_verify(path, foreign=True) for path in find(path.parent, "auto")])


def _verify(path: Path, *, foreign: bool = False) -> int:
    from hpc_train.checkpoint import tools

    damage = 0
    try:
        for begin, end, names in tools.damaged(path):
            damage = EXIT_FAILURE
            print(f"{path}: bytes {begin} to {end} are not what was saved: {', '.join(names)}")
    except (CheckpointError, CheckpointMismatch) as error:
        if isinstance(error, CheckpointMismatch) and not foreign:
            raise  # it is not what was meant
        damage = EXIT_FAILURE
        print(error)
    if not damage:
        print(f"{path}: sound")
    return damage


def diff(first: str, second: str, *, every: bool) -> int:
    """Print in what two checkpoints differ; returns 1 if they do."""
    from hpc_train.checkpoint import tools

    count = 0
    for difference in tools.differences(newest(Path(first)), newest(Path(second))):
        count += 1
        if every or count <= SHOWN:
            print(f"{difference.name}: {difference.what}")
    if count > SHOWN and not every:
        print(f"and {count - SHOWN} more: --all shows them")
    return EXIT_FAILURE if count else 0


def export(
    source: str,
    out: str,
    include: Sequence[str],
    exclude: Sequence[str],
    dtype: str | None,
    *,
    gpt2: bool,
) -> int:
    """Write the model's tensors alone: to a file, or to a folder for Hugging Face."""
    import torch

    from hpc_train.checkpoint import tools
    from hpc_train.checkpoint.restore import Tensors
    from hpc_train.models.gpt.gpt2 import as_gpt2, config_json

    path, target, convert, shape = newest(Path(source)), Path(out), None, {}
    if gpt2:
        about = Tensors(path).state().get("about", {})
        if about.get("kind") != "gpt":
            raise ConfigError(f"{path} is no GPT of `hpc-train train`", "leave out --to")
        shape, target = about["shape"], target / "model.safetensors"
        target.parent.mkdir(parents=True, exist_ok=True)
        convert = as_gpt2(shape)
    kind = getattr(torch, dtype) if dtype else None
    forms = tools.export(
        path, target, include=include, exclude=exclude, dtype=kind, convert=convert
    )
    if gpt2:
        config = target.with_name("config.json")
        files.write_text(config, json.dumps(config_json(shape), indent=2) + "\n")
    print(f"{out}: {len(forms)} tensors of {path}")
    return 0
