"""`hpc-train checkpoint list | verify | diff | export`, in one process. Listing loads no torch."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from hpc_train import files
from hpc_train.cli.verb import Parser
from hpc_train.errors import (
    EXIT_FAILURE,
    CheckpointError,
    CheckpointMismatch,
    ConfigError,
    UserError,
    print_line,
    size_text,
    some_of,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hpc_train.checkpoint.export import Conversion

_NAMES_SHOWN = 5
DIFFERENCES_SHOWN = 20  # differences shown without --all
# Options of `export` that would leave another program too little, by the value of --to.
NOT_WITH = {
    "peft": ("include", "exclude", "dtype"),
    "hf": ("include", "exclude"),
    "gpt2": ("include", "exclude"),
}


def options() -> Parser:
    """The options of the verb."""
    made = Parser("hpc-train checkpoint", description="Look into checkpoints, in one process.")
    made.lists = "actions"
    actions = made.add_subparsers(title="actions", dest="action", metavar="ACTION", required=True)
    source = "a checkpoint file, or a run directory for its newest checkpoint"
    several = actions.add_parser(
        "list",
        help="list the checkpoints of a run",
        description="List the checkpoints of a run, the newest first. A checkpoint of a step with "
        "a validation has the validation loss. If several have one, the lowest is the best.",
    )
    several.add_argument("run", metavar="RUN", help="a run directory")
    verify = actions.add_parser(
        "verify",
        help="check that a checkpoint is what was saved",
        description="Read every byte of a checkpoint. The exit code is 1 if any is damaged.",
    )
    verify.add_argument("checkpoint", help=source)
    verify.add_argument(
        "--all", action="store_true", help="check every checkpoint of a run directory"
    )
    diff = actions.add_parser(
        "diff",
        help="show how two checkpoints differ",
        description="Compare two checkpoints. The exit code is 1 if they differ.",
    )
    diff.add_argument("first", help=source)
    diff.add_argument("second", help=source)
    diff.add_argument("--all", action="store_true", help="show all differences")
    export = actions.add_parser(
        "export",
        help="write the model for other programs: as safetensors, as a torch state dict, for "
        "transformers, or its adapters for PEFT",
        description="Write the model's tensors alone.",
    )
    export.add_argument("checkpoint", help=source)
    export.add_argument(
        "--out", required=True, metavar="FILE", help=".safetensors or .pt; a folder with --to"
    )
    patterns: dict[str, Any] = {"nargs": "+", "default": [], "metavar": "PATTERN"}
    export.add_argument("--include", help="patterns of the names to write", **patterns)
    export.add_argument("--exclude", help="patterns of the names to leave out", **patterns)
    export.add_argument(
        "--dtype",
        choices=("float64", "float32", "float16", "bfloat16"),
        help="the type that floating-point tensors are converted to",
    )
    export.add_argument(
        "--to",
        choices=("hf", "gpt2", "peft"),
        help="write a folder that transformers opens as a model of its own (hf; gpt2 takes a model "
        "of kind gpt only), or one with the adapters of LoRA alone, which PEFT opens beside that "
        "model (peft)",
    )
    return made


def run(arguments: Sequence[str]) -> int:
    """Run the verb; returns the exit code."""
    given = options().parse_args(arguments)
    if given.action == "list":
        return show_list(given.run)
    if given.action == "verify":
        return verify_checkpoints(given.checkpoint, every=given.all)
    if given.action == "diff":
        return diff(given.first, given.second, every=given.all)
    for key in NOT_WITH.get(given.to, ()):
        if getattr(given, key):
            raise ConfigError(f"--{key} is given with --to {given.to}", f"leave out --{key}")
    if given.to == "peft":
        return export_to_peft(given.checkpoint, given.out)
    patterns = given.include, given.exclude
    return export(given.checkpoint, given.out, *patterns, given.dtype, to=given.to)


def show_list(run: str) -> int:
    """Print the checkpoints of a run directory; no tensor is read."""
    from hpc_train.checkpoint.catalogue import listed

    every = listed(Path(run))
    losses = {found.path: found.loss for found in every if found.loss is not None}
    # A single one is not compared with any. Of equal ones the newest is the best.
    best = min(losses, key=losses.__getitem__) if len(losses) > 1 else None
    for found in every:
        complete = "complete" if found.finite else "complete, but with numbers that are not finite"
        size, when = size_text(found.nbytes), f"{found.written:%Y-%m-%d %H:%M}"
        loss = f"  validation loss {found.loss:.5g}" if found.path in losses else ""
        mark = "  best" if found.path == best else ""
        print(f"{found.path.name}  {size:>12}  {when}  {found.damage or complete}{loss}{mark}")
    return 0


def verify_checkpoints(source: str, *, every: bool) -> int:
    """Read all bytes of a checkpoint, or of all those of a run; returns 1 if any is damaged."""
    from hpc_train.checkpoint.catalogue import find_checkpoints, newest

    path = newest(Path(source))
    if every and not Path(source).is_dir():
        raise ConfigError(f"--all is given, but {source} is one file", "give a run directory")
    if not every:
        return _verify(path)
    return max([_verify(path, foreign=True) for path in find_checkpoints(path.parent, "auto")])


def _verify(path: Path, *, foreign: bool = False) -> int:
    """Verify one file. With `foreign` it may be another program's, or be removed meanwhile."""
    from hpc_train.checkpoint import inspection

    damage = 0
    try:
        for begin, end, names in inspection.damaged(path):
            damage = EXIT_FAILURE
            shown = some_of(names, _NAMES_SHOWN)
            print(f"{path}: bytes {begin} to {end} are not what was saved: {shown}")
    except (CheckpointError, CheckpointMismatch) as error:
        if isinstance(error, CheckpointMismatch) and not foreign:
            raise  # the user named a file that is no checkpoint of ours
        if foreign and not path.exists():
            print(f"{path}: removed meanwhile, as newer checkpoints are kept")
            return 0
        damage = EXIT_FAILURE
        print(error)
    if not damage:
        print(f"{path}: sound")
    return damage


def diff(first: str, second: str, *, every: bool) -> int:
    """Print how two checkpoints differ; returns 1 if they do."""
    from hpc_train.checkpoint import inspection
    from hpc_train.checkpoint.catalogue import newest

    count = 0
    for difference in inspection.differences(newest(Path(first)), newest(Path(second))):
        count += 1
        if every or count <= DIFFERENCES_SHOWN:
            print(f"{difference.name}: {difference.what}")
    if count > DIFFERENCES_SHOWN and not every:
        print(f"and {count - DIFFERENCES_SHOWN} more: --all shows them")
    return EXIT_FAILURE if count else 0


def export(
    source: str,
    out: str,
    include: Sequence[str],
    exclude: Sequence[str],
    dtype: str | None,
    *,
    to: str | None,
) -> int:
    """Write the model's tensors alone: to a file, or to a folder for Hugging Face."""
    import torch

    from hpc_train.checkpoint.catalogue import newest
    from hpc_train.checkpoint.export import check_absent, export_model
    from hpc_train.checkpoint.weight_sources import INDEX, ONE_FILE

    path, target, model = newest(Path(source)), Path(out), None
    if to is not None:
        model, target = _hugging_face(path, to), target / ONE_FILE
        check_absent(target, *(target.with_name(name) for name in (INDEX, "config.json")))
        target.parent.mkdir(parents=True, exist_ok=True)
    kind = getattr(torch, dtype) if dtype else None
    convert = model.tensors if model else None
    forms = export_model(
        path, target, include=include, exclude=exclude, dtype=kind, convert=convert
    )
    if model:
        config = target.with_name("config.json")
        files.write_text(config, json.dumps(model.config, indent=2) + "\n")
    print(f"{out}: {len(forms)} tensors of {path}")
    return 0


def export_to_peft(source: str, out: str) -> int:
    """Write a model's adapters alone, to a folder for PEFT."""
    from hpc_train.checkpoint.adapters import export_adapters
    from hpc_train.checkpoint.catalogue import newest

    path = newest(Path(source))
    model = _hugging_face(path, "peft")
    count = export_adapters(path, Path(out), model.rows, transposed=model.transposed)
    print(f"{out}: {count} tensors of {path}")
    return 0


class _HuggingFace(NamedTuple):
    """What a checkpoint's model is in Hugging Face's library.

    Args:
        tensors: names and conversions of its tensors.
        rows: the same, but weights are not transposed.
        config: the content of `config.json`.
        transposed: whether weights are stored transposed.
    """

    tensors: Conversion
    rows: Conversion
    config: dict[str, Any]
    transposed: bool


def _hugging_face(path: Path, to: str) -> _HuggingFace:
    """Find what a checkpoint's model is there.

    Raises:
        ConfigError: it is not a language model, or not a GPT although `to` is gpt2.
    """
    from hpc_train.checkpoint.restore import Tensors
    from hpc_train.models.gpt import gpt2
    from hpc_train.models.llama import hugging_face

    about = Tensors(path).state().get("about", {})
    kind, sizes = about.get("kind"), about.get("shape", {})
    if kind == "gpt":
        both = gpt2.as_gpt2(sizes), gpt2.rows_as_gpt2(sizes)
        config = gpt2.gpt2_config(sizes) | _special_tokens(about)
        return _HuggingFace(*both, config, transposed=True)
    if kind not in hugging_face.ARCHITECTURES:
        raise ConfigError(f"{path} is not a language model of `hpc-train train`", "leave out --to")
    if to == "gpt2":
        raise ConfigError(f"{path} is not a GPT: its model.kind is {kind}", "give --to hf")
    names = hugging_face.converted_names(sizes)
    config = hugging_face.llama_config(kind, sizes) | _special_tokens(about)
    return _HuggingFace(names, names, config, transposed=False)


def _special_tokens(about: Mapping[str, Any]) -> dict[str, int | None]:
    """The tokens before and behind each text of the training, as a `config.json` has them."""
    from hpc_train.data import tokenizer

    try:
        codec = tokenizer.loads(tokenizer.as_recorded(about["tokenizer"], about["shape"]["vocab"]))
    except UserError as error:
        print_line(f"warning: config.json names no special tokens: {error}", sys.stderr)
        return {}
    return {
        "bos_token_id": codec.front[0] if len(codec.front) == 1 else None,
        "eos_token_id": codec.separator,
    }
