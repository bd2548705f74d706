"""Train one model under many random layouts and compare each with one rank.

    mpirun -np 8 python -m tests.system.layouts --count 40 --seed 0

A layout of fewer ranks than the job has leaves the others idle. Half of the runs change their
layout in the middle. Prints a line for each; ends with code 1 at the first whose losses or
parameters differ.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import warnings
from contextlib import redirect_stdout
from functools import partial
from io import StringIO
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from hpc_train.checkpoint.fileformat import LocalTensor, torch_dtypes
from hpc_train.checkpoint.restore import CheckpointReader, load_tensors
from hpc_train.config.file import load as configuration
from hpc_train.gradients import staged_parameters
from hpc_train.gradients.streamed import StreamedParameters
from hpc_train.models.kinds import SHAPES
from hpc_train.models.tabular.sizes import TableSizes
from hpc_train.mpi import runtime
from hpc_train.mpi.group import Group
from hpc_train.mpi.runtime import Runtime
from hpc_train.training import sharing
from hpc_train.training.task import TrainingTask
from hpc_train.training.trainer import Trainer
from tests.gradients.late_lane import LateLane

ZEROS = ["auto", 0, 1, 2, 3]
RECOMPUTED = ["none", "selective", "full", 2]
FROZEN = ["", "", "", "embedding", "blocks.1", "bias", "norm"]  # in the names of parameters
STEPS = 20
HALF = STEPS // 2
TOLERANCE = 1e-10
NOISE = 100  # how much further biases of keys may be apart


TABLE = TableSizes(edges=((-1.0, 0.0, 2.0), (-0.5, 0.5)), codes=(4, 3), outputs=12)
OF_TABLES = {
    "tabular": ["heads"],
    "tabular_mlp": ["members", "embedding_width"],
    "tabular_resnet": ["embedding_width"],
}


def shapes(generator: random.Random) -> dict:
    shape = sizes_of_gpt(generator) | {"kind": generator.choice(["gpt", "gpt", *OF_TABLES])}
    if shape["kind"] == "gpt":
        return shape
    more = {
        "members": generator.choice([1, 3]),
        "embedding_width": generator.choice([1, 5]),
        "heads": 4,
    }
    kept = {key: shape[key] for key in ("kind", "layers", "hidden", "dropout", "frozen", "lora")}
    own = {key: more[key] for key in OF_TABLES[shape["kind"]]}
    return kept | own | {"numeric": generator.choice(["piecewise_linear", "periodic", "linear"])}


def sizes_of_gpt(generator: random.Random) -> dict:
    return {
        "vocab": generator.choice([12, 20]),
        "sequence": 8,
        "layers": generator.randint(2, 6),
        "hidden": generator.choice([16, 20, 28]),
        "heads": 4,
        "dropout": generator.choice([0.0, 0.2]),
        "tie_embeddings": generator.random() < 0.6,
        "frozen": generator.choice(FROZEN),
        "lora": generator.choice([0, 0, 2]),
    }


def layout(generator: random.Random, ranks: int, shape: dict) -> dict:
    """A random layout that fits the model, as values of the configuration."""
    while True:
        sizes = [1, 2, 3, 4, 8], [1, 2, 4], [1, 2, 3, 4, 5, 8]
        dp, tp, pp = (generator.choice(some) for some in sizes)
        schedule = generator.choice(["gpipe", "1f1b", "interleaved", "zero_bubble"])
        virtual_stages = generator.choice([2, 3]) if schedule == "interleaved" else 1
        if 1 < dp * tp * pp <= ranks and pp * virtual_stages <= shape["layers"] + 2:
            break
    cut = tp > 1 and generator.random() < 0.5 and shape["kind"] == "gpt"
    micro_batch = generator.choice([n for n in (1, 2, 3, 4, 6) if 24 // dp % n == 0])
    zero = generator.choice(ZEROS)
    staged = zero in ("auto", 1, 2) and generator.random() < 0.5
    return values(dp, tp, pp, schedule, virtual_stages, cut, micro_batch) | {
        "memory.zero": zero,
        "memory.scope": generator.choice(["node", "all"]),
        "memory.recompute": generator.choice(RECOMPUTED),
        "memory.offload": "optimizer" if staged else "none",
    }


def values(
    dp: int, tp: int, pp: int, schedule: str, virtual_stages: int, cut: bool, micro_batch: int
) -> dict:
    """A layout as values of the configuration."""
    return {
        "parallel.dp": dp,
        "parallel.tp": tp,
        "parallel.pp": pp,
        "parallel.schedule": schedule,
        "parallel.virtual_stages": virtual_stages,
        "parallel.sequence_parallel": str(cut).lower(),
        "data.micro_batch": micro_batch,
    }


CUBES = [  # the smallest layouts that have everything
    values(2, 2, 2, "gpipe", 1, False, 4) | {"memory.recompute": 2},
    values(2, 2, 2, "1f1b", 1, True, 2) | {"memory.recompute": "selective"},
    values(2, 2, 2, "interleaved", 2, True, 3) | {"memory.recompute": "full"},
    values(2, 2, 2, "zero_bubble", 1, True, 2) | {"memory.recompute": "selective"},
]
PER_SHAPE = 4  # layouts that are compared with one reference


def model_of(shape: dict) -> nn.Module:
    """The model, with some parameters that are not trained."""
    sizes = {key: value for key, value in shape.items() if key not in ("frozen", "kind", "lora")}
    if shape["kind"] != "gpt":
        sizes["sizes"] = TABLE
    torch.manual_seed(7)
    model = SHAPES[shape["kind"]](**sizes).build()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not shape["frozen"] or shape["frozen"] not in name)
    return model


def train(directory: Path, shape: dict, options: dict, steps: int, place: Runtime) -> None:
    fixed = {
        "run.dir": directory,
        "run.steps": steps,
        "run.log_every": 1,
        "data.batch": 24,
        "data.validation_every": HALF // 2,
        "precision.dtype": "float64",
        "optimizer.lr": 0.003,
        "optimizer.schedule": "constant",  # the rate does not depend on the last step
        "optimizer.weight_decay": 0.1,
        "optimizer.clip_norm": 0.8,
    }
    if shape["lora"]:  # of a model that is frozen but for its adapters and biases
        fixed |= {"finetune.lora": shape["lora"], "finetune.patterns": "['*bias']"}
        fixed["checkpoint.weights"] = directory.parent / f"{shape_name(shape)}.safetensors"
    words = [word for key, value in (fixed | options).items() for word in (f"--{key}", str(value))]
    data = samples_of(shape)
    with redirect_stdout(StringIO()):
        task = TrainingTask(
            model_of(shape),
            TensorDataset(*(column[:100] for column in data)),
            (lambda gpt, batch: gpt(*batch)) if shape["kind"] == "gpt" else loss_of_rows,
            validation=TensorDataset(*(column[100:] for column in data)),
            private_parameters=options.get("memory.zero") == 3,
        )
        Trainer(configuration(None, words), task, place).train()


def samples_of(shape: dict) -> list[torch.Tensor]:
    """140 samples: texts, or rows with missing numbers."""
    generator = torch.Generator().manual_seed(1)
    text = torch.randint(12, (140, 9), generator=generator)
    if shape["kind"] == "gpt":
        return [text[:, :-1], text[:, 1:]]
    numeric = torch.randn(140, 2, generator=generator, dtype=torch.float64)
    numeric[torch.rand(140, 2, generator=generator) < 0.2] = torch.nan
    return [numeric, text[:, :2] % 3, text[:, 2]]


def loss_of_rows(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    predictions = model(*batch[:2])
    classes = batch[2].unsqueeze(1).expand(predictions.shape[:2])
    return cross_entropy(predictions.flatten(0, 1), classes.flatten())


def results(directory: Path) -> tuple[list[float], dict[str, torch.Tensor]]:
    """All numbers that metrics have of the steps, and all tensors of the last checkpoint."""
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    keys = ("loss", "grad_norm", "validation_loss")
    numbers = [json.loads(line).get(key, 0.0) for line in lines for key in keys]
    reader = CheckpointReader.open(directory / "checkpoints" / f"step-{STEPS:09d}.safetensors")
    tensors = {
        name: torch.empty(entry.shape, dtype=torch_dtypes()[entry.dtype])
        for name, entry in reader.entries.items()
    }
    load_tensors(
        reader, {name: LocalTensor.whole(tensor) for name, tensor in tensors.items()}, Group()
    )
    return numbers, tensors


def difference(directory: Path, reference: Path) -> float:
    """The largest difference, relative for metrics, and to the largest element for tensors."""
    (numbers, tensors), (expected, wanted) = results(directory), results(reference)
    if len(numbers) != len(expected) or tensors.keys() != wanted.keys():
        return float("inf")
    worst = max(abs(a - b) / max(abs(b), 1e-9) for a, b in zip(numbers, expected, strict=True))
    for name, tensor in tensors.items():
        if name.startswith("model."):
            scale = float(wanted[name].abs().max()) or 1.0
            if name.endswith("qkv.bias"):
                # What is added to all keys alike changes no attention. So the gradient of a key's
                # bias is what rounding leaves, which Adam makes larger.
                scale *= NOISE
            worst = max(worst, float((tensor - wanted[name]).abs().max()) / scale)
    return worst


def ranks_of(options: dict) -> int:
    return options["parallel.dp"] * options["parallel.tp"] * options["parallel.pp"]


def train_under(
    job: Runtime, directory: Path, shape: dict, options: dict, per_node: int, steps: int
) -> None:
    """Train under a layout, or go on. Collective.

    `per_node` ranks that follow one another stand for one node.
    """
    inside = job.world.rank < ranks_of(options)
    part = job.world.split(0 if inside else 1, job.world.rank)
    if inside:
        node = part.split(part.rank // per_node, part.rank)
        train(directory, shape, options, steps, Runtime(part, node))
        node.close()
    part.close()


def shape_name(shape: dict) -> str:
    return "-".join(str(value) for value in shape.values())


def reference_of(job: Runtime, root: Path, shape: dict) -> Path:
    """The run of one rank. Collective."""
    reference = root / shape_name(shape)
    if job.world.rank == 0 and not reference.exists():
        weights = dict(model_of(shape).named_parameters())
        save_file(weights, reference.with_name(f"{reference.name}.safetensors"))
        train(reference, shape, {}, STEPS, Runtime(Group(), Group()))
    return reference


def poison(parameters: StreamedParameters, tensor: torch.Tensor) -> None:
    """What is given back is spoilt, as it would be if it were larger than a page."""
    tensor.fill_(torch.nan if tensor.is_floating_point() else 0)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    warnings.simplefilter("error")
    StreamedParameters._give_back = poison  # type: ignore[method-assign]
    staged_parameters.CopyLane = LateLane  # type: ignore[misc]
    sharing.check_device = lambda memory, device: None  # memory.offload optimizer is for GPUs
    job = runtime.start_runtime()
    generator = random.Random(given.seed)
    with tempfile.TemporaryDirectory() as own:
        root = Path(job.world.from_first(lambda: own))
        for number in range(given.count):
            if number % PER_SHAPE == 0:
                shape = shapes(generator)
            options = layout(generator, job.world.size, shape)
            if number < len(CUBES) and job.world.size == 8:
                options = CUBES[number]
                if shape["kind"] != "gpt":
                    options = {**options, "parallel.sequence_parallel": "false"}
            undivided = options.get("memory.zero", 0) in ("auto", 0)
            staged = options.get("memory.offload") == "optimizer"
            whole = undivided and not staged and ranks_of(options) == job.world.size
            if number % 2 and whole and runtime.horovod_built():
                options = {**options, "gradients.engine": "horovod"}
            per_node = generator.choice([1, 2, 4, 8])
            case = {"ranks per node": per_node, **options}
            reference, run = reference_of(job, root, shape), root / f"run {number}"
            if number % 2:
                before = layout(generator, job.world.size, shape)
                train_under(job, run, shape, before, per_node, HALF)
                case = {"before": before, **case}
            train_under(job, run, shape, options, per_node, STEPS)
            apart = job.world.from_first(partial(difference, run, reference))
            good = apart <= TOLERANCE
            job.print(f"{'ok' if good else 'BAD'} {apart:.1e} {json.dumps(shape | case)}")
            if not good:
                return 1
        job.world.barrier()
    job.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
