"""A job that does not fit is refused, with the cheapest keys that would make it fit."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

from hpc_train.config.file import load
from hpc_train.errors import ConfigError, size_text
from hpc_train.planning.fits import PlannedJob, check_fits, check_host_fits
from hpc_train.planning.model import planned_shape

MODEL = "--model.vocab=256 --model.layers=8 --model.hidden=512 --model.heads=8 --data.batch=32"


NODES = ("node0", "node1", "node2", "node3")


def job(*options, nodes=4, ranks=2, **more) -> PlannedJob:
    config = load(None, [*MODEL.split(), f"--parallel.dp={nodes * ranks}", *options])
    node = np.repeat(np.arange(nodes), ranks).reshape(-1, 1, 1)
    return PlannedJob(config, planned_shape(config), node, **more)


def test_a_job_that_fits_is_not_refused():
    check_fits(job(), job().needed(), NODES)


def test_a_job_is_tight_where_gaps_between_its_tensors_may_not_fit():
    needed = job().needed()
    assert not job().is_tight(2 * needed)
    assert job().is_tight(round(1.2 * needed))


def test_the_remedies_fit_and_the_cheapest_comes_first():
    plain = job("--memory.zero=0")
    room = round(0.8 * plain.needed())
    with pytest.raises(ConfigError, match="the training needs .* of node0, which has") as caught:
        check_fits(plain, room, NODES)
    options = re.findall(r"(--memory[^(]*) \(needs", caught.value.remedy)
    assert options[0] == "--memory.zero 1"
    for text in options:
        assert job(*text.replace(" --", "\n--").replace(" ", "=").splitlines()).needed() <= room


def test_a_smaller_micro_batch_comes_first_if_it_is_enough():
    large = job("--memory.zero=1", "--data.batch=512", "--model.sequence=512")
    assert large.largest_micro_batch(large.needed()) == 64
    room = round(0.5 * large.needed())
    number = large.largest_micro_batch(room)
    assert 1 <= number < 64
    assert large.remedy(room).startswith(f"give --data.micro_batch {number} (needs ")


def test_each_node_is_compared_with_what_it_has():
    """A pipeline's first stage is the smallest, and so is its node's memory."""
    config = ("--parallel.dp=1", "--parallel.pp=4", "--model.layers=11", "--memory.zero=0")
    node = np.arange(4).reshape(1, 4, 1)
    planned = replace(job(), config=load(None, [*MODEL.split(), *config]), node=node)
    needs = planned.needs()
    assert len(set(needs.tolist())) > 1
    check_fits(planned, needs, NODES)
    most = int(needs.argmax())
    free = needs.copy()
    free[most] -= 1 << 20
    with pytest.raises(ConfigError, match=f"of {NODES[most]}, which has"):
        check_fits(planned, free, NODES)


def test_less_is_needed_the_more_is_divided():
    needed = [job(f"--memory.zero={zero}").needed() for zero in (0, 1, 2, 3)]
    assert needed == sorted(needed, reverse=True)
    assert job("--memory.recompute=full").needed() < job("--memory.recompute=selective").needed()


def test_a_node_with_one_rank_has_all_parameters_for_it_alone():
    node = np.array([0, 0, 0, 0, 0, 1]).reshape(-1, 1, 1)
    unequal = replace(job("--memory.zero=1", "--parallel.dp=6", "--data.batch=48"), node=node)
    equal = [
        job("--memory.zero=1", f"--data.batch={16 * ranks}", nodes=2, ranks=ranks).needs()[0]
        for ranks in (5, 1)
    ]
    assert unequal.needs().tolist() == equal
    assert unequal.layout.needs.rank == equal[1], "the rank that needs most is alone on its node"


@pytest.mark.parametrize(
    ("options", "more"),
    [
        ("--gradients.compression=powersgd", 2 / 2),
        ("--gradients.compression=powersgd\n--gradients.two_level=off", 2),
        ("--gradients.average_every=2", 1),
        ("--checkpoint.background=true", 3 / 8),
        ("--checkpoint.background=true\n--checkpoint.every=0", 0),
    ],
)
def test_buffers_of_other_keys_count(options, more):
    """Eight ranks on four nodes. Two of a node divide what is compressed, and all what is saved."""
    plain, keyed = (job("--memory.zero=0", *some) for some in ([], options.splitlines()))
    parameters = 4 * sum(part.parameters for part in plain.shape.parts())
    assert (keyed.needs() - plain.needs()).tolist() == [round(2 * more * parameters)] * 4
    assert replace(keyed, on_cpu=False).needed() == replace(plain, on_cpu=False).needed()


def test_saves_that_wait_are_named_if_they_make_a_job_fit():
    copied = job("--memory.zero=0", "--checkpoint.background=true")
    assert "--checkpoint.background false (needs" in copied.remedy(copied.needed() - 1)


def test_nothing_helps_a_job_that_is_far_too_large():
    with pytest.raises(ConfigError, match="take more nodes, or fewer ranks on each"):
        check_fits(job(), 1 << 20, NODES)
    with pytest.raises(ConfigError, match="the training needs .* TiB of node0"):
        check_fits(job("--model.hidden=1000000000"), 1 << 40, NODES)


def test_on_gpus_a_rank_counts_and_the_optimizer_can_move_to_the_host():
    on_gpu = job("--memory.zero=0", "--data.batch=8", on_cpu=False)
    assert on_gpu.needed() * 2 == job("--memory.zero=0", "--data.batch=8").needed()
    room = round(0.8 * on_gpu.needed())
    found = on_gpu.remedy(room)
    assert found.startswith("give --memory.zero 1 --memory.offload optimizer (needs")
    moved = job("--memory.offload=optimizer", "--data.batch=8", on_cpu=False)
    assert f"(needs {size_text(moved.needed())})" in found
    assert moved.needed() <= room


def test_what_is_moved_to_the_host_has_to_fit_there():
    moved = job("--memory.offload=optimizer", on_cpu=False)
    parameters = 4 * sum(part.parameters for part in moved.shape.parts())
    of_node = parameters * (1 + 2 + 2 / 4)  # of four nodes with two ranks each
    assert moved.host_needs() == pytest.approx([of_node] * 4, rel=1e-3)
    check_host_fits(moved, moved.host_needs(), NODES)
    free = moved.host_needs()
    free[2] -= 1 << 20
    with pytest.raises(
        ConfigError, match=r"needs .* of node2, which has .*: give --memory.zero 2 \(needs"
    ):
        check_host_fits(moved, free, NODES)
    with pytest.raises(ConfigError, match="take more nodes"):
        check_host_fits(moved, 1 << 20, NODES)


def test_the_remedies_of_a_full_host_are_those_that_help_there():
    moved = job("--memory.offload=optimizer", "--checkpoint.background=true", on_cpu=False)
    room = moved.host_needs() - 1
    found = re.findall(r"(--[^(]*) \(needs", moved.host_remedy(room))
    assert found == ["--checkpoint.background false", "--memory.zero 2"]


@pytest.mark.parametrize(
    ("options", "parameters"),
    [
        ("", 0),
        ("--gradients.engine=mpi\n--gradients.average_every=2", 0),
        ("--gradients.compression=fp16", 0),
        ("--gradients.engine=mpi\n--gradients.compression=powersgd", 2 + 2),
        ("--checkpoint.background=true", 2 * 3 / 8),
    ],
)
def test_hosts_of_gpus_are_sure_to_need_what_no_gpu_can_keep(options, parameters):
    """Gradients may be summed on GPUs, or in pieces, unless they are compressed."""
    on_gpu = job("--memory.zero=0", *options.split(), on_cpu=False)
    bytes_of_model = 4 * sum(part.parameters for part in on_gpu.shape.parts())
    assert on_gpu.host_needs().tolist() == [round(parameters * bytes_of_model)] * 4


def test_gradients_and_optimizer_state_are_counted_for_what_is_trained():
    weights = "--checkpoint.weights=base"
    whole = job("--memory.zero=0", weights, "--model.sequence=8")
    lora = job("--memory.zero=0", weights, "--model.sequence=8", "--finetune.lora=8")
    parameters = 4 * sum(part.parameters for part in whole.shape.parts())
    adapters = 4 * 8 * 8 * (16 * 512)  # rank x layers x rows and columns of a block's matrices
    saved = whole.needed() - lora.needed()  # on a node with two ranks
    assert saved == pytest.approx(2 * (3 * parameters - 4 * adapters), rel=1e-3)
