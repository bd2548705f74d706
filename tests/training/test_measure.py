"""Measuring a machine: what ranks' numbers come to, and that they can be had."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from hpc_train.config.file import load
from hpc_train.models.gpt.shape import GptShape
from hpc_train.mpi.group import Group
from hpc_train.mpi.runtime import Runtime
from hpc_train.planning.machine import load_machine as read
from hpc_train.training import measure
from hpc_train.training.measure import GIB, LARGE, SAMPLES, SMALL, Found, MessageCost, described

MODEL = ["--model.layers=1", "--model.hidden=32", "--model.heads=2", "--model.sequence=16"]
FLOPS = 1e9
SAMPLE, LAYER = 0.1, 0.02  # seconds
ALPHA, BETA, HELD = 1e-5, 1e-8, 4e-9


def sent(ranks):
    """Messages over a link that so many ranks share."""
    small = MessageCost(ALPHA, 0.0)
    large = MessageCost(ALPHA + BETA * (LARGE - SMALL) * ranks, HELD * (LARGE - SMALL))
    return small, large


def ranks_of(nodes, ranks, slower_in_node=1.0, slower_in_job=1.0):
    """What the ranks of such a machine would find."""
    alone = LAYER + SAMPLES * SAMPLE
    nothing = MessageCost(), MessageCost()
    every = [(node, place) for node in range(nodes) for place in range(ranks)]
    return [
        Found(
            node,
            LAYER + SAMPLE if (node, place) == (0, 0) else 0.0,
            alone if (node, place) == (0, 0) else 0.0,
            alone * slower_in_node if node == 0 else 0.0,
            alone * slower_in_job,
            8e9 / slower_in_job,
            sent(1) if node == 0 and ranks > 1 else nothing,
            sent(ranks) if nodes > 1 else nothing,
            int(4 * GIB),
        )
        for node, place in every
    ]


def test_ranks_with_cores_of_their_own():
    made = described(ranks_of(2, 4), FLOPS, "float32", "cpu")
    speed = made.compute["float32"]
    assert speed.rank == pytest.approx(FLOPS / SAMPLE, rel=1e-3)
    assert (speed.node, speed.job) == (4 * speed.rank, 4 * speed.rank)
    assert speed.layer == pytest.approx(LAYER, rel=1e-3)
    for link in (made.inside, made.across):
        assert (link.alpha, link.beta, link.processor) == (ALPHA, BETA, HELD)
    assert (made.memory_bandwidth, made.node_gib, made.ranks_per_node) == (8e9, 4, 4)


def test_ranks_that_share_cores_with_their_node_and_with_all():
    """Four nodes of two ranks on two cores: alone a node's ranks are not slowed down."""
    made = described(ranks_of(4, 2, 1.0, 4.0), FLOPS, "float32", "cpu")
    speed = made.compute["float32"]
    assert speed.node == pytest.approx(2 * speed.rank)
    assert speed.job == pytest.approx(speed.rank / 2)
    assert made.memory_bandwidth == pytest.approx(8e9)  # with a core to itself


def test_what_was_not_measured_is_left_out_of_the_description():
    alone = described(ranks_of(1, 1), FLOPS, "float64", "cuda")
    assert (alone.inside, alone.across, alone.node_gib, alone.rank_gib) == (None, None, None, 4)
    assert list(alone.compute) == ["float64"]
    assert alone.compute["float64"].job is None, "it would be the node's, with other noise"


def test_a_layer_too_small_to_tell_samples_apart():
    first, *others = ranks_of(1, 2)
    made = described([replace(first, one=first.several), *others], FLOPS, "float32", "cpu")
    assert made.compute["float32"].rank == pytest.approx(SAMPLES * FLOPS / first.several, rel=1e-3)


def test_large_models_are_measured_by_a_part():
    wide = GptShape(layers=1, hidden=8192, heads=64, vocab=1, sequence=4096)
    cut = replace(wide, hidden=1024, heads=8, sequence=256)
    assert measure.measured_shape(wide, torch.device("cpu")) == cut
    assert measure.measured_shape(wide, torch.device("cuda")) == wide
    small = GptShape(layers=1, hidden=48, heads=3, vocab=1, sequence=20)
    assert measure.measured_shape(small, torch.device("cpu")) == small


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_a_process_alone_measures_itself(monkeypatch, dtype):
    monkeypatch.setattr(measure, "SECONDS", 0.01)
    monkeypatch.setattr(measure, "STREAM", 1 << 16)
    config = load(None, [*MODEL, f"--precision.dtype={dtype}"])
    made = measure.measure(config, Runtime(Group(), Group()))
    assert list(made.compute) == [dtype]
    speed = made.compute[dtype]
    assert 0 < speed.rank < 1e15
    assert 0 < speed.node < 1e15
    assert made.inside is None
    assert made.across is None
    assert made.node_gib > 0.01


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("ranks", [1, 3])
def test_a_process_measures_what_ranks_of_its_node_would(monkeypatch, dtype, ranks):
    def seconds(once):  # of a machine on which nobody slows others down
        once()
        return 0.01

    monkeypatch.setattr(measure, "pass_seconds", seconds)
    monkeypatch.setattr(measure, "STREAM", 1 << 16)
    made = measure.measure_alone(load(None, [*MODEL, f"--precision.dtype={dtype}"]), ranks)
    assert 0 < made.rank < 1e15
    assert 0.999 <= made.node / made.rank <= ranks * 1.001
    assert made.memory_bandwidth > 1e3
    assert made.free > 1e7


@pytest.mark.mpi
def test_ranks_measure_together(monkeypatch, job, together):
    monkeypatch.setattr(measure, "SECONDS", 0.02)
    monkeypatch.setattr(measure, "STREAM", 1 << 16)
    made = measure.measure(load(None, MODEL), job)
    alike = job.world.gathered(made.to_yaml())
    assert set(alike) == {made.to_yaml()}
    assert made.ranks_per_node == job.world.size
    if job.world.size > 1:
        assert made.inside.alpha > 0
        assert made.inside.beta > 0
    path = together / "machine.yaml"
    if job.world.rank == 0:
        path.write_text("device: cpu  # written by hand\n")
        for _ in range(2):
            measure.write(made, path, job.world.size)
        assert path.with_name("machine.yaml.old").read_text().endswith("by hand\n")
        assert path.read_text().startswith("# Measured by `hpc-train plan --measure` on ")
        assert read(path) == made
    job.world.barrier()
