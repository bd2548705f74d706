"""The configuration: one frozen dataclass per section.

`file.py` makes them from YAML and options. Each part of the package takes its own section, never
the whole. A section checks its values when it is made, so every configuration that exists is valid
by itself. What depends on the number of ranks or on the data is checked by the part that knows it.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from hpc_train.config.durations import TIME_FORMS, parse_duration
from hpc_train.config.finetune import FinetuneSection
from hpc_train.config.keys import to_yaml
from hpc_train.config.mixture import FORM as MIXTURE_FORM
from hpc_train.config.mixture import check_mixture
from hpc_train.config.model import ModelSection
from hpc_train.config.profile import ProfileSection
from hpc_train.config.spread import GradientsSection, MemorySection, ParallelSection, at_least
from hpc_train.config.together import check_together
from hpc_train.errors import ConfigError, check_kinds

TRACKERS = ("tensorboard", "mlflow", "csv")
TEST_STEPS = 40  # of a performance test, unless it has another number
TEST_STEPS_LEAST = 2  # one that counts, after one that does not
WORKERS_MOST = 256  # more are of no use to a rank, and may exhaust its node


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
    compile: bool = False
    """Let torch.compile translate the model's blocks into faster code, which is meant for GPUs. The
    first step then takes a minute or so."""
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
    disables it. Ranks watch each other only with run.hang_timeout; without it, only the launcher
    notices a hang, by this limit and the time of the longest save."""
    nonfinite: Literal["stop", "warn"] = "stop"
    """What happens when a loss, a gradient's norm or a trained parameter is infinite or not a
    number. stop ends the run before the step is taken, or before a checkpoint of it is written.
    warn continues. A step that the loss scale skips does not count."""
    patience: int = 0
    """Number of validations in a row that do not lower the validation loss, after which training
    ends before its last step. 0 disables it. checkpoint.keep_best keeps the checkpoint with the
    lowest loss."""
    trackers: list[str] = field(default_factory=list)
    """Where rank 0 also logs its records: tensorboard (RUN/tensorboard), mlflow (RUN/mlruns, or the
    folder MLFLOW_TRACKING_URI), csv (RUN/metrics.csv), or a class of yours as package.module:Class.
    By default nowhere. `hpc-train log export` does it later, also for W&B."""
    profile: ProfileSection = field(default_factory=ProfileSection)
    """Which steps are profiled."""
    preflight: bool = True
    """Whether to check ranks and hosts before the first step: versions, clocks, memory, the run
    directory, slow ranks and slow links, and to measure the peak that mfu is a share of. It takes
    a second or two."""
    performance_test: bool | int = False
    """Whether the run measures how fast it trains. It then takes 40 steps, or the number of steps
    that is given here, in place of steps and epochs. It writes no checkpoint, and evaluates no
    held-out samples, whatever the other keys say. The first quarter of the steps does not count.
    The result is in performance.json of run.dir."""

    def __post_init__(self) -> None:
        check_kinds(self, "run")
        at_least(self, "run", seed=0, steps=1, epochs=1, log_every=1)
        at_least(self, "run", end_margin=0, hang_timeout=0, hang_steps=0, patience=0)
        if self.steps is not None and self.epochs is not None:
            raise ConfigError("run.steps and run.epochs are both given", "give one of them")
        self.time_limit_seconds()
        self._check_trackers()
        if self.performance_test is not False and self.test_steps < TEST_STEPS_LEAST:
            raise ConfigError(
                f"run.performance_test is {self.performance_test}",
                f"give true, false, or a number of {TEST_STEPS_LEAST} or more steps",
            )

    def _check_trackers(self) -> None:
        for name in self.trackers:
            if name == "wandb":
                raise ConfigError(
                    "run.trackers names wandb, which logs only through a process that it starts, "
                    "and a rank of MPI starts none",
                    "leave it out, and call `hpc-train log export RUN --to wandb` on a login node, "
                    "also while the job runs",
                )
            if name not in TRACKERS and not re.fullmatch(r"[\w.]+:\w+", name):
                raise ConfigError(
                    f"run.trackers names {name!r}",
                    f"it takes {', '.join(TRACKERS)} and package.module:Class",
                )
            if self.trackers.count(name) > 1:
                raise ConfigError(f"run.trackers names {name} twice", "name it once")

    @property
    def test_steps(self) -> int:
        """The number of steps of a performance test; 0 if the run is none."""
        if isinstance(self.performance_test, bool):
            return TEST_STEPS if self.performance_test else 0
        return self.performance_test

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
    """Number of processes of each rank that read samples ahead, at most 256. Threads do it where
    none can be started."""
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
        check_kinds(self, "data")
        if isinstance(self.path, list):
            check_mixture(self.path)
        elif self.path is not None and self.path[:1] in ("", "[", "{"):
            raise ConfigError(
                f"data.path is {self.path!r}", f"give a folder, or a list of {MIXTURE_FORM}"
            )
        at_least(self, "data", batch=1, validation_every=0, validation_batches=0, importance=0)
        at_least(self, "data", prefetch=0, workers=0, cache_gb=0, micro_tokens=1)
        if self.workers > WORKERS_MOST:
            remedy = f"give {WORKERS_MOST} or less: each rank starts as many processes"
            raise ConfigError(f"data.workers is {self.workers}", remedy)
        if self.cache_gb and self.cache is None:
            raise ConfigError(
                f"data.cache_gb is {self.cache_gb:g}, but data.cache is not given",
                "give data.cache a folder of each node, or leave data.cache_gb out",
            )
        if isinstance(self.micro_batch, str) and self.micro_batch != "auto":
            raise ConfigError(f"data.micro_batch is {self.micro_batch!r}", "give a number, or auto")
        if self.micro_batch != "auto":
            at_least(self, "data", micro_batch=1)
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
    """Weight decay of matrices: of tensors with two or more dimensions, but for the biases and
    factors of the members of tabular_mlp and the biases of embedded numbers. For adamw it is
    decoupled."""
    clip_norm: float = 0.0
    """Largest global norm of the averaged gradients. 0 disables clipping."""

    def __post_init__(self) -> None:
        check_kinds(self, "optimizer")
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
        check_kinds(self, "precision")
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
    safetensors file, or a folder, such as one of a Hugging Face GPT-2, Llama, Mistral or Qwen. By
    default they are random."""
    include: list[str] = field(default_factory=list)
    """Shell patterns of the names of tensors that are taken from weights. By default all are."""
    exclude: list[str] = field(default_factory=list)
    """Shell patterns of the names of tensors among them that keep their initial values. By default
    none do."""

    def __post_init__(self) -> None:
        check_kinds(self, "checkpoint")
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
        return to_yaml(asdict(self))
