"""The configuration: one frozen dataclass per section, and the way from YAML and options to them.

A part takes its own section, never the whole. Values are checked where they are made, so that a
configuration that exists is sound by itself; what depends on the number of ranks or on the data
is checked by the part that knows them.
"""

from __future__ import annotations

import difflib
import math
import re
from argparse import ArgumentError
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import yaml

from hpc_train.errors import ConfigError

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser

DESCRIPTION = "Train a model; a YAML file, then --section.key options, which win over it."

# Keys and values of the design whose parts do not exist yet: refused by name, never ignored.
NOT_BUILT = frozenset(
    [
        "gradients.two_level",
        "gradients.compression",
        "gradients.average_every",
        "memory.zero",
        "memory.offload",
        "memory.recompute",
        "checkpoint.background",
        "checkpoint.verify",
    ]
)
VALUES_NOT_BUILT = {
    "run.time_limit": ("auto",),
    "model.kind": ("tabular",),
    "precision.dtype": ("bfloat16", "float16"),
}


def _at_least(section: object, name: str, **limits: float | None) -> None:
    for key, limit in limits.items():
        value = getattr(section, key)
        if value is not None and limit is not None and not limit <= value < math.inf:
            raise ConfigError(f"{name}.{key} is {value}", f"give {limit} or more")


@dataclass(frozen=True, kw_only=True)
class RunSection:
    """What to run, for how long, and where it is written."""

    dir: str = "runs/run"
    """Run directory: configuration, metrics, logs and checkpoints; the same line goes on there."""
    seed: int = 0
    """Seed of the initial weights, the sample order and the dropout."""
    steps: int | None = None
    """Optimizer steps in all, earlier starts of the same run included."""
    epochs: int | None = None
    """Passes over the training data, in place of steps."""
    log_every: int = 10
    """Steps between two records of metrics.jsonl."""
    deterministic: bool = False
    """The same layout gives the same bits."""
    time_limit: str | int | None = None
    """Stop with a checkpoint before so much time: seconds or HH:MM:SS since the program's start."""
    hang_timeout: float = 1800.0
    """Seconds that a rank waits for another before the job ends with an error; 0: for ever."""

    def __post_init__(self) -> None:
        _at_least(self, "run", seed=0, steps=1, epochs=1, log_every=1, hang_timeout=0)
        if self.seed >= 1 << 63:
            raise ConfigError(f"run.seed is {self.seed}", "give one below 2**63")
        if self.steps is not None and self.epochs is not None:
            raise ConfigError("run.steps and run.epochs are both given", "give one of them")
        self.time_limit_seconds()

    def time_limit_seconds(self) -> int | None:
        """The time limit in seconds.

        Raises:
            ConfigError: it is neither seconds nor HH:MM:SS.
        """
        if self.time_limit is None:
            return None
        text = str(self.time_limit)
        if not re.fullmatch(r"\d+|\d+:[0-5]?\d:[0-5]?\d", text):
            raise ConfigError(f"run.time_limit is {text!r}", "give seconds or HH:MM:SS")
        *hours_minutes, seconds = (int(part) for part in text.split(":"))
        hours, minutes = hours_minutes or (0, 0)
        return hours * 3600 + minutes * 60 + seconds


@dataclass(frozen=True, kw_only=True)
class ModelSection:
    """The model that is trained."""

    kind: Literal["gpt"] = "gpt"
    """The architecture of the model."""
    layers: int = 6
    """Transformer blocks."""
    hidden: int = 384
    """Width of the residual stream."""
    heads: int = 6
    """Attention heads; they divide the width."""
    vocab: int | None = None
    """Vocabulary size; by default the data's."""
    sequence: int = 256
    """Tokens per sample."""
    dropout: float = 0.0
    """Share of activations dropped in training, after the embedding and in each residual branch."""
    tie_embeddings: bool = True
    """The output layer shares the token embedding's weights."""

    def __post_init__(self) -> None:
        _at_least(self, "model", layers=1, hidden=1, heads=1, vocab=1, sequence=1)
        if self.hidden % self.heads:
            near = _nearest_divisors(self.hidden, self.heads)
            raise ConfigError(
                f"model.heads {self.heads} does not divide model.hidden {self.hidden}",
                f"nearest that do: {near}",
            )
        if not 0 <= self.dropout < 1:
            raise ConfigError(f"model.dropout is {self.dropout}", "give a number from 0 to below 1")


@dataclass(frozen=True, kw_only=True)
class DataSection:
    """The training data and how it is cut into batches."""

    path: str | None = None
    """Folder that `hpc-train prepare` wrote."""
    batch: int = 32
    """Samples per optimizer step over the whole job."""
    micro_batch: int | None = None
    """Samples that a rank computes at a time; by default batch / parallel.dp."""
    shuffle: bool = True
    """A new order of the samples in every epoch, the same on every layout."""
    validation_every: int = 0
    """Steps between two passes over the held-out split; 0: only at the end."""
    prefetch: int = 2
    """Batches read ahead by a thread; 0 reads them in the step itself."""

    def __post_init__(self) -> None:
        _at_least(self, "data", batch=1, micro_batch=1, validation_every=0, prefetch=0)


@dataclass(frozen=True, kw_only=True)
class ParallelSection:
    """How the ranks are laid out: data x tensor x pipeline parallel."""

    dp: int | None = None
    """Data-parallel size; by default what tp and pp leave of the ranks."""
    tp: int = 1
    """Tensor-parallel size: ranks that share each layer; it divides heads and vocabulary."""
    pp: int = 1
    """Pipeline-parallel size: ranks that the layers are divided over."""
    schedule: Literal["gpipe", "1f1b", "interleaved", "zero_bubble"] = "1f1b"
    """In which order a pipeline's stages compute their micro-batches."""
    virtual_stages: int | None = None
    """Runs of layers per rank for schedule interleaved; by default 2 there, else 1."""
    sequence_parallel: bool = False
    """Between the layers that tp shares, each of its ranks holds its part of the tokens only."""

    def __post_init__(self) -> None:
        _at_least(self, "parallel", dp=1, tp=1, pp=1, virtual_stages=1)
        if self.schedule != "interleaved" and (self.virtual_stages or 1) > 1:
            raise ConfigError(
                f"parallel.virtual_stages is {self.virtual_stages}, the schedule {self.schedule}",
                "use --parallel.schedule interleaved, or leave virtual_stages out",
            )
        if self.sequence_parallel and self.tp == 1:
            raise ConfigError(
                "parallel.sequence_parallel is on, but parallel.tp is 1",
                "set parallel.tp, or leave it off",
            )

    @property
    def chunks(self) -> int:
        """Runs of layers that each pipeline rank has."""
        return self.virtual_stages or (2 if self.schedule == "interleaved" else 1)


@dataclass(frozen=True, kw_only=True)
class GradientsSection:
    """How gradients are averaged over the ranks."""

    engine: Literal["auto", "horovod", "mpi"] = "auto"
    """horovod: DistributedOptimizer; mpi: flat buckets over mpi4py; auto: docs/reference."""
    bucket_mb: float = 4.0
    """Size of the flat buckets of engine mpi, in MiB."""

    def __post_init__(self) -> None:
        if not 0 < self.bucket_mb < math.inf:
            raise ConfigError(f"gradients.bucket_mb is {self.bucket_mb}", "give a size above 0")


@dataclass(frozen=True, kw_only=True)
class OptimizerSection:
    """The optimizer and its learning rate over time."""

    name: Literal["adamw", "sgd"] = "adamw"
    """adamw has betas 0.9 and 0.95; sgd has momentum 0.9."""
    lr: float = 3e-4
    """Peak learning rate, before lr_scaling."""
    lr_scaling: Literal["none", "linear", "sqrt"] = "none"
    """Multiply lr by 1, by the data-parallel size, or by its square root."""
    warmup_steps: int = 0
    """Steps over which the rate rises from 0 in equal parts."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """The rate after warm-up: constant, or falling to 0 at the last step."""
    weight_decay: float = 0.0
    """Decoupled for adamw; applied to tensors of two or more dimensions."""
    clip_norm: float = 0.0
    """Largest global norm of the averaged gradient; 0 is off."""

    def __post_init__(self) -> None:
        _at_least(self, "optimizer", lr=0, warmup_steps=0, weight_decay=0, clip_norm=0)


@dataclass(frozen=True, kw_only=True)
class PrecisionSection:
    """Number formats."""

    dtype: Literal["float32", "float64"] = "float32"
    """Number format of parameters, activations and gradients."""


@dataclass(frozen=True, kw_only=True)
class CheckpointSection:
    """When the state is saved, how much of it is kept, and where a run starts from."""

    every: int = 1000
    """Steps between two checkpoints; one more is written at the end and at an early stop."""
    keep: int = 3
    """Newest checkpoints that are kept; 0 keeps all."""
    engine: Literal["auto", "mpiio", "posix"] = "auto"
    """How ranks write the one file; auto: mpiio under MPI, posix in a process alone."""
    resume: str = "auto"
    """auto: the newest checkpoint of run.dir; none: from the beginning; or a file to start from."""

    def __post_init__(self) -> None:
        _at_least(self, "checkpoint", every=1, keep=0)


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """The whole configuration of a run."""

    run: RunSection = field(default_factory=RunSection)
    model: ModelSection = field(default_factory=ModelSection)
    data: DataSection = field(default_factory=DataSection)
    parallel: ParallelSection = field(default_factory=ParallelSection)
    gradients: GradientsSection = field(default_factory=GradientsSection)
    optimizer: OptimizerSection = field(default_factory=OptimizerSection)
    precision: PrecisionSection = field(default_factory=PrecisionSection)
    checkpoint: CheckpointSection = field(default_factory=CheckpointSection)

    def to_yaml(self) -> str:
        """The configuration as YAML; `load` reads it back to an equal one."""
        return yaml.safe_dump(asdict(self), sort_keys=False)


SECTIONS: dict[str, Any] = {section.name: section.default_factory for section in fields(RunConfig)}
KEYS = {f"{name}.{key.name}": key for name, section in SECTIONS.items() for key in fields(section)}


def _nearest_divisors(number: int, wanted: int) -> str:
    divisors = [d for d in range(1, number + 1) if number % d == 0]
    below = [d for d in divisors if d < wanted][-1:]
    above = [d for d in divisors if d > wanted][:1]
    return ", ".join(str(d) for d in below + above)


def check_key(key: str, value: object = None) -> None:
    """Refuse a key that does not exist, or that stands for a part that is not built yet.

    Args:
        key: dotted, such as "run.steps".
        value: what it is to be set to, to refuse values that are not built yet.

    Raises:
        ConfigError: naming the nearest right key.
    """
    if key in NOT_BUILT:
        raise ConfigError(f"{key}: this part of hpc_train is not built yet", "leave the key out")
    if key not in KEYS:
        raise ConfigError(f"unknown key {key}", _suggestion(key))
    if value in VALUES_NOT_BUILT.get(key, ()):
        raise ConfigError(f"{key}: {value} is not built yet", f"it takes {_expected(key)}")


def _suggestion(key: str) -> str:
    section, _, name = key.rpartition(".")
    within = [known.name for known in fields(SECTIONS[section])] if section in SECTIONS else []
    near = [f"{section}.{match}" for match in difflib.get_close_matches(name, within, n=1)]
    near += [known for known in KEYS if known.endswith(f".{name}")]
    near += difflib.get_close_matches(key, KEYS, n=1, cutoff=0.8)
    if near:
        return f"did you mean {near[0]}?"
    if within:
        return f"{section} has {', '.join(within)}"
    return f"the sections are {', '.join(SECTIONS)}"


def _expected(key: str) -> str:
    kind = str(KEYS[key].type)
    choices = re.findall(r"'(\w+)'", kind) if kind.startswith("Literal") else []
    return f"one of {', '.join(choices)}" if choices else kind.replace(" | None", "")


def check_file(path: Path) -> None:
    """Check that a file holds sections of known keys; their values are checked by `load`.

    Raises:
        ConfigError: the file cannot be read, is not such a file, or has an unknown key.
    """
    try:
        tree = yaml.safe_load(path.read_text()) or {}
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}", "give the path of a YAML file") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} is not a configuration", "start it with a section, such as run:")
    for section, keys in tree.items():
        if not isinstance(keys, dict):
            if section in SECTIONS:
                raise ConfigError(
                    f"{path}: section {section} is {keys!r}", "write its keys below it"
                )
            check_key(str(section))
            continue
        for key, value in keys.items():
            check_key(f"{section}.{key}", value)


def check_options(options: Sequence[str]) -> None:
    """Check the names of dotted command-line options, --section.key VALUE or --section.key=VALUE.

    Raises:
        ConfigError: an unknown key.
    """
    for option, following in zip(options, [*options, ""][1:], strict=True):
        name, equals, value = option.partition("=")
        if name.startswith("--") and "." in name:
            check_key(name[2:], value if equals else following)


def parser() -> ArgumentParser:
    """The command-line parser of a run's configuration, made from the dataclasses."""
    from jsonargparse import ArgumentParser, set_parsing_settings  # not for users' own loops

    set_parsing_settings(docstring_parse_attribute_docstrings=True)
    made = ArgumentParser(prog="hpc-train train", exit_on_error=False, description=DESCRIPTION)
    made.add_argument("--config", action="config", help="the same as the positional CONFIG")
    for name, section in SECTIONS.items():
        made.add_argument(f"--{name}", type=section, default=section())
    return made


def load(path: str | Path | None = None, options: Sequence[str] = ()) -> RunConfig:
    """Make a configuration from a YAML file and dotted options, which win over the file.

    Args:
        path: the file; without one, the defaults.
        options: as on the command line: ["--run.steps", "100", "--model.layers=2"].

    Raises:
        ConfigError: a key or value is wrong; the message names it.
    """
    if path is not None:
        check_file(Path(path))
    check_options(options)
    try:
        parsed = parser().parse_args([*(["--config", str(path)] if path else []), *options])
    except ArgumentError as error:
        raise _explained(str(error)) from None
    tree = parsed.as_dict()
    return RunConfig(**{name: make(**tree[name]) for name, make in SECTIONS.items()})


def _explained(message: str) -> ConfigError:
    """Turn the parser's message into one line that names the key, its value and what it takes."""
    line = " ".join(message.split())
    found = re.match(r'Parser key "([\w.]+)":.* (?:Got|Given) value: (.*)', line)
    if found and found[1] in KEYS:
        return ConfigError(f"{found[1]} is {found[2]!r}", f"it takes {_expected(found[1])}")
    return ConfigError(line, "`hpc-train train --help` lists the options")
