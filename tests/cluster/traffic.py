"""Train a small GPT under layouts and count the bytes that each host sends to others in a step.

    mpirun ... python -m tests.cluster.traffic FOLDER LAYOUT...

A layout is words such as "dp=4 tp=2". Each is trained over few and over more steps: in the
difference there is no start, no checkpoint and no end. Runs go to FOLDER; rank 0 prints as JSON,
for each layout, the bytes that each host sends in a step.
"""

from __future__ import annotations

import json
import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import psutil
import torch
from torch.utils.data import TensorDataset

from hpc_train.config import RunConfig
from hpc_train.config.file import load
from hpc_train.models import GPT
from hpc_train.mpi import runtime
from hpc_train.mpi.runtime import Runtime
from hpc_train.training.task import TrainingTask
from hpc_train.training.trainer import Trainer

FEW, MORE = 1, 3  # steps
SHAPE = ("layers", "hidden", "heads", "vocab", "sequence", "dropout", "tie_embeddings")
FIXED = {
    "run.log_every": 1,
    "run.hang_timeout": 120,
    "run.preflight": "false",  # it sends as many messages as fit a time
    "model.vocab": 512,
    "model.sequence": 64,
    "model.layers": 6,
    "model.hidden": 64,
    "model.heads": 4,
    "model.dropout": 0.1,
    "data.batch": 32,
    "data.micro_batch": 4,
    "run.deterministic": "true",  # the ring, whatever is faster here
    "gradients.bucket_mb": 0.5,
    "optimizer.lr": 0.01,
    "optimizer.clip_norm": 0.8,
    "precision.dtype": "float64",
}


def configuration(layout: str, folder: Path, steps: int = MORE) -> RunConfig:
    """The run of a layout over so many steps."""
    given = {**FIXED, "run.steps": steps, "run.dir": folder / f"{layout}, {steps} steps"}
    words = [f"--{key}={value}" for key, value in given.items()]
    return load(None, [*words, *(f"--parallel.{word}" for word in layout.split())])


def train(config: RunConfig, place: Runtime) -> None:
    """Train on random tokens. Collective."""
    shape = {key: getattr(config.model, key) for key in SHAPE}
    size = (8 * config.data.batch, shape["sequence"] + 1)
    text = torch.randint(shape["vocab"], size, generator=torch.Generator().manual_seed(1))
    torch.manual_seed(7)
    dataset = TensorDataset(text[:, :-1], text[:, 1:])
    with redirect_stdout(StringIO()):  # mpirun would pass it from host to host
        task = TrainingTask(GPT(**shape), dataset, lambda gpt, batch: gpt(*batch))
        Trainer(config, task, place).train()


def losses(config: RunConfig) -> list[float]:
    """The losses of all steps of a run that is over."""
    lines = (Path(config.run.dir) / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


def sent(config: RunConfig, job: Runtime) -> dict[str, int]:
    """The bytes that each host sends to others in a run. Collective."""
    assert job.world.comm is not None
    job.world.barrier()
    before = _counter()
    job.world.barrier()
    train(config, job)
    job.world.barrier()
    return dict(job.world.comm.allgather((job.world.host, _counter() - before)))


def _counter() -> int:
    return int(psutil.net_io_counters(pernic=True)["eth0"].bytes_sent)


def main() -> None:
    folder, *layouts = sys.argv[1:]
    job = runtime.start_runtime()
    found = {}
    for layout in layouts:
        few, more = (sent(configuration(layout, Path(folder), n), job) for n in (FEW, MORE))
        found[layout] = {host: (more[host] - few[host]) / (MORE - FEW) for host in more}
    job.print(json.dumps(found))
    job.close()


if __name__ == "__main__":
    main()
