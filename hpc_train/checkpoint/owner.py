"""The owner of a directory: who it is, whether it has ended, and when another may follow it."""

from __future__ import annotations

import os
import secrets
import socket
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

from hpc_train import files
from hpc_train.host.process import begun_ticks


class Jobs(NamedTuple):
    """The user's jobs that the scheduler has started and not ended.

    Args:
        names: of the jobs, as in `ProcessPlace.job`.
        age: seconds since the scheduler answered.
    """

    names: frozenset[str]
    age: float


class ProcessPlace(NamedTuple):
    """What a scheduler and a launcher call a process.

    Args:
        job: the scheduler's job, as SCHEDULER:CLUSTER:NUMBER; "" without a scheduler.
        requeued: how often the scheduler has started the job again.
        launch: identifies one `hpc-train launch`; "" without one.
        attempt: how often `hpc-train launch` has started the ranks again.
    """

    job: str = ""
    requeued: int = 0
    launch: str = ""
    attempt: int = 0


NOWHERE = ProcessPlace()
RESTART_SILENCE = 25.0  # seconds, more than two heartbeats, after which an owner has died


@dataclass(frozen=True)
class Owner:
    """The owner of a directory: rank 0 of a job.

    The defaults stand for what the claim of another version does not tell.

    Args:
        token: a random one for this claim alone.
        place: of the job.
        user: the user's number.
        host: the name of rank 0's host.
        machine: the host's /etc/machine-id; "" if it has none.
        boot: identifies the host's last boot.
        space: the name space of process numbers.
        process: rank 0's process number; 0 if nobody can tell whether the process has ended.
        begin: when this process began, in ticks since the boot.
        timeout: seconds without a heartbeat after which others may take the directory; 0: never.
    """

    token: str = ""
    place: ProcessPlace = NOWHERE
    user: int = -1
    host: str = "an unknown host"
    machine: str = ""
    boot: str = ""
    space: str = ""
    process: int = 0
    begin: int | None = None
    timeout: float = 1800.0

    @classmethod
    def here(cls, place: ProcessPlace, timeout: float) -> Owner:
        """This process as an owner."""
        return cls(
            token=secrets.token_hex(8),
            place=place,
            user=os.getuid(),
            host=socket.gethostname(),
            machine=files.system_text("/etc/machine-id"),
            boot=files.system_text("/proc/sys/kernel/random/boot_id"),
            space=str(Path("/proc/self/ns/pid").stat().st_ino),
            process=os.getpid(),
            begin=begun_ticks(os.getpid()),
            timeout=timeout,
        )

    @classmethod
    def of(cls, content: bytes) -> Owner | None:
        """The owner that a claim's file names; None if the file is not written yet.

        Another version may have written it: what is unknown is ignored, and what is missing has its
        default.
        """
        values = files.parsed_object(content)
        if values is None:
            return None
        place = values.pop("place", None)
        known: dict[str, Any] = {"place": NOWHERE}
        parts = place[: len(NOWHERE)] if isinstance(place, list) else []
        if parts and all(map(_is_like, parts, NOWHERE)):
            known["place"] = ProcessPlace(*parts)
        for field in fields(cls):
            if field.name in values and _is_like(values[field.name], field.default):
                known[field.name] = values[field.name]
        if len(known) < len(fields(cls)):
            known["process"] = 0
        return cls(**known)

    def has_ended(self, seen_by: Owner) -> bool | None:
        """Whether its process is gone; None if the process `seen_by` cannot tell."""
        if not self.process:
            return None
        if self.boot == seen_by.boot and self.space == seen_by.space:
            begin = begun_ticks(self.process)
            if begin is None and self.user != seen_by.user:
                return None  # /proc may hide the processes of other users (hidepid)
            return begin != self.begin
        rebooted = (self.host, self.machine) == (seen_by.host, seen_by.machine)
        return True if rebooted and self.boot != seen_by.boot else None

    def __str__(self) -> str:
        scheduler, _, number = [*self.place.job.split(":"), "", ""][:3]
        process = f"{f'process {self.process}' if self.process else 'a process'} on {self.host}"
        return f"{scheduler.upper()} job {number} ({process})" if number else process


def _is_like(value: Any, default: Any) -> bool:
    """Whether a value from a claim has the type of its default; None stands for any type."""
    kind = (int, float) if isinstance(default, float) else type(default)
    return default is None or isinstance(value, kind)


def may_be_former(owner: Owner, mine: Owner, *, ended: bool | None) -> bool:
    """Whether an owner that may have ended is of the same job: then its silence tells.

    It may also live, as another step of that job on another host.
    """
    his, my = owner.place, mine.place
    return ended is None and bool(his.job) and (his.job, his.requeued) == (my.job, my.requeued)


def void(
    owner: Owner, mine: Owner, *, silent: float, ended: bool | None, jobs: Jobs | None
) -> bool:
    """Whether another may take the directory from its owner.

    Args:
        owner: of the directory.
        mine: the process that wants it.
        silent: seconds since the owner's last heartbeat, by the file system's clock.
        ended: `Owner.has_ended`, as seen by the process that wants it.
        jobs: the scheduler's answer; None if it gave none.
    """
    his, my = owner.place, mine.place
    if his.launch and his.launch == my.launch and his.attempt < my.attempt:
        return True  # `hpc-train launch` ends an attempt before it starts the next one
    if his.job and his.job == my.job and his.requeued < my.requeued:
        return True
    if may_be_former(owner, mine, ended=ended) and silent > RESTART_SILENCE:
        return True  # the job starts its ranks again on another host
    itself = (owner.boot, owner.space, owner.process, owner.begin)
    if ended or itself == (mine.boot, mine.space, mine.process, mine.begin):
        return True
    same_books = bool(his.job) and his.job.rpartition(":")[0] == my.job.rpartition(":")[0]
    if jobs is not None and same_books and owner.user == mine.user and silent > jobs.age:
        return his.job not in jobs.names
    return 0 < owner.timeout <= silent
