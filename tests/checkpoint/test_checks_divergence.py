"""Replicas that should hold the same bits, and do not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hpc_train.checkpoint import Checkpoints, checks
from hpc_train.checkpoint.catalogue import find_checkpoints
from hpc_train.checkpoint.checks import bytes_to_compare
from hpc_train.checkpoint.state import TrainingState
from hpc_train.collectives import connect
from hpc_train.errors import DivergenceError, UserError
from tests.checkpoint.states import store

sizes = st.dictionaries(st.text("abc", min_size=1), st.integers(0, 50), max_size=6)


@given(sizes, st.integers(1, 60))
def test_the_samples_of_all_turns_cover_every_byte(sizes, at_once):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checks, "COMPARED_BYTES", at_once)
        seen = []
        for turn in range(-(-sum(sizes.values()) // at_once)):
            pieces = bytes_to_compare(sizes, turn)
            assert sum(end - begin for _, begin, end in pieces) == min(at_once, sum(sizes.values()))
            seen += [(name, byte) for name, begin, end in pieces for byte in range(begin, end)]
    assert {*seen} == {(name, byte) for name, size in sizes.items() for byte in range(size)}


def drifted(directory, group, rank, replicas="stop"):
    """A model of which one rank has another bit. Collective."""
    made = store(directory, group)
    made.policy = replace(made.policy, replicas=replicas)
    if group.rank == rank:
        with torch.no_grad():
            made.state.model.weight.view(-1).view(torch.uint8)[77] ^= 1
    return made


@pytest.mark.mpi(min_size=4)
@pytest.mark.parametrize("rank", [0, 2])
def test_one_rank_that_has_drifted_is_named_before_it_is_saved(job, together, rank):
    made = drifted(together, job.world, rank)
    host = job.world.host
    text = rf"model\.weight of rank {rank} \({host}\) is not what the other 3 replicas have"
    with pytest.raises(DivergenceError, match=text) as error:
        made.save(1)
    job.world.barrier()
    assert error.value.agreed
    assert not find_checkpoints(together, "auto")


@pytest.mark.mpi(min_size=4)
def test_of_two_replicas_that_differ_both_are_named(job, together):
    pair = job.world.split(job.world.rank // 2, job.world.rank)
    made = drifted(together / str(job.world.rank // 2), pair, 1)
    text = r"model\.weight differs between rank 0 \(.*\), rank 1 \("
    with pytest.raises(DivergenceError, match=text):
        made.save(1)
    pair.close()


@pytest.mark.parametrize("values", ["aab", "ab"])
@pytest.mark.parametrize("hosts", [1, 2])
def test_the_program_is_named_first_and_hosts_only_if_there_are_several(values, hosts):
    ranks = [(rank, f"node{rank % hosts}") for rank in range(len(values))]
    error = checks._divergence_error("weight", tuple(map(str.encode, values)), ranks)
    assert error.remedy.startswith("take the same learning rate on all ranks, and write ")
    assert ("host" in error.remedy) == (hosts > 1)


@pytest.mark.mpi(min_size=4)
def test_what_is_not_in_a_sample_is_in_a_later_one(job, together, monkeypatch):
    monkeypatch.setattr(checks, "COMPARED_BYTES", 256)
    made = drifted(together, job.world, 1)
    with torch.no_grad():
        made.state.model.weight.view(-1)[77 // 4] = 0.0  # the same again
        if job.world.rank == 1:
            made.state.model.weight.view(-1)[300] += 1.0
    with pytest.raises(DivergenceError):
        for step in range(1, 200):
            made.save(step)
    assert made.saved_step > 0


@pytest.mark.mpi(min_size=4)
def test_other_tensors_are_no_drift(job, together):
    model = store(together, job.world).state.model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    made = Checkpoints(together, connect(job.world), TrainingState(model, optimizer))
    if job.world.rank == 1:
        model(torch.ones(40)).sum().backward()
        optimizer.step()  # which makes momentum buffers
    with pytest.raises(UserError, match=r"rank 1 .* differs .* in optim\."):
        made.save(1)


@pytest.mark.mpi(min_size=4)
@pytest.mark.parametrize("replicas", ["warn", "off"])
def test_differing_replicas_are_saved_with_warn_and_off(job, together, replicas, caplog):
    drifted(together, job.world, 3, replicas).save(1)
    job.world.barrier()
    assert len(find_checkpoints(together, "auto")) == 1
    warned = "is not what the other 3 replicas have" in caplog.text
    assert warned == (replicas == "warn" and job.world.rank == 0)
