"""Makes the configuration of a training of an estimator's parameters."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from numbers import Integral
from typing import Any, Literal, get_args

from hpc_train.config import RunConfig
from hpc_train.config.file import load
from hpc_train.errors import ConfigError
from hpc_train.training.in_memory import WITH_FILES

TableModel = Literal["mlp", "resnet", "transformer"]
KIND_OF_MODEL = {"mlp": "tabular_mlp", "resnet": "tabular_resnet", "transformer": "tabular"}
OWN = {
    "model.kind": "model",
    "model.quantiles": "quantiles of a Regressor",
    "model.pretraining": "",
    "model.corrupted": "",
    "model.together": "",
    "run.dir": "run_dir",
    "run.seed": "seed",
    "run.steps": "steps",
    "run.epochs": "epochs",
    "run.patience": "patience",
    "data.batch": "batch",
    "data.path": "",
    "data.loss": "",
    "data.cache": "",
    "data.cache_gb": "",
    "data.importance": "",
    "data.sampling": "",
    "data.class_weights": "class_weight of a Classifier",
    "data.damaged": "",
    "data.across_documents": "",
    "finetune": "",
    "checkpoint.every": "",
    "checkpoint.minutes": "",
    "checkpoint.mtbf_hours": "",
    "checkpoint.keep": "",
    "checkpoint.keep_best": "",
    "checkpoint.weights": "",
    "optimizer.lr": "lr",
}
"""Keys that `config` does not take, with the parameter of the estimator that stands for each."""
LEAST_VALUES = {"epochs": 1, "steps": 1, "batch": 1, "patience": 0, "seed": 0}
LEAST_STEPS, LEAST_EPOCHS = 2000, 100  # of a training for which neither is given
LEAST_BETWEEN = 25  # steps between two validations
LEAST_BATCH, MOST_BATCH = 32, 256  # rows of a batch if none is given
STEPS_OF_EPOCH = 8  # least number of them, if no batch is given and there are rows enough
ESTIMATOR_DEFAULTS: dict[str, Any] = {"memory.zero": 0, "run.preflight": False}
"""Values of keys that differ from those of `hpc-train train`."""
MLP_DEFAULTS: dict[str, Any] = {"optimizer.weight_decay": 0.3}
"""The same for the model "mlp". benchmarks/RESULTS.md says how they were chosen."""


@dataclass(frozen=True, kw_only=True)
class FitSettings:
    """The parameters of an estimator that decide its training; see `Classifier`."""

    model: str
    epochs: int | None
    steps: int | None
    batch: int | None
    lr: float
    patience: int
    validation_fraction: float
    seed: int
    run_dir: Any
    config: Mapping[str, Any] | None
    verbose: bool
    quantiles: tuple[float, ...] = ()

    def check(self) -> None:
        """Check the parameters that are no keys of the configuration.

        Raises:
            ValueError: a parameter has no possible value, or two exclude each other.
            ConfigError: `config` has a key that it does not take.
        """
        if self.model not in KIND_OF_MODEL:
            names = ", ".join(get_args(TableModel))
            raise ValueError(f"model is {self.model!r}: give one of {names}")
        if self.epochs is not None and self.steps is not None:
            raise ValueError("epochs and steps are both given: give one of them")
        if self.run_dir is not None and not str(self.run_dir):
            raise ValueError("run_dir is '': give a folder, such as '.', or None")
        for name, least in LEAST_VALUES.items():
            value = getattr(self, name)
            if value is None and name in ("epochs", "steps", "batch"):
                continue
            if not isinstance(value, Integral) or value < least:
                raise ValueError(f"{name} is {value!r}: give a whole number, {least} or more")
        if not isinstance(self.config or {}, Mapping):
            raise ValueError(f"config is {self.config!r}: give a dict, as {{'model.hidden': 256}}")
        self._check(dict(self.config or {}))

    def to_text(self) -> str:
        """All that must be equal on all ranks, as text."""
        chosen = {key: one for key, one in vars(self).items() if key != "verbose"}
        return json.dumps(chosen, sort_keys=True, default=str)

    def configuration(self, rows: int, *, held_out: bool) -> RunConfig:
        """The configuration of a training.

        Args:
            rows: number of training rows.
            held_out: whether there are rows to validate with.

        Raises:
            ValueError: a parameter has no possible value, or two exclude each other.
            ConfigError: `config` has a key or value that cannot be taken.
        """
        given = dict(self.config or {})
        batch = self._batch_of(rows)
        per_epoch = rows // batch
        steps = self.steps if self.epochs is None else self.epochs * per_epoch
        if steps is None:
            steps = max(LEAST_STEPS, LEAST_EPOCHS * per_epoch)
        every = given.get("data.validation_every", max(per_epoch, LEAST_BETWEEN))
        if not isinstance(every, Integral) or every < 0:
            remedy = "give a whole number, 0 or more"
            raise ConfigError(f"data.validation_every is {every!r}", remedy)
        every = min(int(every), steps) if held_out else 0
        made: dict[str, Any] = {
            **ESTIMATOR_DEFAULTS,
            **(MLP_DEFAULTS if self.model == "mlp" else {}),
            "model.kind": KIND_OF_MODEL[self.model],
            "model.quantiles": [*self.quantiles],
            "run.seed": self.seed,
            "run.steps": steps,
            "run.patience": self.patience if held_out else 0,
            "run.log_every": every or LEAST_BETWEEN,
            "data.batch": batch,
            "data.validation_every": every,
            "optimizer.lr": self.lr,
        }
        if self.run_dir is not None:
            made |= {"run.dir": str(self.run_dir), "checkpoint.every": every or per_epoch}
            best = int(held_out and every < steps)
            made |= {"checkpoint.keep": 2, "checkpoint.keep_best": best}
        made |= {key: value for key, value in given.items() if key != "data.validation_every"}
        return load(options=[f"--{key}={_written(value)}" for key, value in made.items()])

    def _batch_of(self, rows: int) -> int:
        """Rows of a batch: of a small table as many as any usual number of ranks can divide."""
        wanted = self.batch
        if wanted is None:
            share = 1 << max(1, rows // STEPS_OF_EPOCH).bit_length() - 1
            wanted = min(max(share, LEAST_BATCH), MOST_BATCH)
        if rows >= wanted:
            return wanted
        unit = 1 << max(rows > 1, rows.bit_length() - 2)
        return rows // unit * unit

    def _check(self, given: Mapping[str, Any]) -> None:
        sections = [field.name for field in fields(RunConfig)]
        for key in given:
            section = str(key).partition(".")[0]
            if section not in sections:
                raise ConfigError(
                    f"config has the unknown key {key!r}",
                    "give keys as `hpc-train train --help` lists them, such as model.hidden",
                )
            own = OWN.get(key, OWN.get(section))
            if own is not None:
                remedy = f"give the parameter {own}" if own else "leave it out"
                raise ConfigError(f"config has {key}, which an estimator does not take", remedy)
            if self.run_dir is None and (key in WITH_FILES or section in WITH_FILES):
                raise ConfigError(
                    f"config has {key}, but without run_dir nothing is written",
                    f"give run_dir, or leave {key} out",
                )


def _written(value: Any) -> str:
    """A value as an option of the command line has it."""
    if isinstance(value, str):
        return value
    if hasattr(value, "item"):  # a number of NumPy
        value = value.item()
    return json.dumps(value)
