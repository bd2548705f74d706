"""Run the program as a user does: through its command line, under a launcher."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from hpc_train.mpi import environment
from hpc_train.warm import stand_in
from hpc_train.warm.key import LINGER, LOAD
from hpc_train.warm.key import WARM as NAME
from tests.waiting import PATIENCE, wait_until

# Ranks are forked from one process for all tests, which imports the libraries but not the package;
# HPC_TRAIN_WARM=off starts each one cold.
WARM = {
    NAME: os.environ.get(NAME) or f"tests-{os.getpid()}",
    LINGER: "60",
    LOAD: "libraries",
}
COLD = {NAME: "off"}
FORKED = (
    "train",
    "generate",
    "checkpoint",
    "topology",
    "prepare",
    "predict",
    "info",
)  # verbs that load libraries
ENVIRON = (
    environment.for_launcher(os.environ)
    | WARM
    | {
        "OMP_NUM_THREADS": "1",
        # Each rank of Open MPI 4 sleeps for a second when this transport, which nobody uses here,
        # is closed: hundreds of times.
        "OMPI_MCA_btl": "^ofi",
        # Jobs run side by side: ranks that wait leave the cores to the other one's.
        "OMPI_MCA_mpi_yield_when_idle": "1",
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        # Programs are found as in an activated environment.
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
    }
)


def own_server(name: str) -> dict[str, str]:
    """Variables for a server that no other test uses, for tests that need their ranks to be warm.

    A server has the key of its first rank, and ranks with another key start cold.
    """
    return {NAME: f"{WARM[NAME]}-{name}"}


# `hpc-train launch` starts mpirun by its path. Such an mpirun adds to LD_LIBRARY_PATH, so its ranks
# have another key than all others.
LAUNCHED = own_server("launched")


LAUNCHERS = {
    "alone": [],
    "mpirun": ["mpirun", "-np"],
    "horovodrun": ["horovodrun", "-np"],
}


def command(launcher: str, ranks: int, *arguments: str) -> list[str]:
    """The command line that runs hpc-train on ranks."""
    start = LAUNCHERS[launcher]
    hosts = ["-H", f"localhost:{ranks}"] if launcher == "horovodrun" else []
    return [*start, *([str(ranks)] if start else []), *hosts, *hpc_train(*arguments)]


def hpc_train(*arguments: str) -> list[str]:
    """The command line that runs hpc-train in one process."""
    return python("-m", "hpc_train", *arguments, warm=bool({*FORKED} & {*arguments[:1]}))


def python(*program: str, warm: bool = True) -> list[str]:
    """The command line that runs a module or script in one process."""
    return stand_in.command(program) if warm else [sys.executable, *program]


def run(
    *words: str,
    timeout: float = PATIENCE,
    environ: dict[str, str] | None = None,
    cwd: Path | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end; its output is text."""
    return subprocess.run(
        words,
        capture_output=True,
        text=True,
        timeout=timeout,
        env=ENVIRON | (environ or {}),
        cwd=cwd,
        check=False,
    )


@dataclass(frozen=True)
class Program:
    """A training configuration and the folder that its runs are written to."""

    config: Path
    root: Path

    def command(self, name: str, *options: str, launcher: str = "alone", ranks: int = 1):
        """The command line that trains into the run directory `name`."""
        train = ("train", str(self.config), "--run.dir", str(self.root / name), *options)
        return command(launcher, ranks, *train)

    def train(self, name: str, *options: str, launcher: str = "alone", ranks: int = 1, **how):
        """Train to the end; returns the finished process."""
        return run(*self.command(name, *options, launcher=launcher, ranks=ranks), **how)

    def metrics(self, name: str) -> list[dict]:
        """A run's records."""
        lines = (self.root / name / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    def losses(self, name: str) -> list[float]:
        """A run's losses, in the order of its steps."""
        found = self.metrics(name)
        assert [record["step"] for record in found] == list(range(1, len(found) + 1))
        return [record["loss"] for record in found]

    def checkpoint(self, name: str, step: int) -> Path:
        """A checkpoint of a run."""
        return self.root / name / "checkpoints" / f"step-{step:09d}.safetensors"


def only_line(text: str) -> str:
    """The one line that hpc-train printed as an error; launchers add lines of their own."""
    lines = [line for line in text.splitlines() if "hpc-train: error:" in line]
    assert len(lines) == 1, text
    return lines[0].split("hpc-train: error:")[1].strip()


def hear_ctrl_c() -> None:
    """For `preexec_fn`: a program started from a script's background would ignore SIGINT.

    One that is started after a test has held signals back would have it blocked.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def ranks_of(launcher: subprocess.Popen) -> list[psutil.Process]:
    """The ranks that a launcher has started, and that are still there."""
    with suppress(psutil.Error):
        children = psutil.Process(launcher.pid).children(recursive=True)
        return [process for process in children if _is_python(process)]
    return []


def _is_python(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return "python" in process.name()
    return False


def processes_of(directory: Path) -> list[psutil.Process]:
    """The processes that have been given this folder on their command line."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if str(directory) in process.cmdline() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def wait_for_end(directory: Path, seconds: float) -> None:
    """Wait for the processes of a folder: a launcher may be dead before its ranks are.

    Raises:
        TimeoutError: a process of the folder has not ended by then.
    """
    wait_until(lambda: not processes_of(directory), seconds)


def read_until(process, text):
    """Read the output of a process up to a line with a text; returns what was read."""
    read = []
    for line in process.stdout:
        read.append(line)
        if text in line:
            return "".join(read)
    raise AssertionError("".join(read))


def modules_of(*arguments: object) -> tuple[int, str, set[str]]:
    """A command's exit code, what it prints, and the modules that it has loaded at its end."""
    program = (
        "import atexit, sys; from hpc_train.cli import main\n"
        "atexit.register(lambda: print(*sys.modules))\n"
        "sys.exit(main(sys.argv[1:]))"
    )
    done = run(sys.executable, "-c", program, *map(str, arguments))
    *printed, modules = done.stdout.splitlines()
    return done.returncode, "\n".join([*printed, done.stderr]), set(modules.split())
