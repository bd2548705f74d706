"""The configuration: one frozen dataclass per section.

`file.py` makes them from YAML and options. Each part of the package takes its own section, never
the whole. A section checks its values when it is made, so every configuration that exists is valid
by itself. What depends on the number of ranks or on the data is checked by the part that knows it.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import yaml

from hpc_train.config.durations import TIME_FORMS, parse_duration
from hpc_train.config.finetune import FinetuneSection
from hpc_train.config.mixture import FORM as MIXTURE_FORM
from hpc_train.config.mixture import check_mixture
from hpc_train.config.spread import GradientsSection, MemorySection, ParallelSection, at_least
from hpc_train.config.together import check_together
from hpc_train.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class RunSection:
    """What to run, for how long, and where to write."""

    dir: str = "runs/run"
    """Run directory, with the configuration, metrics, logs and checkpoints. The same command
    resumes the run there. In this path and all others, ~ and variables such as $SCRATCH are
    expanded."""
    seed: int = 0
    """Seed of the initial weights, the sample order and the dropout."""
    steps: int | None = None
    """Number of optimizer steps, including those of earlier starts of the same run. By default
    it follows from epochs."""
    epochs: int | None = None
    """Number of passes over the training data. By default it follows from steps. Every training
    needs one of the two."""
    log_every: int = 10
    """Number of steps between two records of metrics.jsonl."""
    deterministic: bool = False
    """Make repeated runs of one layout give the same bits."""
    time_limit: str | int | None = "auto"
    """Time after the program's start, in seconds, as HH:MM:SS, as D-HH:MM:SS or as 1h30m. The
    program stops with a checkpoint before it is over. With auto it stops before the end of its
    SLURM or PBS job, if it is in one."""
    end_margin: float | None = None
    """With time_limit auto, seconds before the end of the job at which training and checkpoint are
    finished. MPI, the launcher and the script end in them. By default it is 8, and 0.01 more for
    each rank."""
    hang_timeout: float = 1800.0
    """Seconds that a rank waits for another before the job ends with an error. 0 disables the
    limit."""
    hang_steps: int = 20
    """The same limit inside a step, as a multiple of the longest step so far, but at least 60 s. 0
    disables it."""
    nonfinite: Literal["stop", "warn"] = "stop"
    """What happens when a loss, a gradient's norm or a trained parameter is infinite or not a
    number. stop ends the run before the step is taken, or before a checkpoint of it is written.
    warn continues. A step that the loss scale skips does not count."""
    preflight: bool = True
    """Whether to check ranks and hosts before the first step: versions, clocks, memory, the run
    directory, slow ranks and slow links. It takes a second or two."""

    def __post_init__(self) -> None:
        at_least(self, "run", seed=0, steps=1, epochs=1, log_every=1)
        at_least(self, "run", end_margin=0, hang_timeout=0, hang_steps=0)
        if self.seed >= 1 << 63:
            raise ConfigError(f"run.seed is {self.seed}", "give a number below 2**63")
        if self.steps is not None and self.epochs is not None:
            raise ConfigError("run.steps and run.epochs are both given", "give one of them")
        self.time_limit_seconds()

    def time_limit_seconds(self) -> int | None:
        """The time limit in seconds. None if there is none, or if it is auto.

        Raises:
            ConfigError: it is not a time span.
        """
        if self.time_limit in (None, "auto"):
            return None
        seconds = parse_duration(str(self.time_limit))
        if seconds is None:
            raise ConfigError(
                f"run.time_limit is {self.time_limit!r}", f"give seconds, {TIME_FORMS}, or auto"
            )
        return seconds


_OF_TABLES: dict[str, Any] = {
    "dropout": 0.1,
    "numeric": "piecewise_linear",
    "quantiles": [],
    "pretraining": "none",
    "corrupted": None,
    "together": None,
}
MODEL_DEFAULTS: dict[str, dict[str, Any]] = {
    "gpt": {
        "layers": 6,
        "hidden": 384,
        "heads": 6,
        "vocab": None,
        "sequence": 256,
        "dropout": 0.0,
        "tie_embeddings": True,
    },
    "tabular": {"layers": 3, "hidden": 64, "heads": 4, **_OF_TABLES},
    "tabular_mlp": {
        "layers": 1,
        "hidden": 128,
        "embedding_width": 16,
        "members": 16,
        **_OF_TABLES,
    },
    "tabular_resnet": {"layers": 2, "hidden": 128, "embedding_width": 16, **_OF_TABLES},
}
"""The keys of section model that each kind has, and their defaults. None stands for what the data
or other keys decide."""
PRETRAINING_DEFAULTS: dict[str, dict[str, Any]] = {
    "none": {},
    "masked_cells": {"corrupted": 0.3},
    "contrast": {"corrupted": 0.3, "together": 32},
}
"""The keys that each value of model.pretraining has besides, and their defaults."""


@dataclass(frozen=True, kw_only=True)
class ModelSection:
    """The model that is trained."""

    kind: Literal["gpt", "tabular", "tabular_mlp", "tabular_resnet"] = "gpt"
    """The architecture of the model. gpt is for text. The others are for tables: tabular is a
    transformer whose tokens are the features, tabular_mlp an ensemble of MLPs, and tabular_resnet a
    residual network. Each kind has keys of its own, and no other kind takes them."""
    layers: int | None = None
    """Number of blocks. By default it is 6 for gpt, 3 for tabular, 1 for tabular_mlp, and 2 for
    tabular_resnet. A block of tabular_mlp has two layers, and there is one more in front."""
    hidden: int | None = None
    """Width of the activations between blocks. By default it is 384 for gpt, 64 for tabular, and
    128 for tabular_mlp and tabular_resnet."""
    heads: int | None = None
    """Number of attention heads of gpt and tabular. It divides hidden. By default it is 6 for gpt
    and 4 for tabular."""
    vocab: int | None = None
    """Vocabulary size of gpt. By default it is that of the data."""
    sequence: int | None = None
    """Number of tokens per sample of gpt. By default it is 256."""
    dropout: float | None = None
    """Share of activations that training drops: for gpt after the embedding and in each residual
    branch, for tabular after each attention and inside of each MLP, for the others after each
    layer. By default it is 0 for gpt, and 0.1 for the others."""
    tie_embeddings: bool | None = None
    """Whether the output layer of gpt shares the token embedding's weights. By default it does."""
    numeric: Literal["piecewise_linear", "periodic", "linear"] | None = None
    """How models of tables turn numbers into vectors: by the bins between quantiles of the training
    data, by sines and cosines with trained frequencies, or by one linear layer per feature. By
    default it is piecewise_linear."""
    embedding_width: int | None = None
    """Width of each feature's vector in tabular_mlp and tabular_resnet. By default it is 16."""
    members: int | None = None
    """Number of MLPs of tabular_mlp, which share their matrices and whose predictions are averaged.
    By default it is 16. 1 makes one plain MLP."""
    quantiles: list[float] = field(default_factory=list)
    """Quantiles that a regression of a table predicts, as numbers between 0 and 1. By default it
    predicts the mean."""
    pretraining: Literal["none", "masked_cells", "contrast"] | None = None
    """What a model of tables learns in place of the target: to predict cells that are hidden from
    it, or to tell a row's corrupted copy from those of other rows. By default it learns the
    target."""
    corrupted: float | None = None
    """Share of the cells that pretraining hides or replaces. By default it is 0.3."""
    together: int | None = None
    """Number of neighbours in a step's order whose copies are told from each other, with
    model.pretraining contrast. It divides data.micro_batch. By default it is 32."""

    def __post_init__(self) -> None:
        self._resolve()
        at_least(self, "model", layers=1, hidden=1, heads=1, vocab=1, sequence=1)
        at_least(self, "model", embedding_width=1, members=1, together=2)
        assert self.hidden is not None  # all kinds have it
        assert self.dropout is not None
        if self.heads is not None and self.hidden % self.heads:
            near = _nearest_divisors(self.hidden, self.heads)
            raise ConfigError(
                f"model.heads {self.heads} does not divide model.hidden {self.hidden}",
                f"nearest that do: {near}",
            )
        if any(not 0 < level < 1 for level in self.quantiles):
            raise ConfigError(
                f"model.quantiles is {self.quantiles}", "give numbers above 0 and below 1"
            )
        if self.quantiles and self.pretraining not in (None, "none"):
            raise ConfigError(
                f"model.quantiles is given, but model.pretraining {self.pretraining} does not "
                "learn the target",
                "leave model.quantiles out",
            )
        if not 0 <= self.dropout < 1:
            raise ConfigError(f"model.dropout is {self.dropout}", "give a number from 0 to below 1")
        if self.corrupted is not None and not 0 < self.corrupted < 1:
            raise ConfigError(
                f"model.corrupted is {self.corrupted}", "give a number above 0 and below 1"
            )

    def _resolve(self) -> None:
        """Give keys that were left out their defaults for this kind.

        Raises:
            ConfigError: a key was given that this kind, or its way of training, does not have.
        """
        known = MODEL_DEFAULTS[self.kind] | PRETRAINING_DEFAULTS[self.pretraining or "none"]
        for key in ("corrupted", "together"):
            if getattr(self, key) is not None and known.get(key) is None:
                raise ConfigError(
                    f"model.{key} is given, but model.pretraining is {self.pretraining or 'none'}",
                    f"leave model.{key} out",
                )
        for key in {key for keys in MODEL_DEFAULTS.values() for key in keys}:
            if getattr(self, key) is None:
                object.__setattr__(self, key, known.get(key))  # the section is frozen
            elif key not in known and getattr(self, key) != []:
                raise ConfigError(
                    f"model.{key} is given, but model.kind {self.kind} does not have it",
                    f"leave model.{key} out",
                )


@dataclass(frozen=True, kw_only=True)
class DataSection:
    """The training data and how it is cut into batches."""

    path: list[Any] | str | None = None
    """Folder that `hpc-train prepare` has written. Every training needs one. For a mixture give a
    list of {path: FOLDER, weight: NUMBER}. A folder's share of the samples is its weight, which is
    1 by default, divided by the sum of all."""
    batch: int = 32
    """Samples per optimizer step over the whole job."""
    micro_batch: int | Literal["auto"] | None = None
    """Samples that a rank computes at a time. By default it is batch / parallel.dp. auto takes the
    largest number that fits in memory, found by trial."""
    micro_tokens: int | None = None
    """Largest number of tokens, with padding, that a rank computes at a time. It takes the place of
    micro_batch for a data set whose method lengths says how long its samples are. By default
    micro_batch decides."""
    loss: Literal["sample", "token"] = "sample"
    """What the loss of a step is the mean over. sample: the samples of the step; a sample's loss is
    the mean over its own tokens. token: all tokens of the step. The two differ where samples have
    unequal numbers of tokens that count."""
    across_documents: bool = True
    """Whether a sample is taken from the stream of all documents, so that it may begin and end
    inside of documents. With false it has whole documents, each for itself, and padding; documents
    that are longer than a sample are cut."""
    shuffle: bool | Literal["full"] = True
    """Whether every epoch has a new order of the samples, the same on every layout. Samples of
    shards are shuffled by blocks, and within windows of a million samples, or of half a million
    whole documents; full takes each sample from anywhere, which reads shards larger than memory
    slowly."""
    validation_every: int = 0
    """Number of steps between two passes over the held-out split. With 0 there is one at the end
    only."""
    validation_batches: int = 0
    """Number of batches of held-out samples in a pass, evenly spread over the split. 0 takes the
    whole split."""
    damaged: Literal["raise", "substitute"] = "raise"
    """What happens to a sample whose shard is damaged, missing or unreadable. raise ends the run.
    substitute trains on another sample in its place, and counts it in metrics.jsonl. If more than
    10% of the samples are substituted, the run ends. Whole documents (across_documents false) are
    not substituted."""
    prefetch: int = 2
    """Number of batches that a thread reads ahead. 0 reads each batch in its step."""
    workers: int = 0
    """Number of processes of each rank that read samples ahead. Threads do it where none can be
    started."""
    cache: str | None = None
    """Folder on a disk or in the memory (/dev/shm) of each node, in which its ranks share blocks of
    data.path that one of them has read. It is made if it is not there. By default there is no
    cache."""
    cache_gb: float = 0.0
    """Most GB (10^9 bytes) in the cache of a node. 0 sets no limit but free space: the cache always
    leaves a tenth of the disk free, and takes at most half of the free memory."""
    class_weights: Literal["none", "balanced"] = "none"
    """For the classification of tables, the weight of each class in the loss. With balanced all
    classes weigh the same, however many rows they have; the mean weight of the training rows stays
    1."""
    sampling: Literal["natural", "balanced"] = "natural"
    """For the classification of tables, how often each class is drawn: as often as it occurs, or
    with balanced each class equally often. An epoch has as many samples in both cases."""
    importance: int = 0
    """For tables, number of times that each feature is permuted among the held-out rows after the
    last step. importance.json of the run directory then has what the loss and the scores change
    by. 0 disables it."""

    def __post_init__(self) -> None:
        if isinstance(self.path, list):
            check_mixture(self.path)
        elif self.path is not None and self.path[:1] in ("", "[", "{"):
            raise ConfigError(
                f"data.path is {self.path!r}", f"give a folder, or a list of {MIXTURE_FORM}"
            )
        at_least(self, "data", batch=1, validation_every=0, validation_batches=0, importance=0)
        at_least(self, "data", prefetch=0, workers=0, cache_gb=0)
        if self.cache_gb and self.cache is None:
            raise ConfigError(
                f"data.cache_gb is {self.cache_gb:g}, but data.cache is not given",
                "give data.cache a folder of each node, or leave data.cache_gb out",
            )
        if isinstance(self.micro_batch, str) and self.micro_batch != "auto":
            raise ConfigError(f"data.micro_batch is {self.micro_batch!r}", "give a number, or auto")
        if self.micro_batch != "auto":
            at_least(self, "data", micro_batch=1)
        at_least(self, "data", micro_tokens=1)
        if self.class_weights == self.sampling == "balanced":
            raise ConfigError(
                "data.class_weights and data.sampling are both balanced, so that rare classes "
                "would count twice",
                "leave one of them out",
            )
        if self.damaged == "substitute" and not self.across_documents:
            raise ConfigError(
                "data.damaged is substitute, but data.across_documents is false: without the "
                "documents' lengths nobody knows which samples a damaged shard has",
                "leave one of them out",
            )
        if self.micro_tokens is not None and self.micro_batch is not None:
            raise ConfigError(
                "data.micro_batch and data.micro_tokens are both given", "give one of them"
            )

    @property
    def folders(self) -> dict[str, float]:
        """The weight of each folder of path."""
        if isinstance(self.path, list):
            return {part["path"]: float(part.get("weight", 1)) for part in self.path}
        return {} if self.path is None else {self.path: 1.0}

    @property
    def samples_at_a_time(self) -> int | None:
        """The value of micro_batch, if it is a number."""
        return self.micro_batch if isinstance(self.micro_batch, int) else None


@dataclass(frozen=True, kw_only=True)
class OptimizerSection:
    """The optimizer and its learning rate over time."""

    name: Literal["adamw", "sgd"] = "adamw"
    """adamw has betas 0.9 and 0.95; sgd has momentum 0.9."""
    lr: float = 3e-4
    """Peak learning rate, before lr_scaling."""
    lr_scaling: Literal["none", "linear", "sqrt"] = "none"
    """What lr is multiplied by: 1 (none), the data-parallel size (linear), or its square root
    (sqrt)."""
    warmup_steps: int = 0
    """Number of steps over which the learning rate rises from 0, by the same amount in each."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """The learning rate after the warm-up: constant, or falling to 0 at the last step."""
    weight_decay: float = 0.0
    """Weight decay of tensors with two or more dimensions. For adamw it is decoupled."""
    clip_norm: float = 0.0
    """Largest global norm of the averaged gradients. 0 disables clipping."""

    def __post_init__(self) -> None:
        at_least(self, "optimizer", lr=0, warmup_steps=0, weight_decay=0, clip_norm=0)


@dataclass(frozen=True, kw_only=True)
class PrecisionSection:
    """Number formats."""

    dtype: Literal["float32", "bfloat16", "float16", "float64"] = "float32"
    """With float32 and float64 all numbers have that format. With bfloat16 and float16 matrix
    products have it (torch.autocast), and parameters are float32."""
    matmul: Literal["auto", "onednn", "torch"] = "auto"
    """The library that multiplies the float32 matrices of linear layers on CPUs: onednn, or torch's
    own. auto takes the one that was measured to be faster on this kind of processor."""

    def __post_init__(self) -> None:
        if self.matmul == "onednn" and self.dtype != "float32":
            raise ConfigError(
                f"precision.matmul is onednn, but precision.dtype is {self.dtype}",
                "leave precision.matmul out: it applies to float32 only",
            )

    @property
    def parameters(self) -> Literal["float32", "float64"]:
        """Number format of parameters, their gradients and the optimizer's state."""
        return "float64" if self.dtype == "float64" else "float32"


@dataclass(frozen=True, kw_only=True)
class CheckpointSection:
    """When checkpoints are written, which of them are kept, and where a run starts from."""

    every: int = 1000
    """Number of steps between two checkpoints. 0 writes none by steps. One more is written at the
    end and at an early stop."""
    minutes: float = 0.0
    """Minutes between two checkpoints, besides those by steps. 0 disables it."""
    mtbf_hours: float = 0.0
    """Mean time between failures of the job, in hours. Checkpoints are then written at the interval
    that loses the least work (Daly's formula). A checkpoint after the first step measures what one
    costs. 0 disables this."""
    keep: int = 3
    """Number of newest checkpoints that are kept. 0 keeps all."""
    keep_every: int = 0
    """Checkpoints of steps that this number divides are kept for good. 0 disables it."""
    keep_best: int = 0
    """Number of checkpoints with the lowest validation loss that are kept as well."""
    on_error: Literal["stop", "warn"] = "stop"
    """What happens when a checkpoint cannot be written. warn continues the training, unless it is
    the last checkpoint."""
    background: bool = False
    """Whether training continues while a checkpoint is written. It takes as much memory as a rank
    writes."""
    verify: bool = True
    """Whether another rank reads back and compares everything that was written. Through MPI-IO this
    is always done, because some MPI libraries report success on a full disk."""
    replicas: Literal["stop", "warn", "off"] = "stop"
    """What happens when replicas do not hold the same bits, as they should. Each checkpoint
    compares a sample of them. off compares nothing."""
    engine: Literal["auto", "mpiio", "mpiio_collective", "posix"] = "auto"
    """How ranks write the checkpoint's file. auto takes what was fastest in the first checkpoints
    under MPI, and posix in a single process and in the background."""
    resume: str = "auto"
    """Where a run starts from: auto is the newest checkpoint of run.dir, and none is the beginning.
    A file or a run directory names another checkpoint."""
    weights: str = ""
    """Where a run that finds no checkpoint takes its initial weights from: a checkpoint, a
    safetensors file, or a folder, such as one of a Hugging Face GPT-2. By default they are
    random."""
    include: list[str] = field(default_factory=list)
    """Shell patterns of the names of tensors that are taken from weights. By default all are."""
    exclude: list[str] = field(default_factory=list)
    """Shell patterns of the names of tensors among them that keep their initial values. By default
    none do."""

    def __post_init__(self) -> None:
        at_least(self, "checkpoint", every=0, minutes=0, mtbf_hours=0)
        at_least(self, "checkpoint", keep=0, keep_every=0, keep_best=0)
        if self.weights and self.resume not in ("auto", "none"):
            raise ConfigError(
                "checkpoint.resume names a file, but checkpoint.weights is given",
                "leave out weights to resume with the optimizer's state, or leave out resume",
            )
        if (self.include or self.exclude) and not self.weights:
            raise ConfigError(
                "checkpoint.include and exclude choose from checkpoint.weights, which is not given",
                "give checkpoint.weights, or leave them out",
            )


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """The whole configuration of a run."""

    run: RunSection = field(default_factory=RunSection)
    model: ModelSection = field(default_factory=ModelSection)
    data: DataSection = field(default_factory=DataSection)
    parallel: ParallelSection = field(default_factory=ParallelSection)
    gradients: GradientsSection = field(default_factory=GradientsSection)
    optimizer: OptimizerSection = field(default_factory=OptimizerSection)
    finetune: FinetuneSection = field(default_factory=FinetuneSection)
    precision: PrecisionSection = field(default_factory=PrecisionSection)
    memory: MemorySection = field(default_factory=MemorySection)
    checkpoint: CheckpointSection = field(default_factory=CheckpointSection)

    def __post_init__(self) -> None:
        check_together(self)

    def to_yaml(self) -> str:
        """The configuration as YAML; `config.file.load` reads it back to an equal one."""
        return yaml.safe_dump(asdict(self), sort_keys=False)


def _nearest_divisors(number: int, wanted: int) -> str:
    divisors = [d for d in range(1, number + 1) if number % d == 0]
    below = [d for d in divisors if d < wanted][-1:]
    above = [d for d in divisors if d > wanted][:1]
    return ", ".join(str(d) for d in below + above)
