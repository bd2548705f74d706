"""Seconds and bytes of `hpc-train report` for a run of a million logged steps.

    python -m benchmarks.report [--steps 1000000] [--rounds 3]

The run has 23 numbers per step, as a GPT has, and a validation each 500 steps. One loss of them
is extraordinary: the page must have it. Beside the whole command stands the time in which Python's
json module alone parses the same lines, which is the limit of what a reader in Python can reach.
`again` is the time to make the page once more after 100 new steps, as a live page does.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks import harness
from hpc_train.report.page import LiveReport

VARIANTS = 5000  # different lines, apart from step and time
SPIKE = 123450  # the page gives five digits
NAMES = (
    *("loss", "lr", "grad_norm", "samples_per_second", "tokens_per_second", "step_seconds"),
    *("data_seconds", "forward_seconds", "backward_seconds", "comm_seconds"),
    *("optimizer_seconds", "save_seconds", "evaluation_seconds", "memory_gb", "tflops", "mfu"),
    *("joules", "node_hours", "restarts", "lost_steps", "skipped_steps", "epoch"),
)


def write_run(run: Path, steps: int) -> None:
    """Write metrics.jsonl, with one extraordinary loss at a third of the steps."""
    source = random.Random(1)
    rests = [
        json.dumps({name: source.lognormvariate(0, 1) for name in NAMES})[1:-1]
        for _ in range(VARIANTS)
    ]
    with (run / "metrics.jsonl").open("w") as file:
        for step in range(1, steps + 1):
            rest = rests[step * 7919 % VARIANTS]
            if step == steps // 3:
                rest = f'{rest}, "loss": {SPIKE}'  # the later one of two equal keys counts
            if step % 500 == 0:
                rest = f'{rest}, "validation_loss": {source.random()}'
            file.write(f'{{"step": {step}, {rest}, "time": {1.7e9 + step * 0.25}}}\n')


def parse(path: Path) -> float:
    """Seconds in which the json module parses all lines."""
    begin = time.perf_counter()
    with path.open("rb") as file:
        for line in file:
            json.loads(line)
    return time.perf_counter() - begin


def make(run: Path) -> float:
    """Seconds of the command."""
    begin = time.perf_counter()
    command = [sys.executable, "-m", "hpc_train", "report", str(run)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    seconds = time.perf_counter() - begin
    if str(SPIKE) not in (run / "report.html").read_text():
        raise RuntimeError("the page has lost the greatest loss")
    return seconds


def usage(run: Path) -> dict[str, float]:
    """Most MB of the command's resident set, and the seconds of a core that it takes."""
    code = (
        "import resource, sys; from hpc_train.cli import main; main(['report', sys.argv[1]]);"
        "used = resource.getrusage(resource.RUSAGE_SELF);"
        "print(used.ru_maxrss, used.ru_utime + used.ru_stime)"
    )
    command = [sys.executable, "-c", code, str(run)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    kib, seconds = done.stdout.split()[-2:]
    return {"peak memory, MB": int(kib) * 1024 / 1e6, "core, s": float(seconds)}


def again(run: Path) -> float:
    """Seconds to make the page once more after new steps."""
    report = LiveReport([run])
    report.html()
    with (run / "metrics.jsonl").open("a") as file:
        file.writelines(f'{{"step": {step}, "loss": 1.0}}\n' for step in range(10**9, 10**9 + 100))
    begin = time.perf_counter()
    report.html()
    return time.perf_counter() - begin


def main() -> None:
    """Write the run, make its report, print the figures."""
    options = harness.arguments("a report of many steps", steps=1_000_000, rounds=3)
    with tempfile.TemporaryDirectory() as name:
        run = Path(name, "run")
        run.mkdir()
        write_run(run, options.steps)
        metrics = run / "metrics.jsonl"
        samples = harness.in_turn(
            {"report": lambda: make(run), "json alone": lambda: parse(metrics)}, options.rounds, 0
        )
        harness.show(f"{options.steps} steps", "s", samples, "json alone")
        figures = {
            "metrics.jsonl, MB": metrics.stat().st_size / 1e6,
            "report.html, MB": (run / "report.html").stat().st_size / 1e6,
            "again, s": again(run),
        } | usage(run)
    for text, value in figures.items():
        print(f"{text}: {value:.3g}")
    ratios = {"report / json alone": harness.paired_ratio(samples, "report", "json alone")}
    harness.finish("report", ratios, harness.medians(samples) | figures, options.json)


if __name__ == "__main__":
    main()
