"""`make demo`: train a GPT on Python's own sources, stop it in the middle, resume it, check it.

It runs four ranks under horovodrun, or under mpirun if horovodrun does not support the MPI. A
second, shorter run starts from the checkpoint before the stop and does not stop there. If its
losses and its next checkpoint differ from the first run's in any bit, the demo fails. `--every 30`
makes the demo shorter.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import psutil

from hpc_train.mpi import environment

CONFIG = Path(__file__).with_name("python_sources.yaml")
FOLDER = Path("runs/demo")
DATA, RUN, CHECK = FOLDER / "data", FOLDER / "run", FOLDER / "check"
RANKS = 4
EVERY = 100  # steps between two checkpoints, as in CONFIG
PROMPT = "class Reader:\n    def __init__(self, "
EXIT_STOPPED = 75


class DemoError(Exception):
    """A part of the demo failed."""


def main(every: int = EVERY) -> int:
    """Run the demo with `every` steps between two checkpoints. Returns the exit code."""
    begin = time.monotonic()
    shutil.rmtree(FOLDER, ignore_errors=True)
    try:
        prepare()
        stopped = train_and_stop(every)
        resume(every)
        compare_with_an_uninterrupted_run(stopped, every)
        show_results(stopped)
        show_sample()
    except DemoError as error:
        print(f"demo: failed: {error}", file=sys.stderr)
        return 1
    show_next_steps(time.monotonic() - begin)
    return 0


def prepare() -> None:
    """Turn the standard library's modules into byte tokens."""
    title("Prepare the standard library's own sources")
    library = Path(sysconfig.get_path("stdlib"))
    sources = [str(path) for path in sorted(library.glob("*.py"))]
    command = [*hpc_train("prepare", "text"), *sources, "--out", str(DATA), "--validation", "0.05"]
    print(f"$ hpc-train prepare text {library}/*.py --out {DATA} --validation 0.05", flush=True)
    if subprocess.run(command, check=False).returncode:
        raise DemoError("the text could not be prepared")


def train_and_stop(every: int) -> int:
    """Train, and send a signal to one rank in the middle. Returns the newest checkpoint's step."""
    title(f"Train on {RANKS} ranks; one of them gets SIGTERM somewhere in the middle")
    at = 4 * every + random.randrange(every // 10, every * 7 // 10)
    code = train(RUN, every, lambda: last_step(RUN) >= at, signal.SIGTERM)
    stopped = last_step(RUN)
    if code != EXIT_STOPPED or stopped >= 5 * every:
        raise DemoError(f"stopped after step {stopped} with exit code {code}, not {EXIT_STOPPED}")
    print(f"exit code {code}: stopped early with a checkpoint, run me again")
    return newest_checkpoint(RUN)


def resume(every: int) -> None:
    """Start the same command again."""
    title("Start the same command again: it resumes from there")
    code = train(RUN, every)
    if code:
        raise DemoError(f"the resumed run ended with exit code {code}")


def compare_with_an_uninterrupted_run(stopped: int, every: int) -> None:
    """Train again from the checkpoint before the stop, without stopping, and compare every bit."""
    before = stopped // every * every
    after = before + every
    title(f"Was that exact? Train steps {before + 1} to {after} again, without the stop")
    (CHECK / "checkpoints").mkdir(parents=True)
    shutil.copy(checkpoint(RUN, before), CHECK / "checkpoints")
    reached = checkpoint(CHECK, after)
    code = train(CHECK, every, reached.exists, signal.SIGUSR1)
    if code not in (0, EXIT_STOPPED):
        raise DemoError(f"the uninterrupted run ended with exit code {code}")
    steps = range(before + 1, after + 1)
    both = [[r["loss"] for r in records(run) if r["step"] in steps] for run in (RUN, CHECK)]
    if both[0] != both[1]:
        raise DemoError(f"the resumed run's losses {both[0]} are not the uninterrupted {both[1]}")
    if checkpoint(RUN, after).read_bytes() != reached.read_bytes():
        raise DemoError(f"the checkpoints of step {after} differ")
    print(
        f"exact: {len(both[0])} losses and the checkpoint of step {after} "
        f"({reached.stat().st_size / 1e6:.1f} MB) are the same to the last bit"
    )


def show_results(stopped: int) -> None:
    """Print the losses and the speed of the run."""
    title("Results")
    found = records(RUN)
    last = found[-1]
    before = max((r for r in found if r["step"] <= stopped), key=lambda r: r["step"])
    after = min((r for r in found if r["step"] > stopped), key=lambda r: r["step"])
    held_out = [r for r in found if "validation_loss" in r]
    speed = statistics.median(r["tokens_per_second"] for r in found)
    for label, value in (
        ("loss at the start", f"{found[0]['loss']:.4f} (step {found[0]['step']})"),
        ("loss before the stop", f"{before['loss']:.4f} (step {before['step']})"),
        ("loss after resuming", f"{after['loss']:.4f} (step {after['step']})"),
        ("loss at the end", f"{last['loss']:.4f} (step {last['step']})"),
        ("validation loss", " -> ".join(f"{r['validation_loss']:.4f}" for r in held_out)),
        ("tokens/s", f"{speed:.0f} on {RANKS} ranks and {os.cpu_count()} cores, median"),
    ):
        print(f"{label:<22}{value}")


def show_sample() -> None:
    """Let the model write some text."""
    title("What the model writes")
    words = ["generate", str(RUN), "--prompt", PROMPT, "--tokens", "500"]
    print(f"$ hpc-train generate {RUN} --prompt '{PROMPT}' --tokens 500\n")
    done = subprocess.run(hpc_train(*words), capture_output=True, text=True, check=False)
    if done.returncode:
        raise DemoError(f"the checkpoint gave no text: {done.stderr}")
    print(done.stdout)


def show_next_steps(seconds: float) -> None:
    """Print where the files are, and commands to run next."""
    title(f"Done in {seconds:.0f} s")
    print(f"""\
configuration    {RUN}/config.yaml, made from {CONFIG.relative_to(Path.cwd())}
metrics          {RUN}/metrics.jsonl
logs, each rank  {RUN}/logs
checkpoints      {RUN}/checkpoints, readable by the safetensors library
data             {DATA}

What to run next, after `. .venv/bin/activate`:
  hpc-train doctor                                what works on this machine
  hpc-train generate {RUN} --prompt 'import '      more text
  mpirun -np 2 hpc-train train examples/python_sources.yaml --run.dir runs/mine
  mpirun -np 2 python examples/own_loop.py        your own loop: compare own_loop_single.py
  mpirun -np 2 python examples/own_model.py       your own model and data set""")


def train(run: Path, every: int, until: Callable[[], bool] | None = None, number: int = 0) -> int:
    """Train on four ranks. Once `until` returns True, one gets a signal. Returns the exit code."""
    options = ["train", str(CONFIG.relative_to(Path.cwd())), "--run.dir", str(run)]
    if every != EVERY:
        options += ["--run.steps", str(8 * every), "--run.log_every", "1"]
        options += ["--checkpoint.every", str(every)]
    if launcher()[0] != "horovodrun":
        options += ["--gradients.engine", "auto"]
    command = [*launcher(), *hpc_train(*options)]
    shown = [*launcher(), "hpc-train", *options]
    print(f"$ {' '.join(shown)}", flush=True)
    environ = environment.for_launcher(os.environ)
    environ |= {"OMPI_MCA_rmaps_base_oversubscribe": "1"}
    environ |= {"PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe"}
    with subprocess.Popen(
        command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            text = re.sub(r"\[1,\d+\]<std\w+>: ?", "", line).strip()  # horovodrun's tags
            if text and "step" in text:
                print(text, flush=True)
            if until is not None and until():
                random.choice(ranks_of(process.pid)).send_signal(number)
                until = None
    return process.returncode


@cache
def launcher() -> list[str]:
    """The command line of a launcher: horovodrun, or mpirun without a horovodrun for this MPI."""
    version = subprocess.run(["mpirun", "--version"], capture_output=True, text=True, check=False)
    if shutil.which("horovodrun") and re.search(r"Open MPI\) [1-4]\.", version.stdout):
        return ["horovodrun", "-np", str(RANKS), "-H", f"localhost:{RANKS}"]
    return ["mpirun", "-np", str(RANKS)]


def ranks_of(launched: int) -> list[psutil.Process]:
    """The ranks among the descendants of a launcher's process."""
    processes = psutil.Process(launched).children(recursive=True)
    return [process for process in processes if environment.read_launch(process.environ())]


def hpc_train(*words: str) -> list[str]:
    """The command line that runs a verb of hpc-train."""
    return [sys.executable, "-m", "hpc_train", *words]


def records(run: Path) -> list[dict[str, Any]]:
    """The metrics that a run has written so far, one dict for each logged step."""
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines]


def last_step(run: Path) -> int:
    """The last step that a run has logged."""
    found = records(run)
    return found[-1]["step"] if found else 0


def checkpoint(run: Path, step: int) -> Path:
    """The checkpoint of a step."""
    return run / "checkpoints" / f"step-{step:09d}.safetensors"


def newest_checkpoint(run: Path) -> int:
    """The step of a run's newest checkpoint."""
    return int((run / "checkpoints" / "LATEST").read_text().strip()[5:-12])


def title(text: str) -> None:
    """Print a heading."""
    print(f"\n=== {text}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train, stop, resume, compare.")
    parser.add_argument("--every", type=int, default=EVERY, help="steps between two checkpoints")
    sys.exit(main(parser.parse_args().every))
