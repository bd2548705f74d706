"""What it takes to count the costs of a run.

    python -m benchmarks.costs [--rounds 15] [--steps 40] [--every 10]

Two ranks train a small GPT with a record every 10 steps. In turn the costs are counted, with the
energy of a node of two sockets and four GPUs, or they are not. The energy is read from a tree of
files in memory: four counters of RAPL, and four meters of power, which a thread reads four times a
second. Two figures count: the seconds of a step, and those of what a record adds to it.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import harness

NAME, RANKS = "costs", 2
WITH, WITHOUT = "costs counted", "no costs"


def node(root: Path) -> None:
    """Write the files of a node of two sockets and four GPUs."""
    files: dict[str, object] = {}
    for socket in range(2):
        zone = f"sys/class/powercap/intel-rapl:{socket}"
        for path, name in ((zone, f"package-{socket}"), (f"{zone}/intel-rapl:{socket}:0", "dram")):
            files |= {f"{path}/name": name, f"{path}/energy_uj": 5 * 10**9}
            files[f"{path}/max_energy_range_uj"] = 262143328850
    for card in range(4):
        sensors = f"sys/class/drm/card{card}/device/hwmon/hwmon{card}"
        files |= {f"{sensors}/name": "amdgpu", f"{sensors}/power1_average": 500_000_000}
    for name, value in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{value}\n")


class Training:
    """A training whose costs are counted or not.

    Args:
        runtime: the job's runtime.
        folder: the root of the node's files on this rank.
        options: of the command line.
    """

    def __init__(self, runtime: Any, folder: Path, options: Any) -> None:
        import torch
        from torch.utils.data import TensorDataset

        from hpc_train.config.file import load
        from hpc_train.data.generators import seed_process
        from hpc_train.models.gpt.shape import GptShape
        from hpc_train.training.in_memory import InMemoryTrainer
        from hpc_train.training.task import TrainingTask

        seed_process(0)
        shape = GptShape(layers=4, hidden=128, heads=4, vocab=256, sequence=64)
        tokens = torch.randint(256, (4096, 65))
        inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

        class Rows(TensorDataset):
            def fetch(self, places: Any) -> Any:
                return inputs[places], targets[places]

        words = ["--data.batch", "16", "--run.steps", "1000000", "--run.log_every"]
        config = load(None, [*words, str(options.every), "--run.dir", str(folder)])
        task = TrainingTask(
            shape.build(), Rows(inputs, targets), lambda gpt, batch: gpt(*batch), shape=shape
        )
        self.trainer = InMemoryTrainer(config, task, runtime)
        self.records, self.folder, self.steps = self.trainer.step_records, folder, options.steps
        self.records.costly = True
        self.records.costs.peak = 1e12
        self.count = self.records.costs.take
        self.group, self.step = runtime.world, 0
        self.seconds: list[float] = []  # of what a record adds
        self.trainer.model.train()

    def measure(self, *, counted: bool) -> float:
        """Seconds of a step, the mean of several."""
        from hpc_train.monitoring.energy_sources import find_energy

        self.records.costs.take = self._timed if counted else self._nothing  # type: ignore[method-assign]
        counting: AbstractContextManager[None] = nullcontext()
        if counted:
            found = find_energy(self.folder, "none")
            counting = self.trainer.assembly.costs.counting(self.folder, found)
        with counting:
            self.records.start()
            return harness.elapsed(self.group, self._steps) / self.steps

    def _steps(self) -> None:
        for _ in range(self.steps):
            self.step += 1
            self.trainer._train_step(self.trainer._read(self.step), self.trainer.records.append)

    def _timed(self, rate: float) -> dict[str, float]:
        begin = time.perf_counter()
        found = self.count(rate)
        self.seconds.append(time.perf_counter() - begin)
        if not found["joules"] > 0:
            raise RuntimeError("the energy of the node was not counted")
        return found

    def _nothing(self, rate: float) -> dict[str, float]:
        return {}


def on_rank(options: Any) -> None:
    """What each rank does."""
    import torch

    from hpc_train.monitoring.peak import peak_flops
    from hpc_train.mpi.runtime import start_runtime

    runtime = start_runtime()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        node(Path(folder))
        training = Training(runtime, Path(folder), options)
        ways = {
            WITHOUT: partial(training.measure, counted=False),
            WITH: partial(training.measure, counted=True),
        }
        found = harness.in_turn(ways, options.rounds, warmup=2, shuffled=True)
        begin = time.perf_counter()
        peak_flops(torch.device("cpu"), torch.float32)
        peak = time.perf_counter() - begin
        training.trainer.close()
    if runtime.world.rank == 0:
        record = statistics.median(training.seconds)
        harness.hand_back(options.result, {"step": found, "record": record, "peak": peak})
    runtime.close()


def main() -> None:
    """Run it, and print the table."""
    options = harness.arguments("what counting costs takes", rounds=15, steps=40, every=10)
    if options.result:
        on_rank(options)
        return
    words = ("--rounds", options.rounds, "--steps", options.steps, "--every", options.every)
    told = harness.on_ranks(RANKS, "benchmarks.costs", *map(str, words))
    step: harness.Samples = told["step"]
    harness.show(f"{RANKS} ranks, a record every {options.every} steps", "s", step, WITHOUT)
    share = told["record"] / options.every / harness.medians(step)[WITHOUT]
    print(f"a record takes {1e6 * told['record']:.0f} us more, {100 * share:.3f} % of its steps")
    print(f"the peak is measured in {told['peak']:.2f} s")
    ratios = {f"{WITH} / {WITHOUT}": harness.paired_ratio(step, WITH, WITHOUT), "record": share}
    middles = harness.medians(step) | {"record": told["record"], "peak": told["peak"]}
    harness.finish(NAME, ratios, middles, options.json)


if __name__ == "__main__":
    main()
