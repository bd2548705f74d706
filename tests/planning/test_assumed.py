"""A machine without a description: which figures are measured, which are assumed, and their use."""

from __future__ import annotations

import pytest

from hpc_train.config.file import load
from hpc_train.planning.assumed import Here, Speeds, guess
from hpc_train.planning.choose import choose
from hpc_train.planning.machine import Compute

GIB = 1 << 30
CPU = Speeds("cpu", 4e10, 1.5e11, 1e-3, 6e9, 30 * GIB)
GPU = Speeds("cuda", 4e14, None, 1e-4, 2e12, 70 * GIB)
CONFIG = load(None, ["--model.vocab=256"])


def by_origin(made):
    return {
        origin: {figure.key for figure in made.figures if figure.origin == origin}
        for origin in ("measured", "assumed")
    }


def test_what_one_process_measured_is_taken_and_links_are_assumed():
    made = guess(Here(16, 20 * GIB, CPU), "float32", nodes=2, ranks_per_node=4)
    assert made.machine.compute == {"float32": Compute(4e10, 1.5e11, None, 1e-3)}
    assert (made.machine.memory_bandwidth, made.machine.node_gib) == (6e9, 30)
    assert made.machine.inside.beta == pytest.approx(2 / 6e9, rel=1e-3), "read and written once"
    found = by_origin(made)
    assert found["measured"] == {
        *(f"compute.float32.{key}" for key in ("rank", "node", "layer")),
        "memory_bandwidth",
        "node_gib",
    }
    links = {f"{link}.{key}" for link in ("inside", "across") for key in ("alpha", "beta")}
    assert links < found["assumed"]
    assert "on 4 cores" in made.figures[0].text


def test_without_a_measurement_all_but_the_memory_is_assumed():
    made = guess(Here(16, 20 * GIB), "float64", nodes=1, ranks_per_node=4)
    assert by_origin(made)["measured"] == {"node_gib"}
    speed = made.machine.compute["float64"]
    assert speed.node == 4 * speed.rank
    other = guess(Here(16, 20 * GIB), "bfloat16", nodes=1, ranks_per_node=32)
    shared = other.machine.compute["bfloat16"]
    assert shared.node == 16 * shared.rank, "two ranks share each core"


@pytest.mark.parametrize(("nodes", "ranks"), [(1, 1), (1, 4), (4, 1), (2, 4)])
@pytest.mark.parametrize("speeds", [None, CPU, GPU], ids=["none", "cpu", "gpu"])
def test_every_job_can_be_planned_and_has_only_the_figures_it_needs(nodes, ranks, speeds):
    made = guess(Here(16, 20 * GIB, speeds), "float32", nodes, ranks)
    assert choose(CONFIG, made.machine, nodes, ranks).layouts
    keys = {figure.key.partition(".")[0] for figure in made.figures}
    assert ("inside" in keys, "across" in keys) == (ranks > 1, nodes > 1)
    assert made.machine.device == ("cuda" if speeds is GPU else "cpu")


def test_a_gpu_has_its_own_memory():
    made = guess(Here(16, 20 * GIB, GPU), "bfloat16", nodes=1, ranks_per_node=4).machine
    assert (made.rank_gib, made.node_gib) == (70, None)
    assert made.compute["bfloat16"].node is None, "each rank has a GPU"
