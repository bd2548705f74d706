"""Checks of benchmarks.gpu that results on a GPU are those of a processor."""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.gpu_lab import Check, Found, Lab, Run, Skipped
from hpc_train.mpi import runtime

Options = Mapping[str, object]

STEPS = 12
NEAR_CHANCES = 1e-8  # of probabilities after 40 steps in float64
CLOSE = 1e-10  # relative, of losses in float64
MOST_MEMORY = 1.5  # of a GPU with the host's optimizer, per byte of parameters in small buckets
NEAR = {"bfloat16": 2e-2, "float16": 4e-3}  # relative, of losses; as in tests/system/test_precision
FIXED: Options = {
    "run.steps": STEPS,
    "run.log_every": 1,
    "run.preflight": "false",
    "data.batch": 16,
    "optimizer.lr": 0.003,
    "precision.dtype": "float64",
    "memory.zero": 0,
}
GPT: Options = {
    "model.layers": 4,
    "model.hidden": 64,
    "model.heads": 4,
    "model.sequence": 64,
    "model.dropout": 0.1,
}
TABULAR: Options = {"model.kind": "tabular", "model.layers": 2, "model.hidden": 32}
HUGE: Options = {
    "model.layers": 12,
    "model.hidden": 2048,
    "model.heads": 16,
    "model.sequence": 1024,
    "data.batch": 2048,
    "run.steps": 1,
    "precision.dtype": "float32",
}


@dataclass(frozen=True)
class Case:
    """A way to train that has the losses of one rank on a processor.

    Args:
        options: keys of the configuration that make it another way.
        ranks: number of ranks.
        words: further words of the command.
        horovod: whether it needs Horovod.
        gpu: whether it needs a GPU.
        own: whether each rank needs a GPU of its own.
        reference: keys that the run on a processor has, too.
        of_table: whether the model is one of tables.
    """

    options: Options = field(default_factory=dict)
    ranks: int = 1
    words: tuple[str, ...] = ()
    horovod: bool = False
    gpu: bool = False
    own: bool = False
    reference: Options = field(default_factory=dict)
    of_table: bool = False


PIPELINE = {"parallel.pp": 2, "data.micro_batch": 4}
HOST = {"memory.offload": "optimizer"}
LLAMA = {"model.kind": "llama", "model.kv_heads": 2}
QWEN = {"model.kind": "qwen3", "model.kv_heads": 2}
CASES = {
    "one rank": Case(),
    "one rank, started cold": Case(words=("--cold",)),
    "two ranks": Case(ranks=2),
    "two ranks, Horovod": Case({"gradients.engine": "horovod"}, 2, horovod=True),
    "two ranks, NCCL": Case({"gradients.engine": "nccl"}, 2, own=True),
    "two ranks, own steps": Case(
        {"gradients.average_every": 3}, 2, reference={"gradients.average_every": 3}
    ),
    "tensor parallel": Case({"parallel.tp": 2}, 2),
    "sequence parallel": Case({"parallel.tp": 2, "parallel.sequence_parallel": "true"}, 2),
    "pipeline, 1f1b": Case(PIPELINE, 2),
    "pipeline, zero bubble": Case({**PIPELINE, "parallel.schedule": "zero_bubble"}, 2),
    "micro-batches": Case({"data.micro_batch": 4}),
    "micro-batches by memory": Case({"data.micro_batch": "auto"}),
    "compiled": Case({"run.compile": "true"}),
    "compiled, two ranks": Case({"run.compile": "true", "memory.recompute": "full"}, 2),
    "recomputation": Case({"memory.recompute": "full"}),
    "host optimizer": Case({**HOST, "memory.zero": 1}, gpu=True),
    "host optimizer, compiled": Case({**HOST, "memory.zero": 1, "run.compile": "true"}, gpu=True),
    "host optimizer, two ranks, zero 1": Case({**HOST, "memory.zero": 1}, 2, gpu=True),
    "host optimizer, two ranks, zero 2": Case({**HOST, "memory.zero": 2}, 2, gpu=True),
    "fine-tuning": Case(ranks=2, reference={"finetune.lora": 2}),
    "Llama, compiled": Case({"run.compile": "true"}, reference=LLAMA),
    "Qwen, tensor parallel": Case({"parallel.tp": 2}, 2, reference=QWEN),
    "a table": Case(ranks=2, of_table=True),
}


def reference(lab: Lab, case: Case) -> Run:
    """The run of a case on processors: of one rank, if that has the same losses."""
    ranks = case.ranks if "gradients.average_every" in case.reference else 1
    more, of_table = case.reference, case.of_table

    def trained() -> Run:
        return lab.train(options(lab, more, of_table=of_table), ranks=ranks, gpu=False)

    return lab.once((ranks, of_table, *more.items()), trained)


def options(lab: Lab, more: Options, *, of_table: bool = False) -> Options:
    """The keys of a small training."""
    model = TABULAR if of_table else GPT
    if "finetune.lora" in more:
        more = {**more, "checkpoint.weights": reference(lab, Case()).folder}
    return {**FIXED, **model, "data.path": lab.table if of_table else lab.text, **more}


def difference(found: Run, expected: Run) -> float:
    """The largest relative difference of two runs' losses."""
    pairs = list(zip(found.losses, expected.losses, strict=True))
    assert pairs, "there are no losses"
    return max(abs(mine - theirs) / abs(theirs) for mine, theirs in pairs)


def same_losses(name: str, lab: Lab) -> Found:
    """Check one of CASES."""
    case = CASES[name]
    if case.horovod and not runtime.horovod_built():
        raise Skipped("Horovod is not built: python -m hpc_train.build.horovod")
    if case.gpu and not lab.gpu:
        raise Skipped("it needs a GPU")
    if case.own and lab.software["gpus"] < case.ranks:
        raise Skipped(f"it needs {case.ranks} GPUs")
    if case.of_table:
        needs("pyarrow")
    expected = reference(lab, case)
    more = {**case.reference, **case.options}
    found = lab.train(
        options(lab, more, of_table=case.of_table), ranks=case.ranks, words=case.words
    )
    off = difference(found, expected)
    assert off < CLOSE, f"losses differ by {off:.1e}, which is more than {CLOSE:.0e}"
    assert "cannot be pinned" not in found.output, "the node's memory cannot be pinned"
    return Found(f"{STEPS} losses in float64 differ by {off:.1e}", {"difference": off})


def needs(module: str) -> None:
    """Skip a check if a module is missing."""
    if find_spec(module) is None:
        raise Skipped(f"it needs {module}")


def own_loop(lab: Lab) -> Found:
    """Check that loops of one's own on two ranks have the parameters of one process."""
    needs("pytest")
    told: dict[str, Any] = lab.found_by("benchmarks.gpu_own_loop", ranks=2)
    found: dict[str, float] = told["differences"]
    worst = max(found, key=found.__getitem__)
    assert found[worst] < CLOSE, f"parameters differ by {found[worst]:.1e} ({worst})"
    most = told["most memory"]
    assert most < MOST_MEMORY, f"the host's optimizer takes the parameters' memory {most:.2f} times"
    reads = "reads" if told["MPI reads GPU memory"] else "does not read"
    text = (
        f"parameters differ by {found[worst]:.1e} in {len(found)} ways to average; MPI {reads} GPU "
        "memory"
    )
    return Found(text, found)


def estimator(lab: Lab) -> Found:
    """Check that a classifier of tables that was fitted on a GPU predicts as one that was not."""
    needs("sklearn")
    mine, theirs = (
        lab.found_by("benchmarks.gpu_loops", "estimator", gpu=gpu)["chances"]
        for gpu in (True, False)
    )
    off = max(abs(a - b) for a, b in zip(mine, theirs, strict=True))
    assert off < NEAR_CHANCES, f"probabilities differ by {off:.1e}"
    return Found(f"probabilities differ by {off:.1e}", {"difference": off})


def read(lab: Lab) -> Found:
    """Check that a GPU writes and predicts from checkpoints what a processor does."""
    needs("pyarrow")
    run = str(reference(lab, Case()).folder)
    words = ["generate", run, "--temperature", "0", "--tokens", "40", "--prompt", "import "]
    texts = [lab.command(*words, gpu=gpu) for gpu in (True, False)]
    assert texts[0] == texts[1], f"texts differ: {texts}"
    run = str(reference(lab, Case(of_table=True)).folder)
    scores = []
    for ranks, gpu in ((2, True), (1, False)):
        out = lab.folder / f"predicted-{ranks}"
        words = ["predict", run, str(lab.table.with_suffix(".csv")), "--out", f"{out}.csv"]
        # All rows at once: products of other sizes may differ in the last bit, and move ranks.
        more = ["--scores", f"{out}.json", "--batch", "512"]
        lab.command(*words, *more, ranks=ranks, gpu=gpu)
        scores.append(json.loads(Path(f"{out}.json").read_text(encoding="utf-8")))
    off = max(abs(scores[0][name] - value) for name, value in scores[1].items())
    assert off < CLOSE, f"scores differ by {off:.1e}"
    return Found(f"the same text; scores of a table differ by {off:.1e}", {"difference": off})


def tools(lab: Lab) -> Found:
    """Check that the doctor and the measurement of collectives know the GPU."""
    lines = lab.command("doctor").splitlines()
    devices = next(" ".join(line.split()) for line in lines if " devices" in line)
    assert devices.startswith("ok"), devices
    assert not lab.gpu or "CPU only" not in devices, devices
    lab.command("info", "collectives", "--seconds", "5", ranks=2)
    return Found(f"the doctor says: {devices}")


def short_numbers(dtype: str, lab: Lab) -> Found:
    """Check that losses in 16-bit numbers are near those in float64."""
    found = lab.train(options(lab, {"precision.dtype": dtype}))
    off = difference(found, reference(lab, Case()))
    assert off < NEAR[dtype], f"losses differ by {off:.1e} from float64's"
    return Found(f"losses differ by {off:.1e} from float64's", {"difference": off})


def repeats(ranks: int, lab: Lab) -> Found:
    """Check that a deterministic run in float32 repeats bit for bit, also after a resume."""
    more = {"run.deterministic": "true", "precision.dtype": "float32", "checkpoint.every": 4}
    given = options(lab, more)
    first, second = (lab.train(given, ranks=ranks) for _ in range(2))
    assert numbers(first) == numbers(second), "two runs of the same job differ"
    broken = lab.folder / f"broken-{ranks}"
    half = lab.train({**given, "run.dir": broken, "run.steps": STEPS // 2}, ranks=ranks)
    again = lab.train({**given, "run.dir": broken}, ranks=ranks)
    assert half.folder == again.folder
    assert numbers(again) == numbers(first), "a run that was resumed differs"
    return Found("the same bits in three runs, one of them resumed")


def numbers(run: Run) -> list[tuple[float, float]]:
    """The loss and the gradient's norm of each step."""
    return [(record["loss"], record["grad_norm"]) for record in run.records]


def other_layout(lab: Lab) -> Found:
    """Check that a checkpoint of two ranks that share a GPU goes on on one processor."""
    expected = reference(lab, Case())
    given = options(lab, {"run.dir": lab.folder / "moved", "checkpoint.every": 4})
    lab.train({**given, "run.steps": 8, "parallel.tp": 2}, ranks=2)
    off = difference(lab.train(given, gpu=False), expected)
    assert off < CLOSE, f"losses differ by {off:.1e}"
    return Found(f"losses differ by {off:.1e}", {"difference": off})


def refusals(lab: Lab) -> Found:
    """Check that what does not work on a GPU is refused in one line with exit code 2."""
    if not lab.gpu:
        raise Skipped("processors refuse nothing of it")
    tried: list[tuple[Options, int, str]] = [
        ({"memory.zero": 3}, 1, "memory.zero"),
        ({"memory.zero": 1}, 1, "memory."),
    ]
    if lab.software["gpus"] == 1:
        tried.append(({"gradients.engine": "nccl"}, 2, "share a GPU"))
    for more, ranks, named in tried:
        run = lab.train(options(lab, more), ranks=ranks, fails=True)
        lines = [line for line in run.output.splitlines() if "error:" in line]
        assert run.code == 2, f"{more}: exit code {run.code}: {run.last_lines}"
        assert len(lines) == 1, f"{more}: {run.last_lines}"
        assert named in lines[0], lines[0]
        assert "Traceback" not in run.output, run.last_lines
    return Found(f"{len(tried)} ways to train are refused, and the lines name the cause")


def exhausted(lab: Lab) -> Found:
    """Check that a run that needs too much of a GPU's memory says which keys need less.

    Or it names one setting whose need it predicts. Then that has to fit.
    """
    if not lab.gpu:
        raise Skipped("it would take the memory of this machine")
    run = lab.train(options(lab, HUGE), fails=True, seconds=90)
    assert "data.micro_batch" in run.output, f"data.micro_batch is not named: {run.last_lines}"
    if predicted := re.search(r"\(needs ([\d.]+) GiB\)", run.output):
        need, there = float(predicted[1]), lab.software["gpu_bytes"] / 2**30
        assert need < there, f"it names a setting that needs {need} of {there:.1f} GiB"
    else:
        assert "memory.recompute" in run.output, f"memory.recompute is not named: {run.last_lines}"
    return Found(f"exit code {run.code}, and what needs less is named")


def finite(lab: Lab) -> Found:
    """Check that a run whose loss becomes infinite ends before its step is taken."""
    given = options(lab, {"optimizer.lr": 1e30, "precision.dtype": "float32"})
    run = lab.train({**given, "optimizer.clip_norm": 0}, fails=True)
    assert "Traceback" not in run.output, run.last_lines
    assert all(map(math.isfinite, run.losses)), "a loss is infinite in metrics.jsonl"
    return Found(f"exit code {run.code} after {len(run.losses)} steps")


TOGETHER: Mapping[str, Check] = {
    **{name: functools.partial(same_losses, name) for name in CASES},
    "own loop": own_loop,
    "an estimator": estimator,
    "checkpoints are read": read,
    "tools": tools,
    **{dtype: functools.partial(short_numbers, dtype) for dtype in NEAR},
    "repeated and resumed": functools.partial(repeats, 1),
    "repeated and resumed, two ranks": functools.partial(repeats, 2),
    "another layout": other_layout,
    "refusals": refusals,
    "infinite losses": finite,
}
"""Checks that can be carried out side by side."""

CHECKS: Mapping[str, Check] = {**TOGETHER, "memory runs out": exhausted}
