from __future__ import annotations

import os
import socket
from functools import partial
from pathlib import Path

import pytest

from hpc_train import files
from hpc_train.errors import ConfigError, DataError, RankError, ReadNote, StorageError, UserError
from hpc_train.mpi.agreement import agreed, from_first, same, settle
from hpc_train.mpi.group import Group

pytestmark = pytest.mark.mpi


@pytest.mark.ranks(1, 2, 3, 4)
def test_nothing_happens_where_nobody_fails(group):
    with agreed(group):
        pass


@pytest.mark.ranks(1, 2, 3, 4)
def test_an_error_of_the_last_rank_is_raised_on_all_with_rank_and_host(group):
    last = group.size - 1
    with pytest.raises(DataError) as caught, agreed(group):
        if group.rank == last:
            raise DataError("shard 3 is gone", "prepare again")
    where = f"rank {last} ({socket.gethostname()}): " if group.comm else ""
    assert str(caught.value) == f"{where}shard 3 is gone: prepare again"


@pytest.mark.ranks(3, 4)
def test_of_several_errors_the_lowest_rank_speaks(group):
    with pytest.raises(ConfigError, match=r"^rank 1 \("), agreed(group):
        if group.rank > 0:
            raise ConfigError(f"mistake {group.rank}")


@pytest.mark.ranks(2, 3, 4)
def test_an_unexpected_exception_becomes_a_rank_error_on_all(group):
    with (
        pytest.raises(RankError, match=r"rank 0 .*: sample 3: ZeroDivisionError: x: its") as caught,
        agreed(group),
    ):
        if group.rank == 0:
            error = ZeroDivisionError("x")
            error.add_note(ReadNote("sample 3"))
            raise error
    assert caught.value.agreed


@pytest.mark.ranks(2, 3)
def test_a_file_that_one_rank_cannot_use_is_a_line_on_all_unless_a_user_opens_it(group):
    last, name = group.size - 1, Path("x" * 300)
    with pytest.raises(StorageError, match=f"rank 0 .*{name} cannot be used") as caught:
        from_first(group, partial(files.sync, name))
    assert caught.value.agreed
    with pytest.raises(RankError, match=f"rank {last} .*OSError"), agreed(group):
        if group.rank == last:
            name.touch()


class Numbered(UserError):
    """Takes other arguments than its base."""

    def __init__(self, number, *, kind):
        super().__init__(f"{kind} {number}", "count again")


class Rewritten(UserError):
    """Takes its base's arguments and makes something else of them."""

    def __init__(self, cause, remedy=""):
        super().__init__(cause.upper(), remedy)


class Unprintable(Exception):
    def __str__(self):
        raise RuntimeError("no")


def failing(kind):
    class Local(ConfigError):  # pickle does not find it
        pass

    match kind:
        case "arguments":
            return Numbered(3, kind="shard")
        case "rewritten":
            return Rewritten("shard 3", "count again")
        case "local":
            return Local("shard 3", "count again")
        case "no text":
            return UserError(Unprintable(), "count again")
        case _:
            return Unprintable()


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize(
    ("kind", "expected", "text"),
    [
        ("arguments", UserError, "shard 3: count again"),
        ("rewritten", UserError, "SHARD 3: count again"),
        ("local", ConfigError, "shard 3: count again"),
        ("no text", UserError, r"\(RuntimeError in its message\): count again"),
        ("unprintable", RankError, r"Unprintable: \(RuntimeError in its message\): its output has"),
    ],
)
def test_an_error_that_cannot_travel_is_raised_on_all_as_its_nearest_base(
    group, kind, expected, text
):
    with pytest.raises(expected, match=rf"^rank 0 \(.*\): {text}") as caught, agreed(group):
        if group.rank == 0:
            raise failing(kind)
    assert type(caught.value) is expected


@pytest.mark.ranks(1, 2, 3, 4)
def test_numbers_are_agreed_on_together_with_failures(group):
    assert settle(group, None, group.rank + 5) == group.size + 4
    failure = DataError("gone") if group.rank == group.size - 1 else None
    with pytest.raises(DataError, match="gone"):
        settle(group, failure, 1001)


@pytest.mark.ranks(1, 2, 3, 4)
def test_the_group_works_on_after_an_error(group):
    with pytest.raises(UserError), agreed(group):
        raise UserError("no")
    assert from_first(group, lambda: "still here") == "still here"


@pytest.mark.ranks(1, 2, 3, 4)
def test_from_first_runs_on_rank_0_and_fails_on_all_ranks(group):
    assert from_first(group, lambda: group.rank) == 0
    with pytest.raises(DataError):
        from_first(group, lambda: (_ for _ in ()).throw(DataError("gone")))


@pytest.mark.ranks(1, 2, 3, 4)
def test_same_names_the_first_rank_that_differs(group):
    same(group, "the data", "equal everywhere", "copy it")
    if group.size > 2:
        with pytest.raises(UserError, match=r"rank 2 .*the data differs from that of rank 0"):
            same(group, "the data", f"{group.rank == 2}", "copy it")
    path = os.fsdecode(b"run-\xff")  # a name that is no text
    if group.size > 1:
        with pytest.raises(UserError, match=r"rank 1 .*the path differs from that of rank 0"):
            same(group, "the path", path if group.rank == 1 else "run", "copy it")
    same(group, "the path", path, "copy it")


@pytest.mark.ranks(1, 2, 3, 4)
def test_numbers_of_all_ranks_are_combined(group):
    number = 10 * group.rank + (1 << 40)
    found = [group.largest(number), group.smallest(number), group.total(number)]
    every = [10 * rank + (1 << 40) for rank in range(group.size)]
    assert found == [max(every), min(every), sum(every)]


def test_a_process_alone_raises_what_it_was():
    with pytest.raises(ZeroDivisionError), agreed(Group()):
        raise ZeroDivisionError
