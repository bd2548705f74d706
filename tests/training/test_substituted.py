"""Training on other samples in place of damaged ones: the same on every layout, and counted."""

from __future__ import annotations

import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from hpc_train.checkpoint.catalogue import find_checkpoints, step_of
from hpc_train.data.manifest import FILE_NAME, HASHED_BYTES, Manifest, read_manifest
from hpc_train.data.shards import TokenDataset
from hpc_train.data.substitutes import Substituted
from hpc_train.data.write import write_shard
from hpc_train.errors import ConfigError, DataError
from hpc_train.models import GPT
from hpc_train.mpi.group import Group
from hpc_train.mpi.runtime import Runtime
from hpc_train.training.substituted import SubstitutedSamples, check_on_nodes
from hpc_train.training.task import TrainingTask
from hpc_train.training.trainer import Trainer
from tests.training.test_trainer import STEPS, check_equal, config, make, records

SUBSTITUTE = ["--data.damaged", "substitute"]
PIPELINE = ["--parallel.pp", "2", "--parallel.schedule", "zero_bubble", "--data.micro_batch", "3"]
LAYOUTS = {
    1: [["--data.micro_batch", "2", "--data.prefetch", "0"], ["--data.workers", "3"]],
    2: [["--data.workers", "2", "--data.micro_batch", "3"], PIPELINE, ["--parallel.tp", "2"]],
    4: [["--data.micro_batch", "1"], [*PIPELINE, "--parallel.tp", "2"], PIPELINE],
}


def prepare(folder):
    """A data folder with one damaged block of six for training, and one for validation."""
    folder.mkdir()
    generator = np.random.default_rng(3)
    splits = {}
    for split, shards in (("train", 3), ("validation", 2)):
        tokens = [generator.integers(0, 14, 2 * HASHED_BYTES, np.uint8) for _ in range(shards)]
        made = [write_shard(folder / f"{split}-{n}.h5", some) for n, some in enumerate(tokens)]
        splits[split] = (*made,)
        damage(folder, made[1], 1)
    manifest = Manifest(vocab=14, dtype="uint8", tokenizer="bytes", documents=5, splits=splits)
    (folder / FILE_NAME).write_text(manifest.to_json())


def damage(folder, shard, block):
    with (folder / shard.name).open("r+b") as file:
        file.seek(shard.offset + block * HASHED_BYTES)
        file.write(bytes(100))


def train(folder, directory, started, *options):
    """Train on a data folder."""
    torch.manual_seed(started.world.rank)
    manifest = read_manifest(folder)
    data = {
        split: TokenDataset(folder, manifest, split, 8, damaged="substitute")
        for split in manifest.splits
    }
    model = GPT(vocab=14, sequence=8, layers=2, hidden=8, heads=2, dropout=0.2)
    task = TrainingTask(
        model, data["train"], lambda gpt, batch: gpt(*batch), validation=data["validation"]
    )
    settings = config(directory, *SUBSTITUTE, "--data.validation_batches", "3", *options)
    Trainer(settings, task, started).train()


@pytest.fixture
def damaged(together, job):
    """Such a folder, and beside it the run of one rank."""
    if job.world.rank == 0:
        prepare(together / "data")
        train(together / "data", together / "reference", Runtime(Group(), Group()))
    job.world.barrier()
    return together / "data"


@pytest.mark.ranks(1, 4, later=(2,))
def test_every_layout_trains_on_the_same_samples_and_counts_them(group, together, damaged):
    reference = [one["substituted_samples"] for one in records(together / "reference")]
    assert reference == sorted(reference)
    assert 10 < reference[-1] < 50
    for number, options in enumerate(LAYOUTS[group.size]):
        run = together / f"run {number}"
        train(damaged, run, Runtime(group, group), *options)
        if group.rank == 0:
            check_equal(run, together / "reference")
            assert [one["substituted_samples"] for one in records(run)] == reference


@pytest.mark.mpi
def test_a_resumed_run_counts_on(job, together, damaged):
    first = ["--run.steps", "4", "--run.log_every", "2"]
    train(damaged, together / "run", job, *first)
    train(damaged, together / "run", job)
    if job.world.rank == 0:
        check = {one["step"]: one["substituted_samples"] for one in records(together / "reference")}
        found = {one["step"]: one["substituted_samples"] for one in records(together / "run")}
        assert {*range(4, STEPS + 1)} < {*found}
        assert found == {step: check[step] for step in found}


@pytest.mark.ranks(2)
def test_ranks_of_a_replica_that_see_other_damage_end_before_a_checkpoint(group, together, damaged):
    mine = damaged
    if group.rank == 1:
        mine = shutil.copytree(damaged, together / "copy")
        for number in range(3):
            damage(mine, read_manifest(mine).splits["train"][number], 0)
    options = ["--parallel.pp", "2", "--run.log_every", "100", "--data.validation_every", "0"]
    with pytest.raises(DataError, match="they see different damage") as caught:
        train(mine, together / "run", Runtime(group, group), *options)
    assert caught.value.agreed
    if group.rank == 0:
        assert not find_checkpoints(together / "run" / "checkpoints", "auto")


@pytest.mark.mpi
def test_too_many_substituted_samples_end_the_run(job, together, damaged, monkeypatch):
    monkeypatch.setattr("hpc_train.training.substituted.MOST_SUBSTITUTED", 2e-4)
    with pytest.raises(DataError, match=r"samples were substituted up to step \d, and at most"):
        train(damaged, together / "run", job)
    job.world.barrier()
    steps = [*map(step_of, find_checkpoints(together / "run" / "checkpoints", "auto"))]
    assert STEPS not in steps


def test_samples_that_each_epoch_substitutes_anew_are_not_too_many(monkeypatch):
    monkeypatch.setattr("hpc_train.training.substituted.MOST_SUBSTITUTED", 0.1)
    grid = SimpleNamespace(world=Group(), model=Group(), tp=1, pp=1)
    dataset = TensorDataset(torch.zeros(100))
    dataset.substitutes = {}
    counted = SubstitutedSamples(grid, dataset, batch=10)
    data = Substituted.of((), [(place, 50) for place in range(9)], [])
    for epoch in range(1, 4):
        step = SimpleNamespace(number=10 * epoch, micro_batches=[SimpleNamespace(data=data)])
        counted.count(step)
        assert counted.record() == {"substituted_samples": 9 * epoch}


@pytest.mark.mpi
def test_nodes_check_shards_and_their_manifest_under_either_policy(job, together, monkeypatch):
    folder = together / "data"
    if job.world.rank == 0:
        prepare(folder)
        (folder / "train-1.h5").unlink()
    job.world.barrier()
    manifest = read_manifest(folder)
    with pytest.raises(DataError, match=r"train-1.h5 is missing"):
        check_on_nodes(job, folder, manifest, "raise")
    with pytest.raises(DataError, match=r"in 1 shard that cannot be used .*train-1.h5 is missing"):
        check_on_nodes(job, folder, manifest, "substitute")
    monkeypatch.setattr("hpc_train.data.substitutes.MOST_SUBSTITUTED", 0.5)
    check_on_nodes(job, folder, manifest, "substitute")


def test_a_data_set_that_substitutes_nothing_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="the data set substitutes no samples"):
        make(config(tmp_path, *SUBSTITUTE), Runtime(Group(), Group()))


def test_without_the_policy_nothing_is_counted(tmp_path):
    trainer = make(config(tmp_path), Runtime(Group(), Group()))
    trainer.train()
    assert all("substituted_samples" not in one for one in records(tmp_path))
