from __future__ import annotations

import random
from pathlib import Path

import pytest

from hpc_train.data.prepare.dealing import AbandonedError, Dealing
from hpc_train.data.prepare.partial import Preparation, ShardPortion


def dealings(folder, *, portions, size, finished=()):
    every = tuple(ShardPortion(f"train-{n:05d}", 1, 0, 0) for n in range(portions))
    made = Preparation(
        folder / "out", folder, folder / "attempt", None, 0, every, frozenset(finished)
    )
    made.attempt.mkdir()
    return [Dealing(made, rank, size) for rank in range(size)]


@pytest.mark.parametrize("size", [1, 3, 40])
def test_each_portion_is_taken_once_and_the_folder_is_seldom_listed(tmp_path, monkeypatch, size):
    ranks = dealings(tmp_path, portions=300, size=size, finished=["train-00007"])
    listings, listed = 0, Path.iterdir

    def counted(path):
        nonlocal listings
        listings += 1
        return listed(path)

    monkeypatch.setattr(Path, "iterdir", counted)
    generator, taken = random.Random(0), []
    while ranks:
        one = ranks[int(len(ranks) * generator.random() ** 2)]  # some ranks are faster
        portion = one.take()
        if portion is None:
            ranks.remove(one)
        else:
            taken.append(portion.name)
    assert sorted(taken) == [f"train-{n:05d}" for n in range(300) if n != 7]
    assert listings <= 10 * size


def test_a_rank_takes_no_more_when_another_has_failed(tmp_path):
    first, second = dealings(tmp_path, portions=4, size=2)
    assert first.take()
    second.fail()
    with pytest.raises(AbandonedError):
        first.take()
    first.close()
