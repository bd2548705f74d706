"""The checkpoints of a run: their names, the newest that is sound, how many are kept."""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from hpc_train import files
from hpc_train.checkpoint import restore, state
from hpc_train.checkpoint.engines import Engine, check_engine
from hpc_train.checkpoint.save import save
from hpc_train.collectives import Collectives
from hpc_train.errors import CheckpointError, CheckpointMismatch
from hpc_train.mpi.agreement import agreed, from_first

logger = logging.getLogger(__name__)

LATEST = "LATEST"


class Checkpoints:
    """Saves and restores a model with its optimizer in a folder.

    All ranks must call each method, with the same arguments.

    Args:
        directory: the folder, made with the first checkpoint.
        collectives: of the ranks that train; each of them holds the whole state.
        model, optimizer: what is saved; restored in place.
        keep: newest checkpoints that are kept; 0 keeps all.
        engine: how ranks write.
        identity: what a checkpoint must have been made with to be continued, by configuration key.
        about: what a reader of the file needs to use the model, as plain JSON values.

    Raises:
        ConfigError: engine mpiio in a process that runs without MPI.
    """

    def __init__(
        self,
        directory: Path,
        collectives: Collectives,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        keep: int = 3,
        engine: Engine = "auto",
        identity: Mapping[str, Any] | None = None,
        about: Mapping[str, Any] | None = None,
    ) -> None:
        check_engine(engine, collectives.group)
        self.directory = directory
        self.collectives = collectives
        self.group = collectives.group
        self.model = model
        self.optimizer = optimizer
        self.keep = keep
        self.engine = engine
        self.identity = {**(identity or {}), "optimizer.name": type(optimizer).__name__.lower()}
        self.about = dict(about or {})
        self.saved_step = 0
        self.save_seconds = 0.0

    def save(self, step: int) -> Path:
        """Write the checkpoint of a finished step, unless it is there, and drop the oldest.

        Raises:
            CheckpointError: it could not be written; older ones are untouched.
        """
        path = self.directory / name_of(step)
        if step == self.saved_step:
            return path
        begin = time.monotonic()
        self.unify_buffers()
        tensors = {
            **state.model_tensors(self.model),
            **state.optimizer_tensors(self.model, self.optimizer),
        }
        contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
        save(path, contiguous, self._state(step), self.group, self.engine)
        with agreed(self.group):
            if self.group.rank == 0:
                files.write_text(self.directory / LATEST, path.name + "\n")
                self._drop_old(step)
        self.saved_step = step
        self.save_seconds = time.monotonic() - begin
        logger.info("step %d: checkpoint %s (%.1f s)", step, path, self.save_seconds)
        return path

    def resume(self, source: str = "auto") -> int:
        """Restore the state, and return the step after which training goes on; 0: none was found.

        Args:
            source: "auto", the newest sound checkpoint of the folder; "none"; or a file to start
                from while the folder is empty, so that the same call goes on after a stop.

        Raises:
            CheckpointError: the given file, or every one in the folder, is damaged.
            CheckpointMismatch: it is of another model, optimizer, data set or sample order; or the
                folder has newer checkpoints than the start that was asked for.
        """
        found = from_first(self.group, lambda: self._candidates(source))
        for number, path in enumerate(found):
            try:
                return self._restore(path)
            except CheckpointError as error:  # the same one on all ranks
                if number == len(found) - 1:
                    raise
                logger.warning("%s; trying the one before", error)
        return 0

    def unify_buffers(self) -> None:
        """Give all ranks rank 0's buffers: running statistics differ from rank to rank."""
        for buffer in self.model.buffers():
            self.collectives.broadcast_(buffer)

    def _candidates(self, source: str) -> list[Path]:
        """Where to resume from, in the order to try; unfinished files of dead jobs are removed."""
        if self.directory.is_dir():
            for partial in self.directory.glob(".step-*.partial"):
                partial.unlink(missing_ok=True)
        own = find(self.directory, "auto")
        if source == "auto":
            return own
        given = [] if source == "none" else find(self.directory, source)
        inside = any(path.resolve().parent == self.directory.resolve() for path in given)
        if own and (source == "none" or (inside and not own[0].samefile(given[0]))):
            raise CheckpointMismatch(
                f"{self.directory} has checkpoints beyond this start, up to {own[0].name}",
                "give another run.dir, or move them away",
            )
        return own or given

    def _restore(self, path: Path) -> int:
        reader = restore.open_together(path, self.group)
        saved = restore.load_state(reader, self.group)
        with agreed(self.group):
            model_tensors = state.model_tensors(self.model)
            state.check_model(reader.entries, model_tensors, path)
            self._check_identity(saved["identity"], path)
            state.make_optimizer_state(
                self.model, self.optimizer, reader.entries, saved["optimizer"]
            )
        optimizer_tensors = state.optimizer_tensors(self.model, self.optimizer)
        tensors = {**model_tensors, **optimizer_tensors}
        contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
        restore.load(reader, contiguous, self.group)
        for name, tensor in tensors.items():
            if contiguous[name] is not tensor:
                tensor.copy_(contiguous[name])
        step = int(saved["step"])
        self.saved_step = step if path.parent == self.directory else 0
        logger.info("resumed from %s, after step %d", path, step)
        return step

    def _check_identity(self, saved: Mapping[str, Any], path: Path) -> None:
        for key in sorted(self.identity.keys() | saved.keys()):
            if self.identity.get(key) != saved.get(key):
                raise CheckpointMismatch(
                    f"{path} was made with {key} {saved.get(key)}, this run has "
                    f"{self.identity.get(key)}",
                    f"set {key} back, or start anew with another run.dir",
                )

    def _state(self, step: int) -> bytes:
        values = state.optimizer_values(self.model, self.optimizer)
        tree = {
            "step": step,
            "identity": self.identity,
            "about": self.about,
            "optimizer": values,
        }
        return json.dumps(tree, sort_keys=True, separators=(",", ":")).encode()

    def _drop_old(self, step: int) -> None:
        """Retention; a later checkpoint, which was damaged, counts for nothing."""
        if self.keep:
            done = [path for path in find(self.directory, "auto") if path.name <= name_of(step)]
            for path in done[self.keep :]:
                path.unlink()


def name_of(step: int) -> str:
    """A checkpoint's file name; names sort by step."""
    return f"step-{step:09d}.safetensors"


def find(directory: Path, source: str) -> list[Path]:
    """Checkpoint files to try: the given one, or those of the folder, newest first.

    Raises:
        CheckpointMismatch: the given file does not exist.
    """
    if source != "auto":
        if not Path(source).is_file():
            raise CheckpointMismatch(f"no such checkpoint: {source}", "give a file, auto or none")
        return [Path(source)]
    if not directory.is_dir():
        return []
    named = re.compile(r"step-\d{9,}\.safetensors")
    found = (path for path in directory.iterdir() if named.fullmatch(path.name))
    return sorted(found, key=lambda path: int(path.name[5:-12]), reverse=True)
