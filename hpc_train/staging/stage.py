"""Copies an environment and data sets to all nodes; one rank of each node works."""

from __future__ import annotations

import logging
import math
import os
import re
import secrets
import signal
import stat
import time
import zlib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import NoReturn

from hpc_train.errors import HpcTrainError, UserError, plural
from hpc_train.mpi.agreement import all_arrive, from_first, settle
from hpc_train.mpi.levels import Levels
from hpc_train.mpi.runtime import Runtime
from hpc_train.staging import copy, environment
from hpc_train.staging.listing import Item, Listing, from_text, list_folders, to_text
from hpc_train.staging.relay import Relay
from hpc_train.staging.stream import Source, Stream, chunk_bytes

DATA = "data"  # the folder of the copies of data sets
SHARED_PROBE = ".shared"  # a file by which nodes find out whether they share a disk
INTERPRETER = re.compile(r"/bin/python[\d.]*$")
NOTHING = Listing({}, [])

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StageRequest:
    """What is to be copied, and where to.

    Args:
        to: a folder on the nodes' own disks; None for TMPDIR, or else /tmp.
        environment: the environment to copy; None for none.
        data: the folders of data sets.
    """

    to: Path | None = None
    environment: Path | None = None
    data: tuple[Path, ...] = ()


def copies_folder(to: Path | None, environ: Mapping[str, str]) -> Path:
    """The folder that a job's copies are in, and no other job's.

    It ends with the scheduler's number of the job, or the name of a local job, or else with the
    user's number.
    """
    from hpc_train.job.jobs import own_place  # it loads more than all else here: only rank 0 does

    # `flux run` gives its ranks a FLUX_JOB_ID of their own, and a batch script has none.
    number = environ.get("FLUX_ENCLOSING_ID") or own_place(environ).job.rpartition(":")[-1]
    number = number or environ.get("HPC_TRAIN_LOCAL_JOB") or f"user-{os.getuid()}"
    base = to or Path(environ.get("TMPDIR") or "/tmp")
    return base.absolute() / f"hpc_train-{number}"


def clean(runtime: Runtime, to: Path | None) -> None:
    """Remove the job's copies from all nodes. Collective.

    Raises:
        UserError: a node cannot remove its copy, or another call uses it; raised on all ranks.
    """
    levels = Levels.of(runtime.world)
    folder = from_first(runtime.world, lambda: copies_folder(to, os.environ))
    removed = False
    with _settled(levels):
        if levels.node.rank == 0 and folder.is_dir() and not folder.is_symlink():
            held = copy.lock(folder)
            try:
                removed = copy.remove_copy(folder)
            finally:
                os.close(held)
    count = runtime.world.total(int(removed))
    if count:
        runtime.print(f"{folder} is removed from {_nodes(count)}")
    else:
        runtime.print(f"{folder} is on no node: there is nothing to remove")
    levels.close()


def stage(runtime: Runtime, request: StageRequest) -> None:
    """Copy an environment and data sets to all nodes, and print how to use them. Collective.

    Raises:
        HpcTrainError: as `bring`.
    """
    begin = time.monotonic()
    levels = Levels.of(runtime.world)
    folder = from_first(runtime.world, lambda: copies_folder(request.to, os.environ))
    found = NOTHING
    with _settled(levels):
        if runtime.world.rank == 0:
            found = list_request(request, folder)
            _tell_what_is_missing(request, found)
    copied = bring(levels, found, folder)
    if runtime.world.rank == 0:
        size = f"{plural(len(found.items), 'file or folder', 'files and folders')}, "
        size += copy.amount(found.nbytes)
        did = f"copied in {time.monotonic() - begin:.1f} s" if copied else "there already"
        print(f"{folder}: {size}, {did}, on {_nodes(levels.nodes)}")
        for name in found.folders:
            print(f"{found.folders[name]} -> {folder}/{name}")
        print(f"to use it in a job script: . {folder / environment.ACTIVATE}", flush=True)
    levels.close()


def list_request(request: StageRequest, folder: Path) -> Listing:
    """List what is to be copied, with the script by which job scripts use it.

    Raises:
        UserError: something is not there, or cannot be read; two data sets have the same name; or
            there is nothing to copy.
    """
    folders = {}
    if request.environment is not None:
        environment.check_environment(request.environment)
        folders[environment.ENVIRONMENT] = request.environment
    for path in request.data:
        # A symbolic link gives the copy its own name, but `data/..` is another folder.
        named = path.resolve() if path.name in ("", "..") else path
        name = f"{DATA}/{named.name}"
        if not path.is_dir():
            raise UserError(f"{path} is not a folder", "give --data the folder of a data set")
        if name in folders:
            raise UserError(
                f"{path} and {folders[name]} have the same name", "stage one of them, or rename it"
            )
        folders[name] = path.resolve()
    if not folders:
        raise UserError(
            "there is nothing to copy: this Python is in no environment",
            "give --environment, or --data",
        )
    for path in folders.values():
        if folder.resolve().is_relative_to(path.resolve()):
            raise UserError(
                f"{folder}, the folder of the copies, is inside {path}, which is to be copied",
                "give --to a folder on the nodes' own disks, such as /tmp",
            )
    moved = environment.ENVIRONMENT if request.environment else ""
    found = list_folders(folders, folder, moved)
    made = {
        environment.ACTIVATE: (0o644, environment.activation(folder, request.environment)),
        environment.REMOVE: (0o755, environment.remover(folder)),
    }
    scripts = {name: os.fsencode(text) for name, (_, text) in made.items()}
    items = [
        Item(name, stat.S_IFREG | mode, 0, len(scripts[name])) for name, (mode, _) in made.items()
    ]
    return replace(found, items=[*found.items, *items], rewritten={**found.rewritten, **scripts})


def _tell_what_is_missing(request: StageRequest, found: Listing) -> None:
    if request.environment is not None:
        for sentence in environment.stays_behind(request.environment):
            logger.info("note: %s", sentence)
    aside = [path for path in found.leading_out if not INTERPRETER.search(path)]
    for paths, what in (
        (aside, "links lead to what is not copied"),
        (found.left_out, "sockets, pipes or devices are not copied"),
    ):
        if paths:
            more = ", ..." if len(paths) > 1 else ""
            logger.info("note: %d %s: %s%s", len(paths), what, paths[0], more)


def bring(levels: Levels, found: Listing, folder: Path) -> bool:
    """Copy what rank 0 has listed into a folder of each node, unless it is there. Collective.

    If a rank fails, or a signal ends the ranks, no node keeps a part of a copy.

    Args:
        levels: the ranks by nodes; the first rank of each node works.
        found: what to copy; only rank 0's counts.
        folder: the folder of the copies, the same path on all nodes.

    Returns:
        Whether it was copied; False if all nodes have it already.

    Raises:
        UserError: something cannot be read or written, or there is no room for it, or the nodes
            share the folder, or another call has copied other folders, or copies now; raised on
            all ranks.
        HpcTrainError: a node got other bytes than were sent, or its disk lost some; raised on all
            ranks.
    """
    works, cross = levels.node.rank == 0, levels.cross
    _check_own_disk(levels, folder)
    table = NOTHING
    if works:
        # Compressed, because the first node sends it to several.
        packed = cross.from_first(lambda: zlib.compress(to_text(found).encode(), level=1))
        table = from_text(zlib.decompress(packed).decode())
    stream = Stream(table.items, chunk_bytes(table.nbytes, levels.nodes))
    mine = copy.Copy(folder, table, stream)
    if _there_already(levels, mine):
        return False
    with _locked(levels, folder):
        if _there_already(levels, mine):  # another call has just copied it
            return False
        with _settled(levels):
            if works:
                mine.check_others()
        try:
            with _ended_by_signals():
                _copy(levels, Source(found, stream), mine)
        except BaseException:
            if works:
                with suppress(HpcTrainError):  # the error that is being raised says more
                    copy.remove_copy(folder)
            raise
    return True


def _there_already(levels: Levels, mine: copy.Copy) -> bool:
    """Whether all nodes have the whole copy. Collective."""
    whole = True
    with _settled(levels):
        if levels.node.rank == 0:
            whole = mine.whole()
    return bool(levels.whole.smallest(int(whole)))


@contextmanager
def _locked(levels: Levels, folder: Path) -> Iterator[None]:
    """Have other calls of `stage` refused while a block copies. Collective.

    Raises:
        UserError: another call copies to the folder of a node; raised on all ranks.
    """
    with ExitStack() as held:
        with _settled(levels):
            if levels.node.rank == 0:
                held.callback(os.close, copy.lock(folder))
        yield


def _copy(levels: Levels, source: Source, mine: copy.Copy) -> None:
    works, stream = levels.node.rank == 0, mine.stream
    with _settled(levels):
        if works:
            copy.empty(mine.folder)
            copy.check_room(mine.folder, mine.items)
            mine.begin()
    sizes = [stream.nbytes(number) for number in range(stream.chunks)]
    relay = Relay(levels.cross, sizes, source.read, mine.write)
    got = relay.run() if works else ""
    with _settled(levels):
        if relay.error is not None:
            raise relay.error
    sent = levels.cross.from_first(lambda: got) if works else ""
    with _settled(levels):
        if got != sent:
            raise HpcTrainError("other bytes came here than were sent", "stage again")
        if works:
            mine.finish()


def _check_own_disk(levels: Levels, folder: Path) -> None:
    """Check that no node sees a file of another one in its folder. Collective.

    Raises:
        UserError: a node cannot make the folder, or shares it; raised on all ranks.
    """
    works = levels.node.rank == 0
    first = works and levels.cross.rank == 0
    # A random name, as a probe of a call that was killed may have been left there.
    host, mark = levels.whole.from_first(lambda: (levels.whole.host, secrets.token_hex(8)))
    probe = folder / f"{SHARED_PROBE}-{mark}"
    with _settled(levels):
        if works:
            copy.make_folder(folder)
        if first:
            with copy.writing(folder):
                probe.touch()
    shared = works and not first and probe.exists()
    all_arrive(levels.whole, math.inf)
    with _settled(levels):
        if first:
            with copy.writing(folder):
                probe.unlink(missing_ok=True)
    if levels.whole.largest(int(shared)):
        with suppress(OSError):
            folder.rmdir()  # unless there is a copy in it
    with _settled(levels):
        if shared:
            raise UserError(
                f"{folder.parent} is the same folder as on {host}, so it is not on this node's own "
                "disk",
                "give --to a folder on the nodes' own disks, such as /tmp",
            )


@contextmanager
def _settled(levels: Levels) -> Iterator[None]:
    """Run a block that may fail on some ranks, like `agreed`; ranks that wait sleep. Collective."""
    failure: Exception | None = None
    try:
        yield
    except Exception as error:  # noqa: BLE001  # the other ranks must hear of any error
        failure = error
    all_arrive(levels.whole, math.inf)
    settle(levels.whole, failure)


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Have signals that end a job leave the block by SystemExit, so that its end is not left out.

    `hpc-train launch` sends SIGUSR1 to the ranks for each of them.
    """

    def leave(number: int, frame: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    heard = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
    before = {number: signal.signal(number, leave) for number in heard}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _nodes(count: int) -> str:
    return f"{count} node{'' if count == 1 else 's'}"
