"""Checks of benchmarks.gpu that measure: the GPU's limits, training beside plain loops, and copies.

Checks of figures pass if they could be measured. Whether a figure is good is for the reader.
"""

from __future__ import annotations

import functools
import itertools
import json
import shutil
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec

import psutil

from benchmarks.gpu_lab import Check, Found, Lab, Run, Skipped
from benchmarks.gpu_results import Options
from hpc_train.config.sections import TEST_STEPS_LEAST
from hpc_train.monitoring.performance import PERFORMANCE

LOG_EVERY = 10
SAVE_EVERY = 40  # steps; half of them take longer than a save in the background
SAVES = 4


@dataclass(frozen=True)
class Load:
    """A GPT whose training is timed.

    Args:
        layers, hidden, heads, vocab, sequence: as in section model.
        batch: samples of a step.
        steps: number of steps of the program and of the loops.
    """

    layers: int
    hidden: int
    heads: int
    vocab: int
    sequence: int
    batch: int
    steps: int

    @property
    def shape(self) -> dict[str, int]:
        """The arguments of the model."""
        names = ("layers", "hidden", "heads", "vocab", "sequence")
        return {name: getattr(self, name) for name in names}

    @property
    def options(self) -> Options:
        """The keys of the configuration."""
        return {
            **{f"model.{name}": value for name, value in self.shape.items()},
            "data.batch": self.batch,
            "data.micro_batch": self.batch,
            "run.steps": self.steps,
            "run.log_every": LOG_EVERY,
            "precision.dtype": "bfloat16",
            "checkpoint.every": 0,
        }


LOADS = {
    "124 M": Load(12, 768, 12, 50304, 1024, 32, 60),
    "1.3 B": Load(24, 2048, 16, 50304, 1024, 8, 50),
}
SMALL = Load(2, 64, 4, 256, 64, 4, 40)  # on processors
# Layers and hidden sizes of ever smaller models, for the largest one that can be trained.
LADDER = ((48, 6144), (40, 5120), (32, 4096), (36, 3328), (36, 3072), (32, 2560), (24, 2048))


def load_of(lab: Lab, name: str) -> Load:
    """The load, or a small one on processors."""
    return LOADS[name] if lab.gpu else SMALL


def limits(lab: Lab) -> Found:
    """Measure what the GPU can do."""
    found: dict[str, float] = lab.loops("limits", "--size", "8192" if lab.gpu else "256")
    text = (
        f"bfloat16 {found['matrix bfloat16']:.3g}, float32 {found['matrix float32']:.3g}, float64 "
        f"{found['matrix float64']:.3g} TFLOP/s; copies from pinned memory "
        f"{found['copy to the device, pinned']:.3g}, to it {found['copy to the host, pinned']:.3g} "
        "GB/s"
    )
    lab.limits = found
    return Found(text, found)


def steady(run: Run, key: str) -> float:
    """The median of a figure over the records of metrics.jsonl, without the first two."""
    values = [record[key] for record in run.records[2:] if key in record]
    assert values, f"no record has {key}: {run.last_lines}"
    return statistics.median(values)


def trained(lab: Lab, given: Options, ranks: int = 1) -> Run:
    """Train, and remove the checkpoints, which fill the disk."""
    run = lab.train(given, ranks=ranks, seconds=240)
    shutil.rmtree(run.folder / "checkpoints", ignore_errors=True)
    return run


def beside_loops(name: str, lab: Lab) -> Found:
    """Train a GPT by the program, and by loops in plain PyTorch."""
    if not lab.gpu and name != next(iter(LOADS)):
        raise Skipped("on processors one load is enough")
    load, found = load_of(lab, name), dict[str, float]()
    programs = {"the program, plain": "false", "the program": "true"}
    kinds = ["plain", "compiled", "trainer"]
    kinds += ["transformers"] if find_spec("transformers") is not None else []
    if name != next(iter(LOADS)):  # what is not compiled takes long, and one load shows it
        del programs["the program, plain"]
        kinds = [kind for kind in kinds if kind in ("compiled", "transformers")]
    for program, compiled in programs.items():
        more = {"data.path": lab.text, "memory.zero": 0, "run.compile": compiled}
        run = trained(lab, {**load.options, **more})
        found[program] = steady(run, "tokens_per_second")
        for key in ("mfu", "tflops", "memory_gb"):
            if any(key in record for record in run.records[2:]):
                found[f"{program}, {key}"] = steady(run, key)
    failed = []
    for kind in kinds:
        try:
            figures = timed_loop(lab, load, kind)
        except AssertionError as error:
            failed.append(f"{kind}: {error}")
            continue
        for key, value in figures.items():
            found[kind if key == "tokens_per_second" else f"{kind}, {key}"] = value
    ours = dict.fromkeys(kinds, "the program") | {"plain": "the program, plain"}
    ratios = {kind: found[ours[kind]] / found[kind] for kind in kinds if kind in found}
    found |= {f"{ours[kind]} / {kind}": ratio for kind, ratio in ratios.items()}
    share = f"{found['the program, mfu']:.1%} of the peak" if "the program, mfu" in found else ""
    plain = found.get("the program, plain")
    text = (
        f"{found['the program']:.4g} tokens/s compiled {share}"
        + (f", {plain:.4g} not" if plain else "")
        + f"; beside loops: {', '.join(f'{k} {r:.3f}' for k, r in ratios.items())}"
    )
    text = "; ".join([text, *failed])
    return Found(text, found)


def graphs(lab: Lab) -> Found:
    """Measure what CUDA graphs gain a compiled loop, with much and with little work in a step."""
    if not lab.gpu or not str(lab.software["build"]).startswith("CUDA"):
        raise Skipped("it needs a GPU with CUDA")
    found = dict[str, float]()
    for batch in (32, 4):
        load = replace(LOADS["124 M"], batch=batch)
        for kind in ("compiled", "graphs"):
            figures = timed_loop(lab, load, kind)
            found |= {f"{kind}, {batch} samples, {key}": one for key, one in figures.items()}
    ratios = {
        batch: found[f"graphs, {batch} samples, tokens_per_second"]
        / found[f"compiled, {batch} samples, tokens_per_second"]
        for batch in (32, 4)
    }
    told = ", ".join(f"{one:.3f} with {batch} samples" for batch, one in ratios.items())
    return Found(f"tokens/s with CUDA graphs / without, in a compiled loop: {told}", found)


def timed_loop(lab: Lab, load: Load, kind: str) -> dict[str, float]:
    """The figures of a loop in plain PyTorch."""
    words = ["loop", "--kind", kind, "--shape", json.dumps(load.shape)]
    words += ["--batch", str(load.batch), "--steps", str(load.steps)]
    figures: dict[str, float] = lab.loops(*words, seconds=200)
    return figures


def two_ranks(lab: Lab) -> Found:
    """Measure what two ranks that share a GPU wait for each other, beside the copies' time."""
    load = load_of(lab, "124 M")
    given = {**load.options, "data.path": lab.text, "data.micro_batch": load.batch // 2}
    given |= {"memory.zero": 0}
    alone = trained(lab, {**given, "gradients.average_every": 10 * load.steps}, ranks=2)
    run = trained(lab, given, ranks=2)
    step, without = steady(run, "step_seconds"), steady(alone, "step_seconds")
    found = {"step_seconds": step, "without_averaging": without, "exposed": step - without}
    # Each rank copies its gradients to the host and back, over the same link of the GPU.
    blocks = 12 * load.layers * load.hidden**2
    nbytes = 4 * (blocks + (load.vocab + load.sequence) * load.hidden)
    text = f"a step takes {step:.4f} s, {without:.4f} s without averaging"
    if lab.limits:
        speeds = (lab.limits[f"copy to the {end}, pinned"] for end in ("host", "device"))
        found["copy_seconds"] = sum(2 * nbytes / speed / 1e9 for speed in speeds)
        text += f"; copies of both ranks alone take {found['copy_seconds']:.4f} s"
    return Found(text, found)


def saves(lab: Lab) -> Found:
    """Measure how long training stands still for a checkpoint, in the foreground and behind steps.

    That is how much longer the steps after a save take than as many steps before the next one. The
    first save in a process is apart, because it gets memory.
    """
    load = replace(load_of(lab, "124 M"), steps=(SAVES + 1) * SAVE_EVERY)
    found = dict[str, float]()
    for name, background in (("foreground", "false"), ("background", "true")):
        more = {"checkpoint.every": SAVE_EVERY, "checkpoint.background": background}
        more |= {"checkpoint.keep": 1, "run.log_every": 1}
        run = trained(lab, {**load.options, "data.path": lab.text, **more})
        times = [record["time"] for record in run.records]
        steps = [after - before for before, after in itertools.pairwise(times)]
        half = SAVE_EVERY // 2
        # steps[n - 1] is from the record of step n, which a save follows, to the next one.
        begins = range(SAVE_EVERY - 1, SAVES * SAVE_EVERY, SAVE_EVERY)
        first, *later = (
            sum(steps[n : n + half]) - sum(steps[n + half : n + 2 * half]) for n in begins
        )
        found |= {f"{name}, save {n}": one for n, one in enumerate([first, *later], 1)}
        found |= {name: statistics.median(later), f"{name}, step": statistics.median(steps)}
    found["share"] = found["background"] / found["foreground"]
    text = (
        f"a save in the background stops training for {found['background']:.3f} s, "
        f"{found['share']:.1%} of the {found['foreground']:.3f} s of one in the foreground; the "
        f"first one for {found['background, save 1']:.3f} and {found['foreground, save 1']:.3f} s"
    )
    return Found(text, found)


def largest(lab: Lab) -> Found:
    """Find the largest GPT that trains, without and with the optimizer on the host."""
    if not lab.gpu:
        raise Skipped("it would take the memory of this machine")
    found, ends = dict[str, float](), []
    memory = lab.software["gpu_bytes"]
    for name, more in (("without", {}), ("with", {"memory.offload": "optimizer"})):
        found[name] = 0.0
        for layers, hidden in LADDER:
            load = Load(layers, hidden, 16, 50304, 512, 1, TEST_STEPS_LEAST + 1)
            parameters = 12 * layers * hidden**2 + 50816 * hidden
            # Weights, and without memory.offload gradients and two moments, in float32.
            if (4 if more else 16) * parameters > memory:
                continue
            # The host makes the initial values, and keeps gradients and optimizer of staged ones.
            if (16 if more else 5) * parameters > psutil.virtual_memory().available:
                ends.append(f"{name}: {parameters / 1e9:.2g} billion need more memory of this host")
                continue
            staged = {"memory.zero": 1 if more else 0, "memory.recompute": "full", **more}
            try:
                seconds = tested(lab, load, staged)
            except AssertionError as error:
                ends.append(f"{name}, {parameters / 1e9:.2g} billion: {str(error)[:200]}")
                continue
            found |= {name: parameters / 1e9, f"{name}, step_seconds": seconds}
            break
    return Found(
        f"{found['without']:.2g} billion parameters without memory.offload, {found['with']:.2g} "
        f"with it ({'; '.join(ends)})",
        found,
    )


def tested(lab: Lab, load: Load, more: Options) -> float:
    """The median seconds of a step in a performance test, which writes no checkpoint."""
    test = {"run.performance_test": load.steps, "run.preflight": "false", "data.path": lab.text}
    given = {**load.options, **test, **more}
    del given["run.steps"]
    run = lab.train(given, seconds=300)
    seconds: float = json.loads((run.folder / PERFORMANCE).read_text())["step_seconds"]
    return seconds


def offload(lab: Lab) -> Found:
    """Measure how long a step takes without and with the optimizer on the host.

    The limit is what torch's own optimizer takes there for as many parameters, by all cores.
    """
    if not lab.gpu:
        raise Skipped("processors have it there already")
    load = replace(LOADS["1.3 B"], steps=12)
    more = {"without": {"memory.zero": 0}, "with": {"memory.offload": "optimizer"}}
    found = {name: tested(lab, load, options) for name, options in more.items()}
    found |= lab.loops("host", "--shape", json.dumps(load.shape))
    return Found(
        f"a step of {load.batch} samples takes {found['without']:.4g} s without memory.offload, "
        f"{found['with']:.4g} s with it; the host alone takes {found['optimizer']:.4g} s for the "
        f"optimizer's step, and {found['norm']:.4g} s for the norm",
        found,
    )


CHECKS: Mapping[str, Check] = {
    "limits": limits,
    **{f"speed, {name}": functools.partial(beside_loops, name) for name in LOADS},
    "two ranks, copies": two_ranks,
    "saves": saves,
    "offload": offload,
    "largest model": largest,
    "CUDA graphs": graphs,
}
