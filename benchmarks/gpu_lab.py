"""Runs the program for the checks of benchmarks.gpu."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import psutil

from hpc_train.mpi import environment
from hpc_train.mpi.gpus import AMD, INTEL, NVIDIA

T = TypeVar("T")

TOKENS_FILES = 200  # files of Python's standard library that are the text
HIDDEN = {maker.variables[0]: "" for maker in (NVIDIA, AMD, INTEL)}
# As flags, Open MPI's and MPICH's launchers would not take them alike.
OVERSUBSCRIBE = {
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "OMPI_MCA_hwloc_base_binding_policy": "none",
    "PRTE_MCA_hwloc_default_binding_policy": "none",
}


class Skipped(Exception):
    """A check cannot be carried out here; the message says why."""


@dataclass(frozen=True)
class Found:
    """What a check has found.

    Args:
        text: for the table.
        figures: numbers by name.
    """

    text: str
    figures: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Run:
    """A training that has ended.

    Args:
        folder: the run directory.
        code: the exit code.
        output: what it has printed.
    """

    folder: Path
    code: int
    output: str

    @functools.cached_property
    def records(self) -> list[dict[str, Any]]:
        """The records of metrics.jsonl."""
        lines = (self.folder / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    @property
    def losses(self) -> list[float]:
        """The loss of each record."""
        return [record["loss"] for record in self.records]

    @property
    def last_lines(self) -> str:
        """The program's errors, or else the end of the output, in a line."""
        return told(self.output)


def told(output: str) -> str:
    """The errors in a program's output, or else its last lines, in one line."""
    lines = output.strip().splitlines()
    return " / ".join([line for line in lines if "rror: " in line][:3] or lines[-4:])


class Lab:
    """Runs programs in a folder, until a time.

    Args:
        folder: for data, run directories and logs.
        wanted: "auto" for a GPU, or "cpu".
        end: the time of `time.monotonic` at which no program may run any more.

    Attributes:
        software: versions, and what torch is built for.
        device: the name of the GPU, or "processors".
        gpu: whether there is one.
        limits: what the check of limits has measured; empty before it.
        threads: number of threads of each process; 0: those that it takes by itself.
    """

    def __init__(self, folder: Path, wanted: str, end: float) -> None:
        self.folder, self.end = folder, end
        self._hidden = wanted == "cpu"
        self._runs = itertools.count(1)
        self._made: dict[Hashable, Future[Any]] = {}
        self._lock = threading.Lock()
        self.threads = 0
        self.limits: Mapping[str, float] = {}
        self.software: dict[str, Any] = self.loops("software")
        self.device: str = self.software["device"] or "processors"
        self.gpu = self.device != "processors"
        if wanted == "auto" and not self.gpu:
            print(
                "torch finds no GPU here. To try the checks without one: python -m benchmarks.gpu "
                "--device cpu"
            )
            sys.exit(2)

    def left(self) -> float:
        """Seconds that are left."""
        return self.end - time.monotonic()

    def environ(self, *, gpu: bool) -> dict[str, str]:
        """The environment of a program; the GPU is hidden from it unless it may use it."""
        made = {**environment.for_launcher(os.environ), **OVERSUBSCRIBE}
        made["PYTHONPATH"] = os.pathsep.join(
            filter(None, [str(Path.cwd()), made.get("PYTHONPATH")])
        )
        made |= {} if gpu and not self._hidden else HIDDEN
        return made | ({"OMP_NUM_THREADS": str(self.threads)} if self.threads else {})

    def once(self, name: Hashable, make: Callable[[], T]) -> T:
        """What `make` returns. It is called once for each name, also if threads ask together."""
        with self._lock:
            known = name in self._made
            made = self._made.setdefault(name, Future())
        if not known:
            try:
                made.set_result(make())
            except BaseException as error:  # noqa: BLE001  all who ask get it
                made.set_exception(error)
        result: T = made.result()
        return result

    def loops(self, *words: str, seconds: float = 300.0) -> Any:
        """What `benchmarks.gpu_loops` finds, in a process of its own."""
        return self.found_by("benchmarks.gpu_loops", *words, seconds=seconds)

    def found_by(
        self, module: str, *words: str, ranks: int = 1, gpu: bool = True, seconds: float = 300.0
    ) -> Any:
        """The JSON in the last line of a module's output, run on some ranks."""
        command = [*launcher(ranks), sys.executable, "-m", module, *words]
        done = self._run(command, gpu=gpu, seconds=seconds)
        assert not done.returncode, told(done.stdout + done.stderr)
        return json.loads(done.stdout.strip().splitlines()[-1])

    @property
    def text(self) -> Path:
        """A data set of bytes of Python's standard library."""
        return self.once("text", self._text)

    def _text(self) -> Path:
        source, out = Path(os.__file__).parent, self.folder / "text"
        files = sorted(source.glob("*.py"), key=lambda path: -path.stat().st_size)
        words = map(str, files[:TOKENS_FILES])
        self.command("prepare", "text", *words, "--out", str(out), gpu=False)
        return out

    @property
    def table(self) -> Path:
        """A data set of a small table."""
        return self.once("table", self._table)

    def _table(self) -> Path:
        source, out = self.folder / "table.csv", self.folder / "table"
        rows = [f"{n % 7},{n * n % 11 / 10},{'abc'[n % 3]},{(n * n) % 2}" for n in range(400)]
        source.write_text("\n".join(["size,weight,kind,answer", *rows]) + "\n")
        words = ["--target", "answer", "--task", "classification", "--out", str(out)]
        self.command("prepare", "table", str(source), *words, gpu=False)
        return out

    def command(self, *words: str, ranks: int = 1, gpu: bool = True, seconds: float = 120.0) -> str:
        """What `hpc-train` with these words prints. It has to end well."""
        command = [*launcher(ranks), sys.executable, "-m", "hpc_train", *words]
        done = self._run(command, gpu=gpu, seconds=seconds)
        assert not done.returncode, (
            f"exit code {done.returncode}: {told(done.stdout + done.stderr)}"
        )
        return done.stdout

    def train(
        self,
        options: Mapping[str, object],
        *,
        ranks: int = 1,
        gpu: bool = True,
        seconds: float = 240.0,
        words: Sequence[str] = (),
        fails: bool = False,
    ) -> Run:
        """Train as a user does.

        Args:
            options: keys and values of the configuration; `run.dir` is a new folder unless given.
            ranks: number of ranks.
            gpu: whether ranks see the GPU.
            seconds: how long it may take.
            words: further words of the command.
            fails: whether it has to end with an error.
        """
        folder = Path(str(options.get("run.dir", self.folder / f"run-{next(self._runs)}")))
        command = [*launcher(ranks), sys.executable, "-m", "hpc_train", "train"]
        for key, value in {**options, "run.dir": folder}.items():
            command += [f"--{key}", str(value)]
        done = self._run([*command, *words], gpu=gpu, seconds=seconds)
        run = Run(folder, done.returncode, done.stdout + done.stderr)
        assert fails == bool(run.code), f"exit code {run.code}: {run.last_lines}"
        return run

    def _run(
        self, command: Sequence[str], *, gpu: bool, seconds: float
    ) -> subprocess.CompletedProcess[str]:
        limit = max(1.0, min(seconds, self.left()))
        # A session of its own, so that all of its ranks can be ended.
        with subprocess.Popen(
            command,
            env=self.environ(gpu=gpu),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        ) as program:
            try:
                out, errors = program.communicate(timeout=limit)
            except subprocess.TimeoutExpired as slow:
                # Launchers start ranks in groups of their own.
                children = psutil.Process(program.pid).children(recursive=True)
                os.killpg(program.pid, signal.SIGKILL)
                for child in children:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        child.kill()
                raise AssertionError(f"it did not end in {limit:.0f} s") from slow
        return subprocess.CompletedProcess(command, program.returncode, out, errors)


def launcher(ranks: int) -> list[str]:
    """The words in front of a command that start it on some ranks."""
    return [] if ranks == 1 else ["mpirun", "-np", str(ranks)]


Check = Callable[[Lab], Found]
