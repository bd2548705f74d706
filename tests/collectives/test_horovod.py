"""What is Horovod's own: process sets of some ranks, and its order of ranks."""

from __future__ import annotations

import pytest
import torch

from hpc_train.mpi import runtime

pytestmark = [
    pytest.mark.mpi(min_size=4),
    pytest.mark.skipif(not runtime.horovod_built(), reason="Horovod is not built"),
]


def connected(job, color, key):
    """Collectives of the ranks that give the same color; those of 0 and 1 are pairs."""
    from hpc_train.collectives.horovod import HorovodCollectives

    hvd = runtime.start_horovod(job.world, [[0, 1], [2, 3]])
    group = job.world.split(color, key)
    return HorovodCollectives(group, hvd)


def test_process_sets_of_some_ranks_work_at_the_same_moment_and_do_not_mix(job):
    rank = job.world.rank
    over = connected(job, rank // 2, rank)
    every = connected(job, 0, rank)
    mine = torch.full((2, 2), float(rank))
    pending = [over.start_gather(mine, 1), every.start_gather(mine, 1), over.start_sum_(mine)]
    pair, all_ranks, total = (each.wait() for each in pending)
    sent = torch.full((1,), float(rank))
    over.broadcast_(sent, 1)
    first = rank // 2 * 2
    assert pair[0].tolist() == [first, first, first + 1, first + 1]
    assert all_ranks[0].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert total.tolist() == [[2 * first + 1.0] * 2] * 2
    assert sent.item() == first + 1
    over.group.close()
    every.group.close()


def test_ranks_that_do_not_ascend_can_sum_and_broadcast_but_not_gather(job):
    rank = job.world.rank
    over = connected(job, 0, 3 - rank)
    total, sent = torch.ones(3), torch.full((1,), float(rank))
    over.sum_(total)
    over.broadcast_(sent, 1)
    over.group.close()
    assert total.tolist() == [4.0] * 3
    assert sent.item() == 2
    for start in (over.start_gather, over.start_sum_scatter):
        with pytest.raises(ValueError, match=r"reorder ranks \[3, 2, 1, 0\]: gather over MPI"):
            start(torch.ones(4), 0)


def test_operations_of_one_kind_have_names_that_horovod_knows(job, monkeypatch):
    """Also where more are under way than there are names."""
    rank, size = job.world.rank, job.world.size
    over = connected(job, 0, rank)
    monkeypatch.setattr("hpc_train.collectives.horovod.NAMES_PER_KIND", 3)
    names, start = [], over.hvd.allreduce_async_

    def named(*args, name, **how):
        names.append(name)
        return start(*args, name=name, **how)

    monkeypatch.setattr(over.hvd, "allreduce_async_", named)
    found = []
    for _ in range(2):
        mine = [torch.full((4,), float(rank + number)) for number in range(7)]
        pending = [over.start_sum_(tensor) for tensor in mine]
        found += [each.wait().tolist() for each in pending]
    over.group.close()
    ranks = size * (size - 1) / 2
    assert found == [[ranks + size * number] * 4 for number in range(7)] * 2
    assert len(set(names)) == 3
