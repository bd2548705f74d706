"""Jobs from Python: submit one or many, look at them, wait for them, read their output, end them.

    from hpc_train import jobs

    job = jobs.submit("my.yaml", {"optimizer.lr": 1e-3}, nodes=4, ranks_per_node=8, time="2h")
    tasks = jobs.map("my.yaml", [{"run.seed": seed} for seed in range(4)], scheduler="local")
    for task in tasks:
        task.wait()

It does what `hpc-train submit`, `status`, `logs` and `cancel` do, and runs on login nodes: it loads
neither torch nor MPI.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from hpc_train.cli.submit import read_request
from hpc_train.config.file import KEYS
from hpc_train.errors import EXIT_STOPPED, HpcTrainError, UserError
from hpc_train.launch.cancel import cancel as cancel_run
from hpc_train.launch.cancel import write_stop
from hpc_train.launch.queued import read_events, read_tasks, still_queued, task_events, tasks_of
from hpc_train.launch.request import SubmitRequest
from hpc_train.launch.schedulers import QueuedJob
from hpc_train.launch.status import log_of
from hpc_train.launch.submit import submit as submit_request

JobState = Literal["queued", "running", "finished", "stopped", "failed"]
_POLL_SECONDS = 5.0  # between two questions to the scheduler
LATE_SECONDS = 30.0  # seconds in which a file system may bring the record of a job that has ended


def submit(
    what: str | Path | Sequence[str | Path],
    keys: Mapping[str, object] | None = None,
    **options: object,
) -> Job:
    """Submit a run.

    Args:
        what: path of a configuration; or the words of another program, which runs on each rank.
        keys: keys of the configuration with their values, such as {"optimizer.lr": 1e-3}. Another
            program takes "run.dir" only, the directory that it gives to `Loop` or `Trainer`.
        options: options of `hpc-train submit` with underscores, such as nodes=4, time="2h",
            scheduler="local", exclusive=True, directive=["--qos=debug"].

    Raises:
        UserError: the options are wrong, or the run has a job in the queue already.
        HpcTrainError: the scheduler refuses the job.
    """
    return Job(submit_request(_request(what, keys or {}, options)).run_dir)


def map(  # noqa: A001  # the name that users of executors know
    what: str | Path, tasks: Iterable[Mapping[str, object]], **options: object
) -> list[Job]:
    """Submit a task for each mapping of keys, as one array where the scheduler has arrays.

    Args:
        what: path of a configuration.
        tasks: for each task, the keys in which it differs. It has the run directory task-N below
            the one of the configuration.
        options: as for `submit`; each task has these resources.

    Raises:
        UserError: the options are wrong, or the run has a job in the queue already.
        HpcTrainError: the scheduler refuses the job.
    """
    each = [_words(keys) for keys in tasks]
    if not each:
        return []
    if "sweep" in options:
        raise UserError("`map` is given sweep", "leave it out: the tasks are the sweep")
    if any("--run.dir" in words for words in each):
        raise UserError("a task has run.dir", "leave it out: each task has task-N below run.dir")
    request = _request(what, {}, options)
    made = submit_request(replace(request, tasks=each))
    return [Job(made.run_dir, made.first_task + number) for number in range(len(each))]


@dataclass(frozen=True)
class Job:
    """A run that was submitted, or one task of it, with all jobs that follow the first one.

    It is made of what the run directory records. So `Job(Path("runs/my"))` is the job of a run that
    another program has submitted.

    Args:
        run: the run directory.
        task: the number of a task; None is the whole run.
    """

    run: Path
    task: int | None = None

    def __post_init__(self) -> None:
        """Take a path that is given as text, too."""
        object.__setattr__(self, "run", Path(self.run))

    @property
    def run_dir(self) -> Path:
        """The run directory, of the task if it is one."""
        return self.run if self.task is None else self.run / f"task-{self.task}"

    @property
    def ids(self) -> list[str]:
        """The scheduler's ids of the jobs so far."""
        events = self._events()
        found = [str(event[key]) for event in events for key in ("job", "next") if event.get(key)]
        return list(dict.fromkeys(found))

    @property
    def exit_code(self) -> int | None:
        """The exit code of the last job; None if it has not ended, or has left no record.

        That of a sweep is 0 if all tasks have finished, 75 if others have stopped early, and else
        that of the first task that failed.
        """
        if self.task is None and (tasks := read_tasks(self.run)):
            codes = [Job(self.run, int(task)).exit_code for task in tasks]
            bad = [code for code in codes if code not in _ENDS]
            return bad[0] if bad else EXIT_STOPPED if EXIT_STOPPED in codes else 0
        events = self._events()
        last = events[-1] if events else {}
        return int(last["code"]) if last.get("event") == "ended" and not last.get("next") else None

    @property
    def state(self) -> JobState:
        """What the run does now; the scheduler is asked.

        "stopped" is a run that has stopped early with a checkpoint, and that is not queued again.
        "failed" is any other end.

        Raises:
            HpcTrainError: the scheduler does not say.
        """
        if jobs := self._queued():
            running = any(job.state in ("RUNNING", "EXITING", "COMPLETING") for job in jobs)
            return "running" if running else "queued"
        return _ENDS.get(self.exit_code, "failed")

    def wait(self, timeout: float | None = None, poll: float = _POLL_SECONDS) -> int | None:
        """Wait until no job of the run is in the queue.

        Args:
            timeout: longest time to wait, in seconds; None: no limit.
            poll: seconds between two questions to the scheduler.

        Returns:
            The exit code: 0 finished, 75 stopped early with a checkpoint; None if the last job has
            left no record, because it was killed for instance.

        Raises:
            TimeoutError: a job of the run is still there.
        """
        end = None if timeout is None else time.monotonic() + timeout
        quiet: float | None = None
        while True:
            left: list[QueuedJob] | None = None
            with suppress(HpcTrainError):  # it may answer the next time
                left = self._queued()
            if left == []:
                quiet = time.monotonic() if quiet is None else quiet
                last = self._events()[-1:]
                recorded = bool(last) and last[0]["event"] == "ended" and not last[0].get("next")
                if recorded or time.monotonic() - quiet > LATE_SECONDS:
                    return self.exit_code
            elif left:  # after a moment in which the scheduler did not show it
                quiet = None
            if end is not None and time.monotonic() >= end:
                raise TimeoutError(f"{self.run_dir} has not ended within {timeout} s")
            time.sleep(min(poll, 1.0) if left == [] else poll)

    def logs(self, rank: int | None = None) -> str:
        """The newest output of the run's jobs, or the log of a rank.

        Raises:
            UserError: there is none yet.
        """
        return log_of(self.run_dir, rank).read_text(encoding="utf-8", errors="replace")

    def cancel(self, *, now: bool = False) -> str:
        """Stop the run for good; returns a line that says what happens now.

        Args:
            now: remove its jobs from the queue too, and end those that run. It ends all tasks.

        Raises:
            HpcTrainError: the scheduler does not end them.
        """
        if self.task is None or now:
            return cancel_run(self.run, now=now)
        self.run_dir.mkdir(parents=True, exist_ok=True)
        return write_stop(self.run_dir)

    def _events(self) -> list[dict[str, Any]]:
        """The records of this run, or of this task: those of its own folder, and its submission."""
        return read_events(self.run) if self.task is None else task_events(self.run, self.task)

    def _queued(self) -> list[QueuedJob]:
        _, jobs = still_queued(self.run)
        if self.task is None:
            return jobs
        own = {*self.ids}
        return [job for job in jobs if job.id in own or self.task in tasks_of(job.id)]


_ENDS: dict[int | None, JobState] = {0: "finished", EXIT_STOPPED: "stopped"}


def _request(
    what: str | Path | Sequence[str | Path],
    keys: Mapping[str, object],
    options: Mapping[str, object],
) -> SubmitRequest:
    words = []
    for name, value in options.items():
        if value is None or value is False:
            continue
        values = value if isinstance(value, list | tuple) else [value]
        words += [f"--{name}" if v is True else f"--{name}={v}" for v in values]
    if isinstance(what, str | Path):
        return read_request([str(what), *words, *_words(keys)])
    return read_request([*words, *_words(keys), "--", *(str(word) for word in what)])


def _words(keys: Mapping[str, object]) -> list[str]:
    """Keys of a configuration as options of the command line.

    Raises:
        UserError: a key has no section, or is None and cannot be.
    """
    for key, value in keys.items():
        if "." not in key:
            raise UserError(f"{key!r} is not a key of a configuration", "write section.key")
        if value is None and key in KEYS and "None" not in str(KEYS[key].type):
            raise UserError(f"{key} is None", "leave it out for its default, or give a value")
    texts = {key: "null" if value is None else str(value) for key, value in keys.items()}
    return [word for key, text in texts.items() for word in (f"--{key}", text)]
