"""Gradients on their way from a device: nobody sees them before they have come."""

from __future__ import annotations

import mmap
from types import SimpleNamespace

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from hpc_train.gradients import staging
from hpc_train.gradients.buckets import Bucket
from hpc_train.gradients.division import Reach
from hpc_train.gradients.progress import Progress
from hpc_train.gradients.shared_parameters import SharedParameters
from hpc_train.gradients.slots import Slot
from hpc_train.gradients.staging import CopyLane, PinnedMemory, StagedWriter
from hpc_train.gradients.sums import LevelSums
from hpc_train.mpi.group import Group
from hpc_train.mpi.levels import Levels
from hpc_train.planning import state
from tests.gradients.late_lane import PATIENCE, LateLane

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def ones(count, value=1.0):
    return torch.full((count,), value, dtype=torch.float64)


def test_what_is_planned_for_gradients_on_their_way_is_what_may_be():
    assert state.GRADIENTS_ON_GPU == staging.GRADIENTS_UNDER_WAY


def test_writes_end_in_order_and_only_when_the_copies_have():
    writer, view = StagedWriter(LateLane(CPU), 0, []), ones(3)
    first = writer.write(ones(3, 2.0), 0.5, view)
    ended = writer.ended()
    second = writer.add(ones(3, 4.0), 0.5, view)
    assert view.isnan().all()
    asked = 0
    while not ended():
        asked += 1
    assert 0 < asked <= PATIENCE
    writer.wait(first)
    assert (view == 1).all()
    writer.wait(second)
    assert (view == 3).all()
    assert writer.ended()()


def test_a_gradient_is_sent_in_the_type_and_the_order_of_the_bucket():
    writer, view = StagedWriter(LateLane(CPU), 0, []), torch.zeros(2, 3)
    sparse = torch.tensor([[0.0, 8.0, 0.0], [4.0, 0.0, 0.0]]).to_sparse()
    for gradient in (torch.ones(3, 2, dtype=torch.bfloat16).t(), sparse):
        writer.wait(writer.write(gradient, 0.5, view))
        assert torch.equal(view, gradient.to_dense().float() * 0.5)


def test_a_gradient_that_was_dropped_or_replaced_does_not_come_later():
    parameter, view = torch.nn.Parameter(ones(3)), ones(3)
    slot = Slot(parameter, view, 0, 0.5, lambda _: view, StagedWriter(LateLane(CPU), 0, []))
    slot.take(ones(3, 4.0))
    slot.filled = False  # as after `grad = None`
    slot.begin()
    slot.writer.close()
    assert (view == 0).all()
    slot.begin_step()
    for gradient, used in ((4.0, slot.take), (2.0, slot.add), (6.0, slot.take), (8.0, slot.add)):
        used(ones(3, gradient))
    slot.begin()
    slot.add(ones(3, 10.0))  # comes late
    assert (slot.late == 5).all()
    slot.writer.close()
    assert (view == 7).all()


def test_a_rank_is_not_ahead_of_its_device_by_more_than_a_limit(monkeypatch):
    monkeypatch.setattr(staging, "GRADIENTS_UNDER_WAY", 100)
    writer = StagedWriter(lane := LateLane(CPU), 0, [])
    views = [ones(10) for _ in range(4)]
    for view in views:  # of 80 bytes
        writer.write(ones(10, 7.0), 1.0, view)
        assert len(lane.begun) == 1
    assert [bool(view.isnan().any()) for view in views] == [False, False, False, True]
    writer.close()
    assert not lane.begun


class Streams:
    """Stands in for torch.cuda, and records the calls."""

    def __init__(self, refuse=()):
        self.seen, self.refuse = [], refuse

    def Stream(self, device):  # noqa: N802
        mine = "side", device.type
        return SimpleNamespace(
            wait_stream=lambda other: self.seen.append(("waits for", other.name)),
            record_event=lambda: self.seen.append("event") or SimpleNamespace(of=mine),
            synchronize=lambda: self.seen.append("synchronized"),
        )

    def current_stream(self, device):
        return SimpleNamespace(
            name="current", wait_event=lambda event: self.seen.append(("follows", *event.of))
        )

    def stream(self, stream):
        note = self.seen.append

        class Within:
            def __enter__(self):
                note("on the side")

            def __exit__(self, *_):
                note("off")

        return Within()

    def cudart(self):
        def register(address, nbytes, flags):
            self.seen.append(("pinned", address, nbytes, flags))
            return 1 if address in self.refuse else 0

        return SimpleNamespace(
            cudaHostRegister=register,
            cudaHostUnregister=lambda address: self.seen.append(("unpinned", address)),
        )


def test_on_a_gpu_copies_are_made_on_a_stream_of_their_own(monkeypatch):
    streams = Streams()
    monkeypatch.setattr(torch, "cuda", streams)
    lane, into = CopyLane(GPU), ones(2)
    mark = lane.copy(ones(2, 5.0), into)
    lane.follow(mark)
    lane.finish()
    order = [("waits for", "current"), "on the side", "event", "off"]
    assert streams.seen == [*order, ("follows", "side", "cuda"), "synchronized"]
    assert (into == 5).all()


def test_memory_is_pinned_once_and_as_far_as_it_can_be(monkeypatch, caplog):
    memory, other = torch.zeros(64), torch.zeros(16)
    streams = Streams(refuse=[other.data_ptr()])
    monkeypatch.setattr(torch, "cuda", streams)
    monkeypatch.setattr(staging, "_clear_error", lambda device: streams.seen.append("cleared"))
    pinned = PinnedMemory(GPU, [memory[:8], memory[8:], other, torch.empty(0)])
    both = [("pinned", memory.data_ptr(), 256, 0), ("pinned", other.data_ptr(), 64, 0)]
    assert streams.seen == [*both, "cleared"]
    assert "cannot be pinned (error 1 of the GPU's driver)" in caplog.text
    pinned.close()
    pinned.close()
    assert streams.seen[3:] == [("unpinned", memory.data_ptr())]


def test_memory_is_unpinned_and_freed_if_nobody_closes(monkeypatch):
    """As after an error in a notebook."""
    streams, memory = Streams(), torch.zeros(64)
    monkeypatch.setattr(torch, "cuda", streams)
    pinned, address = PinnedMemory(GPU, [memory]), memory.data_ptr()
    there = StorageWeakRef(memory.untyped_storage())
    del memory
    assert not there.expired()
    del pinned
    assert streams.seen == [("pinned", address, 256, 0), ("unpinned", address)]
    assert there.expired()


def test_on_processors_copies_are_made_at_once_and_nothing_is_pinned():
    lane, into = CopyLane(CPU), ones(2)
    PinnedMemory(CPU, [into]).close()
    mark = lane.copy(ones(2, 5.0), into)
    lane.follow(mark)
    lane.finish()
    mark.synchronize()
    assert mark.query()
    assert (into == 5).all()
    assert not lane.room(into).is_pinned()


@pytest.mark.parametrize("home", [0, 1])
def test_only_gradients_that_a_rank_has_whole_get_memory_on_the_device(home):
    parameter = torch.nn.Parameter(torch.zeros(3, 2).t())
    made = StagedWriter(LateLane(CPU), 1, []).published(parameter, torch.zeros(2, 3), home)
    assert (made is None) == (home == 0)
    assert made is None or made.stride() == parameter.stride()


def test_what_one_rank_of_a_node_has_pinned_lies_on_pages_of_its_own():
    """Small buckets of malloc would share pages with other memory, which a GPU pins once."""
    alone = Levels.flat(Group())
    buckets = [Bucket([torch.nn.Parameter(ones(3))], by_rows=True) for _ in range(2)]
    sums = LevelSums(alone, buckets, None, reach=[Reach.NODE] * 2)
    parameters = SharedParameters(sums, sums.division, Progress())
    parameters.move()
    memory = [sums.flats[0], *parameters.views().values()]
    assert [one.untyped_storage().data_ptr() % mmap.PAGESIZE for one in memory] == [0, 0, 0]
    assert all(torch.equal(view, ones(3)) for view in parameters.views().values())
