"""The cache of wheels gives whole wheels, also to several builds at once and on a full disk."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import zipfile

import pytest

from hpc_train import files
from hpc_train.build import wheel_cache
from hpc_train.errors import SetupError

NAME = "horovod-0.28.1-cp311-cp311-linux_x86_64.whl"


@pytest.fixture
def built(tmp_path):
    """A wheel that was built just now."""
    wheel = tmp_path / "built" / NAME
    wheel.parent.mkdir()
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("horovod/library.so", os.urandom(1 << 16))
    return wheel


@pytest.fixture
def cache(tmp_path):
    folder = tmp_path / "cache"
    wheel_cache.prepare_folder(folder)
    return folder


def test_a_kept_wheel_is_found_and_may_be_read_like_other_files(built, cache):
    assert wheel_cache.find_wheel(cache) is None
    kept = wheel_cache.keep_wheel(built, cache)
    assert wheel_cache.find_wheel(cache) == kept
    assert kept.read_bytes() == built.read_bytes()
    assert stat.S_IMODE(kept.stat().st_mode) == stat.S_IMODE(built.stat().st_mode)
    assert list(cache.iterdir()) == [kept]


@pytest.mark.parametrize("damage", ["cut off", "changed", "empty"])
def test_a_damaged_wheel_is_not_found_and_replaced(built, cache, damage, capsys):
    data = built.read_bytes()
    half = len(data) // 2
    changed = data[:half] + bytes([data[half] ^ 255]) + data[half + 1 :]
    (cache / NAME).write_bytes({"cut off": data[:half], "changed": changed, "empty": b""}[damage])
    assert wheel_cache.find_wheel(cache) is None
    assert f"{NAME} is damaged, so it is built again" in capsys.readouterr().out
    assert wheel_cache.find_wheel(cache.parent / "none") is None
    assert wheel_cache.find_wheel(wheel_cache.keep_wheel(built, cache).parent) == cache / NAME


def test_builds_of_one_process_number_do_not_write_to_one_file(built, cache, monkeypatch):
    """As on two nodes that share the cache."""
    written, create = [], files.create

    def between(path, parts, flag):
        create(path, parts, flag)
        written.append(path)
        if len(written) == 1:
            wheel_cache.keep_wheel(built, cache)

    monkeypatch.setattr(files, "create", between)
    wheel_cache.keep_wheel(built, cache)
    assert len({*written}) == 2
    assert wheel_cache.find_wheel(cache) == cache / NAME
    assert wheel_cache.new_log(cache) != wheel_cache.new_log(cache)


def full(*arguments):
    raise OSError(errno.EDQUOT, "Disk quota exceeded")


def test_a_full_quota_is_told_before_the_build(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "reserve", full)
    with pytest.raises(SetupError, match="cannot be written: Disk quota exceeded: set XDG_CACHE_H"):
        wheel_cache.prepare_folder(tmp_path / "cache")
    monkeypatch.undo()
    usage = shutil.disk_usage(tmp_path)._replace(free=1 << 20)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage)
    with pytest.raises(SetupError, match="has 1 MiB free, 64 MiB are needed"):
        wheel_cache.prepare_folder(tmp_path / "cache")


def test_a_wheel_that_the_cache_does_not_take_is_used_where_it_is(
    built, cache, monkeypatch, capsys
):
    monkeypatch.setattr(files, "rename", full)
    assert wheel_cache.keep_wheel(built, cache) == built
    assert "warning: the wheel cannot be kept in" in capsys.readouterr().err
    assert not list(cache.iterdir())


def test_a_cache_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(SetupError, match="cannot be written: Not a directory: set XDG_CACHE_HOME"):
        wheel_cache.prepare_folder(tmp_path / "file" / "cache")
