"""One directory has one writer, by files that any file system can make exclusively.

The folder `.claim` has a numbered file for each start of a job; the highest number has the
directory. A start that may take it makes the next number with O_EXCL, which succeeds for one of
several. So a claim that is read too late, or a list that comes from a cache, costs another look and
never gives a directory to two. The file is written once; its time of change is the owner's
heartbeat, and `NUMBER.free` beside it says that the owner has ended. Old numbers stay for a while:
a number must not be given twice.

The owner looks whether its number is still the highest before whatever it writes. Files that are
being written have its token in their names. So an owner that was stopped, and wakes when another
has taken the directory, finds out, and cannot write to the other one's files.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from hpc_train import files
from hpc_train.errors import ClaimError, ConfigError
from hpc_train.mpi.agreement import agreed
from hpc_train.mpi.group import Group

FOLDER = ".claim"
PERIOD = 10.0  # seconds between two heartbeats, and less for a short timeout
OWNER_PATIENCE = 10.0  # seconds for which a start waits for an owner that may be about to end
LOOK_SECONDS = 0.2  # seconds between two looks meanwhile
CLAIM_CHECK_SECONDS = (
    1.0  # seconds between two looks of an owner at its claim, where nothing is written
)
FORMER_CLAIMS = 8  # former claims


class Jobs(NamedTuple):
    """The user's jobs that the scheduler has started and not ended.

    Args:
        names: as `ProcessPlace.job` has them.
        age: seconds since the scheduler said so.
    """

    names: frozenset[str]
    age: float


class ProcessPlace(NamedTuple):
    """Where a process stands in the books of schedulers and launchers.

    Args:
        job: the scheduler's, as SCHEDULER:CLUSTER:NUMBER; "" without a scheduler.
        requeued: how often the scheduler has started the job again.
        launch: of `hpc-train launch`; "" without.
        attempt: how often it has started the ranks again.
    """

    job: str = ""
    requeued: int = 0
    launch: str = ""
    attempt: int = 0


NOWHERE = ProcessPlace()


@dataclass(frozen=True)
class Owner:
    """Who has a directory.

    Args:
        token: random, of this claim alone.
        place: the job.
        user: the number of the user.
        host: of rank 0.
        machine: the host's own number; "" if it has none.
        boot: of the host.
        space: the name space of process numbers.
        process: rank 0's number.
        begin: when this process began, in ticks since the boot.
        timeout: seconds without a heartbeat after which the claim is void; 0: it never is.
    """

    token: str
    place: ProcessPlace
    user: int
    host: str
    machine: str
    boot: str
    space: str
    process: int
    begin: int
    timeout: float

    @classmethod
    def here(cls, place: ProcessPlace, timeout: float) -> Owner:
        """This process."""
        return cls(
            token=secrets.token_hex(8),
            place=place,
            user=os.getuid(),
            host=socket.gethostname(),
            machine=_content("/etc/machine-id"),
            boot=_content("/proc/sys/kernel/random/boot_id"),
            space=str(Path("/proc/self/ns/pid").stat().st_ino),
            process=os.getpid(),
            begin=_begin(os.getpid()),
            timeout=timeout,
        )

    @classmethod
    def of(cls, content: bytes) -> Owner | None:
        """As a claim has it; None: it is not written yet, or is no claim."""
        with suppress(ValueError, TypeError, KeyError):
            values = json.loads(content)
            return cls(**{**values, "place": ProcessPlace(*values["place"])})
        return None

    def has_ended(self, seen_by: Owner) -> bool | None:
        """Whether its process is gone, as another one on this machine sees it; None: it cannot."""
        if self.boot == seen_by.boot and self.space == seen_by.space:
            return _begin(self.process) != self.begin
        rebooted = (self.host, self.machine) == (seen_by.host, seen_by.machine)
        return True if rebooted and self.boot != seen_by.boot else None

    def __str__(self) -> str:
        scheduler, _, number = self.place.job.split(":") if self.place.job else ("", "", "")
        process = f"process {self.process} on {self.host}"
        return f"{scheduler.upper()} job {number} ({process})" if number else process


def void(
    owner: Owner, mine: Owner, *, silent: float, ended: bool | None, jobs: Jobs | None
) -> bool:
    """Whether another may take the directory from its owner.

    Args:
        owner: who has it.
        mine: who wants it.
        silent: seconds since the owner's last heartbeat, by the file system's clock.
        ended: `Owner.has_ended`, as the one who wants it sees it.
        jobs: what the scheduler has said; None: nothing.
    """
    his, my = owner.place, mine.place
    if his.launch and his.launch == my.launch and his.attempt < my.attempt:
        return True
    same_job = bool(his.job) and his.job == my.job
    if same_job and (his.requeued < my.requeued or ended is None):
        return True
    itself = (owner.boot, owner.space, owner.process, owner.begin)
    if ended or itself == (mine.boot, mine.space, mine.process, mine.begin):
        return True
    same_books = bool(his.job) and his.job.rpartition(":")[0] == my.job.rpartition(":")[0]
    if jobs is not None and same_books and owner.user == mine.user and silent > jobs.age:
        return his.job not in jobs.names
    return 0 < owner.timeout <= silent


class Claim:
    """A directory's claim, held by rank 0; that of other ranks holds nothing and has its token.

    Args:
        folder: the one of the claims.
        token: of the owner.
        number: of the claim; 0: it is held elsewhere.
        timeout: of the owner.
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
            with suppress(OSError):  # the next one may succeed; what is lost, a look tells
                os.utime(_file(self.folder, self.number))

    def check(self) -> None:
        """Make sure that the directory is still this job's, before something is written to it.

        Raises:
            ClaimError: another has it.
        """
        if self._lost is None and self.number:
            self._looked = time.monotonic()
            self._lost = self._look()
        if self._lost is not None:
            self._over.set()
            raise self._lost

    def lost(self) -> ClaimError | None:
        """The error of `check`, from a look that is at most a second old."""
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
            return None  # nobody can tell, and what is written next will fail by itself
        if newest == self.number and (owner is None or owner.token == self.token):
            return None
        by = f"taken over by {owner}" if owner is not None else "taken from it"
        return ClaimError(
            f"{self.folder.parent} was {by}, so this job writes no more to it",
            "start it again when no other job trains there: it goes on from the last checkpoint",
        )

    def release(self) -> None:
        """Let the directory go, unless another has it."""
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
    """Claim a directory for a job while a block runs. Collective to enter.

    Args:
        group: all ranks of the job.
        directory: made if it is not there.
        timeout: seconds without a heartbeat after which others may take it; 0: they may not.
        place: the job's.
        jobs: asks the scheduler.

    Raises:
        ClaimError: another job has it; the message says which, and how to free it.
        ConfigError: it cannot be written.
    """
    claim: Claim | None = None
    with agreed(group):
        if group.rank == 0:
            try:
                claim = take_claim(directory, Owner.here(place, timeout), jobs)
            except OSError as error:
                raise ConfigError(
                    f"{directory} cannot be written ({error.strerror}: {error.filename})",
                    "give a folder that you may write to, or free space",
                ) from None
    token = group.from_first(lambda: claim.token if claim else "")
    claim = claim or Claim(directory / FOLDER, token)
    try:
        yield claim
    finally:
        claim.release()


def take_claim(
    directory: Path, mine: Owner, jobs: Callable[[], Jobs | None] = lambda: None
) -> Claim:
    """Claim a directory for this process, as `claimed`."""
    folder = directory / FOLDER
    begin, asked, known = time.monotonic(), jobs(), 0
    while True:
        waited = time.monotonic() - begin
        said = asked and asked._replace(age=asked.age + waited)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            known = max(known, *_numbers(folder), 0)
            owner = _read(folder, known) if known else None
            silent = _silent(folder, known, mine.token) if known else 0.0
            if _is_free(folder, known, owner, mine, silent, said):
                if _make(folder, known + 1, mine):
                    return Claim(folder, mine.token, known + 1, mine.timeout)
                known += 1  # whatever the list says: somebody has made it
        except FileNotFoundError:  # somebody is freeing the folder
            known, owner, silent = 0, None, 0.0
        if waited > OWNER_PATIENCE:
            who = owner if owner is not None else "a job that has just started"
            raise ClaimError(
                f"{directory} is in use by {who}, which was last heard of {silent:.0f} s ago",
                f"wait until it ends; if it is gone, free the folder by `rm -r {folder}`",
            )
        time.sleep(LOOK_SECONDS)


def _is_free(
    folder: Path, number: int, owner: Owner | None, mine: Owner, silent: float, jobs: Jobs | None
) -> bool:
    if not number or _free(folder, number).exists():
        return True
    if owner is None:  # its maker has not written it yet, or died before it could
        return silent > OWNER_PATIENCE / 2
    return void(owner, mine, silent=silent, ended=owner.has_ended(mine), jobs=jobs)


def _file(folder: Path, number: int) -> Path:
    return folder / f"{number:06d}"


def _free(folder: Path, number: int) -> Path:
    return folder / f"{number:06d}.free"


def _files(folder: Path, number: int) -> tuple[Path, Path]:
    return _free(folder, number), _file(folder, number)


def _numbers(folder: Path) -> list[int]:
    return [int(name) for name in files.call("list", os.listdir, folder) if name.isdigit()]


def _read(folder: Path, number: int) -> Owner | None:
    """What a claim says; None: nothing yet, or nothing that can be read."""
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
    former = [
        path for old in numbers if old < number - FORMER_CLAIMS for path in _files(folder, old)
    ]
    for path in [*former, *folder.glob("probe-*")]:
        with suppress(OSError):
            files.remove(path)
    return True


def _create(path: Path, content: bytes) -> None:
    """Make a file that was not there, durably."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    descriptor = files.call("create", os.open, path, flags, 0o666)
    try:
        files.write_at(descriptor, content, 0)
        files.call("sync", os.fsync, descriptor)
    finally:
        files.call("close", os.close, descriptor)
    files.sync_folder(path.parent)


def _silent(folder: Path, number: int, token: str) -> float:
    """Seconds since a claim's last heartbeat, both by the file system's clock."""
    probe = folder / f"probe-{token}"
    probe.touch()
    try:
        with files.opened(probe) as now, files.opened(_file(folder, number)) as then:
            return max(0.0, os.fstat(now).st_mtime - os.fstat(then).st_mtime)
    finally:
        files.remove(probe)


def _content(path: str) -> str:
    with suppress(OSError):
        return Path(path).read_text().strip()
    return ""


def _begin(process: int) -> int:
    """When a process began, in ticks since the boot; -1: it has ended."""
    try:
        text = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return -1
    state, *rest = text.rpartition(")")[2].split()  # proc(5), fields 3 and up
    return -1 if state in "ZX" else int(rest[18])
