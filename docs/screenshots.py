"""Takes the pictures of docs/how-to/report.md with a headless Chromium.

    python -m docs.screenshots

The reports are of made-up runs: a formula gives their numbers, and nothing was trained. A run of
two nodes loses a node, is stopped by its time limit, and has a slow rank. A sweep has twelve tasks.
"""

from __future__ import annotations

import json
import math
import random
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from docs.browser import Page, chromium, started
from hpc_train.report.page import report_of

PICTURES = Path(__file__).parent / "how-to" / "report"
BEGIN = 1_790_000_000  # seconds since 1970
STEPS, EVERY = 20_000, 10
SECONDS = 0.42  # of a step
BATCH, SEQUENCE = 256, 512
HOSTS = ("node1", "node2")
SHARES = {  # of a step, by phase
    "data": 0.015,
    "forward": 0.27,
    "backward": 0.49,
    "comm": 0.13,
    "optimizer": 0.05,
    "save": 0.006,
    "evaluation": 0.01,
}
WHY = "its compute took 90 ms longer than that of the other ranks, at 1.9 GHz where they have 2.7"


@dataclass(frozen=True)
class Attempt:
    """A start of the made-up run.

    Args:
        after: the step after which it trains.
        last: its last finished step.
        begin: seconds after the run's begin.
        end: what its end is written as: the keys of the event "end", or of launch.jsonl.
    """

    after: int
    last: int
    begin: float
    end: Mapping[str, Any]


ATTEMPTS = (
    Attempt(0, 7_340, 0, {"code": 1, "cause": "host node3 does not answer"}),
    Attempt(7_000, 14_120, 3_400, {"reason": "stopped", "why": "the time limit of the job"}),
    Attempt(14_120, STEPS, 7_200, {"reason": "finished"}),
)


def made_up_run(folder: Path) -> Path:
    """Write the files of the made-up run. Returns its folder."""
    folder.mkdir(parents=True)
    chance = random.Random(1)
    records, events, launches = [], [], []
    for number, one in enumerate(ATTEMPTS):
        begin = BEGIN + one.begin
        events.append(start_event(begin, one.after, str(4711 + max(0, number - 1))))
        launches.append({"time": begin - 9, "event": "start", "restart": number, "ranks": 8})
        kept = ATTEMPTS[number + 1].after if number + 1 < len(ATTEMPTS) else STEPS
        for step in range(one.after + EVERY, kept + 1, EVERY):
            at = begin + (step - one.after) * SECONDS
            records.append(made_up_record(chance, step, at, 3e-3, slow=15_000 < step <= 15_600))
            if step in (15_010, 15_310, 15_600):
                events.append(slow_event(step, at))
        end = begin + (one.last - one.after) * SECONDS + 5
        if "reason" in one.end:
            last = {"time": end, "event": "end", "step": one.last} | dict(one.end)
            events += [communication_event(step, end) for step in [one.last] if step == STEPS]
            events.append(last)
        else:
            launches.append({"time": end, "event": "end", "step": one.last} | dict(one.end))
    write_lines(folder / "metrics.jsonl", records)
    write_lines(folder / "events.jsonl", events)
    write_lines(folder / "launch.jsonl", launches)
    (folder / "config.yaml").write_text(yaml.safe_dump(configuration(3e-3, 8), sort_keys=False))
    texts = {2_000: "the the of and", 20_000: "the river rose in the night, and by morning"}
    samples = [
        {"step": step, "prompt": "It rained, and ", "text": text} for step, text in texts.items()
    ]
    write_lines(folder / "samples.jsonl", samples)
    return folder


def made_up_sweep(folder: Path) -> Path:
    """Write the files of a made-up sweep of twelve tasks. Returns its folder."""
    folder.mkdir(parents=True)
    choices = [(lr, layers) for lr in (3e-4, 1e-3, 3e-3, 1e-2) for layers in (4, 8, 12)]
    tasks = {}
    for number, (lr, layers) in enumerate(choices):
        tasks[str(number)] = [f"--optimizer.lr={lr:g}", f"--model.layers={layers}"]
        task, chance = folder / f"task-{number}", random.Random(number)
        task.mkdir()
        steps = range(EVERY, 2_001, EVERY)
        write_lines(
            task / "metrics.jsonl",
            [
                made_up_record(chance, step, BEGIN + step * SECONDS, lr, layers=layers)
                for step in steps
            ],
        )
        config = configuration(lr, layers)
        (task / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    (folder / "tasks.json").write_text(json.dumps(tasks))
    return folder


def made_up_record(
    chance: random.Random, step: int, at: float, lr: float, *, layers: int = 8, slow: bool = False
) -> dict[str, Any]:
    """A record of metrics.jsonl by a formula that looks like a training."""
    off = abs(math.log10(lr / 2e-3))  # the best learning rate is 2e-3
    loss = 2.2 + 0.35 * off - 0.02 * layers + 5.2 * (1 + step * lr / 0.4) ** -0.55
    warmup, done = min(1.0, step / 400), step / STEPS
    seconds = SECONDS * layers / 8 * chance.uniform(0.97, 1.06) + (0.09 if slow else 0)
    record: dict[str, Any] = {
        "step": step,
        "epoch": 1 + step // 9_000,
        "loss": loss + chance.gauss(0, 0.04),
        "lr": lr * warmup * (0.55 + 0.45 * math.cos(math.pi * done)),
        "grad_norm": 0.35 + 2.5 / (1 + step / 90) + abs(chance.gauss(0, 0.05)),
        "samples_per_second": BATCH / seconds,
        "tokens_per_second": BATCH * SEQUENCE / seconds,
        "step_seconds": seconds,
        "memory_gb": 11.2 + 0.4 * min(1, step / 3_000),
        "tflops": 31.0 * SECONDS / seconds,
        "mfu": 0.43 * SECONDS / seconds,
        "joules": 410.0 * 2 * step * SECONDS,
        "node_hours": 2 * step * SECONDS / 3600,
        "time": round(at, 3),
    }
    for phase, share in SHARES.items():
        record[f"{phase}_seconds"] = share * SECONDS * layers / 8 * chance.uniform(0.95, 1.05)
    if slow:
        record |= {"slow_rank": 5, "slow_seconds": 0.09}
        record["comm_seconds"] += 0.09
    if step % 1_000 == 0:
        record["validation_loss"] = loss + 0.06
    return record


def start_event(at: float, after: int, job: str) -> dict[str, Any]:
    """The event "start" of eight ranks on two hosts."""
    return {
        "time": at,
        "event": "start",
        "step": after,
        "after": after,
        "job": f"slurm:{job}",
        "version": "made up",
        "device": "cpu",
        "cores": 16,
        "hosts": list(HOSTS),
        "layout": {"dp": 4, "tp": 2, "pp": 1},
        "ranks": [[rank // 4, rank // 2, rank % 2, 0] for rank in range(8)],
    }


def slow_event(step: int, at: float) -> dict[str, Any]:
    """The event that names rank 5."""
    told = {"rank": 5, "host": "node2", "cause": "compute", "seconds": 0.09, "share": 0.18}
    return {"time": at, "event": "slow", "step": step} | told | {"why": WHY}


def communication_event(step: int, at: float) -> dict[str, Any]:
    """The event that says how fast each operation was."""
    operations = [
        {"name": "gradients, across nodes", "bytes": 4.2e12, "seconds": 940.0},
        {"name": "tensor-parallel sums", "bytes": 2.6e12, "seconds": 150.0},
    ]
    for operation, limit in zip(operations, (6.1e9, 2.2e10), strict=True):
        operation["bandwidth"] = float(operation["bytes"]) / float(operation["seconds"])
        operation["limit"] = limit
    return {"time": at, "event": "communication", "step": step, "operations": operations}


def configuration(lr: float, layers: int) -> dict[str, Any]:
    """The configuration of a made-up run."""
    return {
        "run": {"dir": "runs/made-up", "steps": STEPS, "log_every": EVERY, "seed": 1},
        "model": {"kind": "gpt", "layers": layers, "hidden": 512, "sequence": SEQUENCE},
        "data": {"path": "data/made-up", "batch": BATCH, "validation_every": 1_000},
        "parallel": {"dp": 4, "tp": 2, "pp": 1},
        "optimizer": {"lr": lr, "warmup_steps": 400, "schedule": "cosine"},
    }


def write_lines(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Write a file of JSON lines."""
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records), encoding="utf-8")


def take(page: Page, name: str, begin: str, height: int) -> None:
    """Write a picture of the page, from an element on."""
    top = page.evaluate(f"{begin}.getBoundingClientRect().top + window.scrollY") - 12
    width = page.evaluate("document.documentElement.clientWidth")
    whole = page.evaluate("document.documentElement.scrollHeight")
    top = max(0, min(top, whole - 100))
    picture = page.picture((0, top, width, min(height, whole - top)))
    (PICTURES / f"{name}.png").write_bytes(picture)
    print(f"{PICTURES / name}.png ({len(picture) / 1e3:.0f} kB)")


def main() -> int:
    """Take the pictures. Returns the exit code."""
    program = chromium()
    if program is None:
        print("docs.screenshots: error: there is no Chromium: install it", file=sys.stderr)
        return 2
    PICTURES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as name, started(program) as browser:
        folder = Path(name)
        pages = {}
        for made in (made_up_run(folder / "made-up-run"), made_up_sweep(folder / "made-up-sweep")):
            pages[made.name] = folder / f"{made.name}.html"
            pages[made.name].write_text(report_of([made]))
        page = browser.open()
        page.show(1080, 900)
        page.go(pages["made-up-run"].as_uri())
        take(page, "desktop", "document.body", 1130)
        take(page, "story", "document.querySelector('#phases')", 1130)
        page.show(360, 780)
        page.go(pages["made-up-run"].as_uri())
        take(page, "phone", "document.querySelector('#curves')", 1000)
        page.show(1080, 900, dark=True)
        page.go(pages["made-up-sweep"].as_uri())
        take(page, "dark", "document.querySelector('#curves')", 445)
        take(page, "sweep", "document.querySelector('#sweep')", 720)
    return 0


if __name__ == "__main__":
    sys.exit(main())
