"""Training on whole documents: the mean over documents, the same on every layout."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from hpc_train.data.manifest import Manifest
from hpc_train.data.order import SampleOrder
from hpc_train.data.write import write_shard
from hpc_train.errors import ConfigError, DataError
from hpc_train.models.language import counted_targets
from hpc_train.mpi.group import Group
from hpc_train.mpi.runtime import Runtime
from hpc_train.training.samples import open_samples, samples_of, tokens_in
from hpc_train.training.task import TrainingTask
from hpc_train.training.trainer import Trainer
from tests.training.test_trainer import alone, check_equal, config, records
from tests.training.test_trainer_unequal import LAYOUTS, gpt

SEQUENCE = 8
APART = {"across_documents": False, "group": Group()}
MEAN = ["--data.loss", "token", "--data.across_documents", "false"]


def documents(split):
    generator = np.random.default_rng(len(split))
    lengths = generator.integers(1, 20, 90 if split == "train" else 12)
    return [generator.integers(0, 14, length).astype(np.uint8) for length in lengths]


def prepared(folder):
    """A folder of shards with documents. Two shards share one document."""
    splits = {}
    for split in ("train", "validation"):
        texts = documents(split)
        tokens, begins = np.concatenate(texts), np.cumsum([0, *map(len, texts)])[:-1]
        middle = int(begins[len(begins) // 2] + len(texts[len(begins) // 2]) // 2)
        splits[split] = tuple(
            write_shard(folder / f"{split}-{n}.h5", tokens[part], begins[inside] - part.start)
            for n, (part, inside) in enumerate(
                [
                    (slice(0, middle), begins < middle),
                    (slice(middle, len(tokens)), begins >= middle),
                ]
            )
        )
    return Manifest(14, "uint8", "bytes", 102, splits)


def pieces(split):
    """The tokens that are computed together."""
    texts = documents(split)
    number = len(texts) // 2  # the one that two shards share
    middle = texts.pop(number)
    texts += [middle[: len(middle) // 2], middle[len(middle) // 2 :]]
    for text in texts:
        for begin in range(0, len(text) - 1, SEQUENCE):
            yield torch.from_numpy(text[begin : begin + SEQUENCE + 1].astype(np.int64))


def mean_over_documents(model, split):
    """The mean loss of all targets, computed one piece of a document at a time."""
    losses = [
        F.cross_entropy(model(piece[None, :-1])[0], piece[1:], reduction="none")
        for piece in pieces(split)
    ]
    return torch.cat(losses).mean()


def trained(folder, manifest, settings, started, **model):
    data = [
        open_samples(folder, manifest, split, SEQUENCE, across_documents=False, group=started.world)
        for split in ("train", "validation")
    ]
    task = TrainingTask(
        gpt(**model),
        data[0],
        validation=data[1],
        counted=counted_targets,
        private_parameters=True,
    )
    with Trainer(settings, task, started) as trainer:
        trainer.train()
    return len(data[0])


def test_the_loss_is_the_mean_over_the_documents_one_at_a_time(tmp_path):
    manifest = prepared(tmp_path)
    packed = open_samples(tmp_path, manifest, "train", SEQUENCE, **APART)
    model = gpt().double()
    loss = mean_over_documents(model, "train")
    loss.backward()
    norm = torch.cat([p.grad.flatten() for p in model.parameters()]).norm()
    options = [*MEAN, "--run.steps", "1", "--data.batch", str(len(packed))]
    options += ["--optimizer.clip_norm", "0", "--optimizer.lr", "0", "--data.micro_batch", "1"]
    trained(tmp_path, manifest, config(tmp_path / "run", *options), alone())
    (record,) = records(tmp_path / "run")
    assert record["loss"] == pytest.approx(loss.item(), rel=1e-12)
    assert record["grad_norm"] == pytest.approx(norm.item(), rel=1e-12)
    with torch.no_grad():
        held_out = mean_over_documents(model, "validation").item()
    assert record["validation_loss"] == pytest.approx(held_out, rel=1e-12)


@pytest.mark.mpi
@pytest.mark.parametrize("recompute", ["selective", pytest.param("full", marks=pytest.mark.long)])
def test_packed_documents_have_the_same_loss_on_every_layout(job, together, recompute):
    options = [*MEAN, "--memory.recompute", recompute]
    manifest = None
    if job.world.rank == 0:
        manifest = prepared(together)
        trained(
            together,
            manifest,
            config(together / "one", *options),
            Runtime(Group(), Group()),
            dropout=0.2,
        )
    manifest = job.world.from_first(lambda: manifest)
    for name, layout in LAYOUTS.items():
        settings = config(together / name, *options, *layout)
        trained(together, manifest, settings, job, dropout=0.2)
        if job.world.rank == 0:
            check_equal(together / name, together / "one")


def test_folders_of_whole_documents_are_mixed(tmp_path):
    found = {}
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        found[tmp_path / name] = prepared(tmp_path / name)
    folders = [{"path": str(folder), "weight": n + 1} for n, folder in enumerate(found)]
    options = ["--data.path", json.dumps(folders), "--model.sequence", str(SEQUENCE)]
    settings = config(tmp_path / "run", *MEAN, *options)
    mixed = samples_of(settings, found, "train", Group(), {})
    order = SampleOrder.of(mixed, 24)
    columns = mixed.fetch(order.indices(1, 0, 24))
    assert [column.shape for column in columns] == [(24, SEQUENCE)] * 3
    assert int((order.indices(1, 0, 24) >= len(mixed) // 2).sum()) == 16
    alone = open_samples(*next(iter(found.items())), "train", SEQUENCE, **APART)
    assert tokens_in(mixed) == tokens_in(alone) == alone.targets / len(alone) < SEQUENCE


def test_samples_of_whole_documents_have_no_substitutes(tmp_path):
    with pytest.raises(ConfigError, match="substitute, but data.across_documents is false"):
        config(tmp_path, *MEAN, "--data.damaged", "substitute")


def test_without_a_document_to_learn_from_there_is_an_error(tmp_path):
    shard = write_shard(tmp_path / "a.h5", np.zeros(3, np.uint8), np.arange(3))
    manifest = Manifest(14, "uint8", "bytes", 3, {"train": (shard,), "validation": ()})
    with pytest.raises(DataError, match="no document of two tokens"):
        open_samples(tmp_path, manifest, "train", SEQUENCE, **APART)
    assert open_samples(tmp_path, manifest, "validation", SEQUENCE, **APART) is None


def test_a_held_out_split_of_shards_that_are_all_too_short_has_no_samples(tmp_path):
    short = [
        write_shard(tmp_path / f"{n}.h5", np.zeros(SEQUENCE, np.uint8), np.zeros(1, np.int64))
        for n in range(2)
    ]
    manifest = Manifest(14, "uint8", "bytes", 2, {"train": (), "validation": (*short,)})
    how = {"across_documents": True, "group": Group()}
    assert open_samples(tmp_path, manifest, "validation", SEQUENCE, **how) is None
