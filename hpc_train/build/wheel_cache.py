"""The cache of built wheels, which several users, nodes and environments may share."""

from __future__ import annotations

import os
import secrets
import sys
import tempfile
import zipfile
from contextlib import suppress
from pathlib import Path

from hpc_train import files
from hpc_train.build.toolchain import check_disk
from hpc_train.errors import SetupError

WHEEL_ROOM = 64 << 20  # for a wheel and the compiler's output
CACHE_REMEDY = "set XDG_CACHE_HOME to a folder that you may write to, on a disk with room"


def cache_directory() -> Path:
    """The folder of cached wheels: $XDG_CACHE_HOME/hpc_train, by default ~/.cache/hpc_train.

    Raises:
        SetupError: XDG_CACHE_HOME is not set, and there is no home directory.
    """
    root = os.environ.get("XDG_CACHE_HOME")
    try:
        return Path(root or Path.home() / ".cache", "hpc_train")
    except RuntimeError:  # neither HOME nor the list of users names a home
        raise SetupError("there is no home directory for the cache", CACHE_REMEDY) from None


def find_wheel(directory: Path) -> Path | None:
    """The wheel in a folder of the cache. One that is damaged counts as missing, and is told."""
    for wheel in sorted(directory.glob("*.whl")):
        try:
            with zipfile.ZipFile(wheel) as archive:
                if archive.testzip() is None:
                    return wheel
        except OSError as error:
            print(f"the cached wheel {wheel} cannot be read: {error.strerror}", flush=True)
            continue
        except Exception:  # noqa: BLE001  # damage may show in any part of the reader
            pass
        print(f"the cached wheel {wheel} is damaged, so it is built again", flush=True)
    return None


def prepare_folder(directory: Path) -> None:
    """Make a folder of the cache, and check that a wheel can be written there.

    Raises:
        SetupError: it cannot be written, or the disk or the user's quota is full.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory) as file:
            files.reserve(file.fileno(), 0, WHEEL_ROOM)  # a quota shows only here
    except OSError as error:
        cause = f"the cache {directory} cannot be written: {error.strerror}"
        raise SetupError(cause, CACHE_REMEDY) from None
    check_disk(directory, WHEEL_ROOM)


def new_log(directory: Path) -> Path:
    """Make a file for the compiler's output. Another build may write to the same folder."""
    descriptor, path = tempfile.mkstemp(prefix="build-", suffix=".log", dir=directory)
    os.close(descriptor)
    return Path(path)


def keep_wheel(wheel: Path, directory: Path) -> Path:
    """Copy a wheel into a folder of the cache, where it appears complete or not at all.

    Returns:
        The copy; the wheel itself if the folder takes no copy, because building it took minutes.
    """
    # Not the process's number: builds on two nodes may have the same.
    partial, kept = directory / f".{secrets.token_hex(8)}.partial", directory / wheel.name
    try:
        files.create(partial, [wheel.read_bytes()], os.O_EXCL)
        files.rename(partial, kept)
    except OSError as error:
        with suppress(OSError):
            partial.unlink()
        cause = f"the wheel cannot be kept in {directory}: {error.strerror}"
        print(f"horovod_build: warning: {cause}: {CACHE_REMEDY}", file=sys.stderr, flush=True)
        return wheel
    return kept
