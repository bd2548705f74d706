from __future__ import annotations

import os
import socket
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpc_train.errors import UserError
from hpc_train.mpi.group import Group
from hpc_train.staging import copy
from hpc_train.staging.copy import Copy, check_room, make_folder, remove_copy
from hpc_train.staging.listing import from_text, list_folders, to_text
from hpc_train.staging.relay import Relay
from hpc_train.staging.stream import Source, Stream
from tests.staging.trees import FOLDERS, make, seen


def copied(source: Path, folder: Path, chunk: int) -> Copy:
    """Copy a folder to folder/name, as one node does that is alone."""
    found = list_folders({"name": source}, folder)
    table = from_text(to_text(found))
    stream = Stream(table.items, chunk)
    made = Copy(folder, table, stream)
    make_folder(folder)
    made.begin()
    sizes = [stream.nbytes(number) for number in range(stream.chunks)]
    relay = Relay(Group(), sizes, Source(found, stream).read, made.write)
    relay.run()
    assert relay.error is None
    made.finish()
    return made


@settings(max_examples=60)
@given(FOLDERS, st.integers(1, 200))
def test_any_folder_arrives_as_it_is(tree, chunk):
    with TemporaryDirectory() as name:
        source, target = Path(name, "source"), Path(name, "target")
        make(source, tree)
        made = copied(source, target, chunk)
        assert seen(target / "name") == seen(source)
        assert made.whole()
        assert remove_copy(target)
        assert not target.exists()


def test_sockets_and_pipes_are_left_out_and_named(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    os.mkfifo(source / "pipe")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(source / "socket"))
        found = list_folders({"name": source}, tmp_path / "target")
    assert [item.path for item in found.items] == ["name"]
    assert found.left_out == [str(source / "pipe"), str(source / "socket")]


def damaged(made: Copy) -> None:
    made.folder.joinpath("name/file").write_bytes(b"123")


def shortened(made: Copy) -> None:
    os.truncate(made.folder / "name/file", 1)


def removed(made: Copy) -> None:
    made.folder.joinpath("name/file").unlink()


def half(made: Copy) -> None:
    made.folder.joinpath(copy.TABLE_FILE).unlink()


@pytest.mark.parametrize("damage", [damaged, shortened, removed, half])
def test_a_copy_that_is_not_whole_is_noticed(tmp_path, damage):
    source = tmp_path / "source"
    source.mkdir()
    (source / "file").write_bytes(b"1234")
    made = copied(source, tmp_path / "target", 3)
    (tmp_path / "target/name/more").write_bytes(b"")  # as Python adds .pyc files
    assert made.whole()
    damage(made)
    assert not made.whole()


def test_room_is_counted_in_blocks_and_files(tmp_path, monkeypatch):
    source = tmp_path / "source"
    source.mkdir()
    for number in range(10):
        (source / str(number)).write_bytes(b"1" * 4097)
    items = list_folders({"name": source}, tmp_path).items
    disk = SimpleNamespace(f_frsize=4096, f_bavail=31, f_files=0, f_favail=0)
    monkeypatch.setattr(os, "statvfs", lambda _: disk)
    check_room(tmp_path, items)  # 10 files of two blocks, and a block for each name
    disk.f_bavail = 30
    with pytest.raises(UserError, match="0.123 MB free, and 0.127 MB are needed: give another"):
        check_room(tmp_path, items)
    disk.f_bavail, disk.f_files, disk.f_favail = 31, 1000, 10
    with pytest.raises(UserError, match="10 more files, and 11 are needed"):
        check_room(tmp_path, items)


def test_a_folder_that_somebody_else_has_made_is_refused(tmp_path, monkeypatch):
    make_folder(tmp_path / "mine")
    assert (tmp_path / "mine").stat().st_mode & 0o777 == 0o700
    make_folder(tmp_path / "mine")
    (tmp_path / "link").symlink_to(tmp_path / "mine")
    with pytest.raises(UserError, match="not a folder of yours"):
        make_folder(tmp_path / "link")
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.raises(UserError, match="not a folder of yours"):
        make_folder(tmp_path / "mine")


def test_a_folder_that_cannot_be_made_says_why(tmp_path):
    (tmp_path / "file").write_text("")
    for name in ("file", "new"):
        with pytest.raises(UserError, match=f"{name} is not a folder on this node: give --to"):
            make_folder(tmp_path / name / "mine")
    assert [*tmp_path.iterdir()] == [tmp_path / "file"]
    with pytest.raises(UserError, match="fdinfo/mine.*: .*: give another"):
        make_folder(Path("/proc/self/fdinfo/mine"))
    assert not remove_copy(tmp_path / "file2/mine")
