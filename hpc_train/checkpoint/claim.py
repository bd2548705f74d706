"""A directory has one writer. It is the owner of the claim, a file that one process alone can make.

The folder `.claim` has a numbered file for each start of a job. The highest number owns the
directory. A start that may take it makes the next number's file with O_EXCL, which succeeds for one
of several starts. So a claim that is read too late, or a list from a cache, costs another look and
never gives a directory to two starts. The file is written once. The owner's heartbeat changes its
time, and `NUMBER.free` beside it says that the owner has ended. Old numbers stay for a while,
because a number must not be given twice.

Before it writes anything, the owner checks that its number is still the highest. Files that are not
complete have its token in their names. So an owner that was suspended, and wakes when another has
taken the directory, finds that out, and cannot write to the other's files.
"""

from __future__ import annotations

import json
import os
import shlex
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path

from hpc_train import files
from hpc_train.checkpoint.owner import NOWHERE, Jobs, Owner, ProcessPlace, may_be_former, void
from hpc_train.errors import ClaimError, unwritable
from hpc_train.mpi.agreement import agreed
from hpc_train.mpi.group import Group

FOLDER = ".claim"
PERIOD = 10.0  # seconds between two heartbeats; a short timeout makes it shorter
OWNER_PATIENCE = 10.0  # seconds that a start waits for an owner that may be about to end
RESTART_PATIENCE = 30.0  # the same, for an owner of the same job whose silence tells
LOOK_SECONDS = 0.2  # seconds between two looks of a start that waits
CLAIM_CHECK_SECONDS = 1.0  # seconds between two checks of an owner that writes nothing
FORMER_CLAIMS = 8  # files of former claims that are kept


class Claim:
    """The claim of a directory. Rank 0's holds the directory; those of other ranks have its token.

    Args:
        folder: the folder with the claims' files.
        token: of the owner.
        number: of the claim; 0 for one that holds nothing.
        timeout: of the owner, in seconds.
    """

    def __init__(self, folder: Path, token: str, number: int = 0, timeout: float = 0.0) -> None:
        self.folder, self.token, self.number = folder, token, number
        self._lost: ClaimError | None = None
        self._looked = time.monotonic()
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        if number:
            period = min(PERIOD, timeout / 10) if timeout else PERIOD
            self._thread = threading.Thread(
                target=self._beat, args=(period,), name="claim", daemon=True
            )
            self._thread.start()

    def _beat(self, period: float) -> None:
        while not self._over.wait(period):
            with suppress(OSError):  # the next one may succeed, and `check` tells a lost claim
                os.utime(_file(self.folder, self.number))

    def check(self) -> None:
        """Make sure that the directory is still this job's. Call it before anything is written.

        Raises:
            ClaimError: another job has it.
        """
        if self._lost is None and self.number:
            self._looked = time.monotonic()
            self._lost = self._look()
        if self._lost is not None:
            self._over.set()
            raise self._lost

    def lost(self) -> ClaimError | None:
        """The error that `check` raised, if any. The last check is at most a second old."""
        if self._lost is None and time.monotonic() - self._looked >= CLAIM_CHECK_SECONDS:
            with suppress(ClaimError):
                self.check()
        return self._lost

    def _look(self) -> ClaimError | None:
        try:
            newest = max(_numbers(self.folder), default=0)
            owner = _read(self.folder, newest)
        except FileNotFoundError:
            newest, owner = 0, None
        except OSError:
            return None  # nobody can tell, and the next write will fail by itself
        if newest == self.number and (owner is None or owner.token == self.token):
            return None
        if owner is None and not files.is_there(self.folder.parent):
            return ClaimError(
                f"{self.folder.parent} is no longer there, so this job writes no more to it",
                "if it was moved, give its new path as run.dir (to a loop of your own as its "
                "directory), and the run goes on from its newest checkpoint; if it was removed, "
                "its checkpoints are gone: start again in another directory",
            )
        by = f"taken over by {owner}" if owner is not None else "taken from this job"
        return ClaimError(
            f"{self.folder.parent} was {by}, so this job writes no more to it",
            "start it again when no other job trains there: it goes on from the last checkpoint",
        )

    def release(self) -> None:
        """Free the directory, unless another job has it."""
        self._over.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
            if self._lost is None and self._look() is None:
                with suppress(OSError):
                    _create(_free(self.folder, self.number), b"")
        self.number = 0


@contextmanager
def claimed(
    group: Group,
    directory: Path,
    timeout: float,
    place: ProcessPlace = NOWHERE,
    jobs: Callable[[], Jobs | None] = lambda: None,
) -> Iterator[Claim]:
    """Claim a directory for a job while a block runs. Collective when the block is entered.

    Args:
        group: all ranks of the job.
        directory: is made if it does not exist.
        timeout: seconds without a heartbeat after which others may take it; 0: never.
        place: of the job.
        jobs: asks the scheduler for the user's jobs; None if it gives no answer.

    Raises:
        ClaimError: another job has the directory. The message names it, and says how to free it.
        ConfigError: the directory cannot be written.
    """
    claim: Claim | None = None
    with agreed(group):
        if group.rank == 0:
            try:
                claim = take_claim(directory, Owner.here(place, timeout), jobs)
            except OSError as error:
                raise unwritable(directory, error) from None
    token = group.from_first(lambda: claim.token if claim else "")
    claim = claim or Claim(directory / FOLDER, token)
    try:
        yield claim
    finally:
        claim.release()


def take_claim(
    directory: Path, mine: Owner, jobs: Callable[[], Jobs | None] = lambda: None
) -> Claim:
    """Claim a directory for this process. `claimed` describes arguments and errors.

    Raises:
        OSError: the directory cannot be written.
    """
    folder = directory / FOLDER
    begin, asked, known = time.monotonic(), jobs(), 0
    removed: FileNotFoundError | None = None
    while True:
        waited = time.monotonic() - begin
        try:
            folder.mkdir(parents=True, exist_ok=True)
            known = max(known, *_numbers(folder), 0)
            owner = _read(folder, known) if known else None
            silent = _silent(folder, known, mine.token) if known else 0.0
            # Measured after the silence: a wait between the two must not make the answer newer.
            said = asked and asked._replace(age=asked.age + time.monotonic() - begin)
            if _is_free(folder, known, owner, mine, silent, said):
                if _make(folder, known + 1, mine):
                    return Claim(folder, mine.token, known + 1, mine.timeout)
                known += 1  # another start has made it, even if a cached list lacks it
            removed = None
        except FileNotFoundError as error:  # it is being removed, or cannot be made
            known, owner, silent, removed = 0, None, 0.0, error
        former = owner is not None and may_be_former(owner, mine, ended=owner.has_ended(mine))
        if waited > (RESTART_PATIENCE if former else OWNER_PATIENCE):
            if removed is not None:
                raise removed
            who = owner if owner is not None else "a job that has just started"
            quoted = shlex.quote(str(folder))
            raise ClaimError(
                f"{directory} is in use by {who}, which was last heard of {silent:.0f} s ago",
                f"wait until it ends; if it is gone, free the folder by `rm -r {quoted}`",
            )
        time.sleep(LOOK_SECONDS)


def _is_free(
    folder: Path, number: int, owner: Owner | None, mine: Owner, silent: float, jobs: Jobs | None
) -> bool:
    if not number or _free(folder, number).exists():
        return True
    if owner is None:  # the process that made it has not written it yet, or died before it could
        return silent > OWNER_PATIENCE / 2
    return void(owner, mine, silent=silent, ended=owner.has_ended(mine), jobs=jobs)


def _file(folder: Path, number: int) -> Path:
    return folder / f"{number:06d}"


def _free(folder: Path, number: int) -> Path:
    return folder / f"{number:06d}.free"


def _numbers(folder: Path) -> list[int]:
    return [int(name) for name in files.call("list", os.listdir, folder) if name.isdigit()]


def _read(folder: Path, number: int) -> Owner | None:
    """The owner that a claim names; None if the file is not written yet."""
    with files.opened(_file(folder, number)) as descriptor:
        return Owner.of(files.read_at(descriptor, 4096, 0))


def _make(folder: Path, number: int, mine: Owner) -> bool:
    """Make a claim; returns whether it is the highest one."""
    path = _file(folder, number)
    try:
        _create(path, json.dumps(asdict(mine)).encode())
    except FileExistsError:
        return False
    except OSError:
        with suppress(OSError):
            files.remove(path)
        raise
    numbers = _numbers(folder)
    if max(numbers) > number:
        files.remove(path)
        return False
    old = [former for former in numbers if former < number - FORMER_CLAIMS]
    unused = [name(folder, former) for former in old for name in (_free, _file)]
    for path in [*unused, *folder.glob("probe-*")]:
        with suppress(OSError):
            files.remove(path)
    return True


def _create(path: Path, content: bytes) -> None:
    """Make a file that does not exist yet, durably."""
    files.create(path, [content], os.O_EXCL)
    files.sync_folder(path.parent)


def _silent(folder: Path, number: int, token: str) -> float:
    """Seconds since a claim's last heartbeat. The file system's clock gives both times."""
    probe = folder / f"probe-{token}"
    probe.touch()
    try:
        with files.opened(probe) as now, files.opened(_file(folder, number)) as then:
            return max(0.0, os.fstat(now).st_mtime - os.fstat(then).st_mtime)
    finally:
        files.remove(probe)
