"""Profiles some steps of a job: the marks of all ranks in one trace, and torch.profiler's traces.

The configuration names the steps, or a request does, which is a file in the run directory. Rank 0
looks for it between two steps; the ranks hear of it in an agreement that they make there anyway.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from hpc_train import files
from hpc_train.config import ProfileSection
from hpc_train.config.profile import check_ranks, check_steps, parse_ranks
from hpc_train.errors import ConfigError, HpcTrainError
from hpc_train.launch.alive import newest_claim
from hpc_train.launch.profile_request import read_profile_request
from hpc_train.launch.protocol import PROFILE_ANSWER, PROFILE_REQUEST, PROFILES
from hpc_train.monitoring.trace import STEP, Marks, write_trace
from hpc_train.mpi import runtime
from hpc_train.mpi.agreement import settle
from hpc_train.mpi.clocks import ClockComparison, CommonTime
from hpc_train.mpi.group import Group

REQUEST_SECONDS = 1.0  # seconds between two looks for a request, which may be on a network

NO_TIMELINE = (
    "the profile has no timeline of Horovod, as this costs time in all steps: start the job with "
    "run.profile, or set HOROVOD_TIMELINE=DYNAMIC before it starts"
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ProfilePlan:
    """A profile to come.

    Args:
        first, last: its steps.
        ranks: where torch.profiler runs, as `ProfileSection` has it.
        request: identifies the request for it; "" if the configuration asks for it.
    """

    first: int
    last: int
    ranks: str
    request: str = ""

    def has(self, rank: int) -> bool:
        """Whether torch.profiler runs on a rank."""
        spans = parse_ranks(self.ranks) or []
        return any(first <= rank <= last for first, last in spans)


class Profiler:
    """Profiles the steps that the configuration or a request names. All ranks make it.

    A profile that cannot be written is a warning: training goes on.

    Args:
        world: all ranks of the job.
        node: the ranks that share this one's host.
        directory: the run directory, or that of a loop's checkpoints.
        after: the step after which training resumes.
        last_step: the last step of the run.
        section: which steps the configuration names.
        event: writes an event of the run, on rank 0.
    """

    def __init__(
        self,
        world: Group,
        node: Group,
        directory: Path,
        after: int,
        last_step: int,
        section: ProfileSection,
        event: Callable[..., None] | None = None,
    ) -> None:
        self.world, self.node, self.event = world, node, event
        self.folder, self.last_step = directory / PROFILES, last_step
        self._plans: list[ProfilePlan] = []  # of the configuration, and of one request
        self._recording: _Recording | None = None
        self._looked = 0.0
        if section.span is not None:
            first, last = max(section.span[0], after + 1), section.span[1]
            if first <= last:
                self._plans.append(ProfilePlan(first, last, str(section.ranks)))
            else:
                logger.info("run.profile: the run is past step %d, so it is not profiled", last)
        # Others were asked of this job while it started.
        if (
            world.rank == 0
            and read_profile_request(directory).get("claim") != newest_claim(directory).name
        ):
            self._forget_requests()

    def is_asked(self) -> bool:
        """Whether there is a request. Rank 0 looks, and at most once per REQUEST_SECONDS."""
        waits = self._recording is not None or any(plan.request for plan in self._plans)
        if self.world.rank or waits:
            return False
        now = time.monotonic()
        if now - self._looked < REQUEST_SECONDS:
            return False
        self._looked = now
        return files.is_there(self.folder / PROFILE_REQUEST)

    def take_request(self, step: int) -> None:
        """Plan the profile that was asked for. Collective.

        Args:
            step: the step that begins now. The profile begins with the next one.
        """
        plan = self.world.from_first(lambda: self._requested(step + 1))
        if plan is not None:
            self._plans.insert(0, plan)

    def _requested(self, first: int) -> ProfilePlan | None:
        """Read and remove the request. Nothing is raised here, as others wait for the result."""
        path = self.folder / PROFILE_REQUEST
        try:
            asked = json.loads(path.read_text(encoding="utf-8"))
            files.remove(path)
            last = min(first + int(asked["steps"]) - 1, self.last_step)
            plan = ProfilePlan(first, last, str(asked["ranks"]), str(asked["request"]))
        except (OSError, ValueError, KeyError, TypeError) as error:
            logger.warning("%s is not a request for a profile (%r)", path, error)
            with suppress(OSError):
                files.remove(path)
            return None
        try:
            check_ranks("--ranks", plan.ranks, self.world.size)
            check_steps("--steps", last - first + 1, plan.ranks)
        except ConfigError as error:
            self._answer(plan, "refused", error=str(error))
            return None
        if first > last:
            self._answer(plan, "refused", error="the run has no further steps")
            return None
        self._answer(plan, "taken", steps=[first, last])
        return plan

    def _answer(
        self, plan: ProfilePlan, state: Literal["taken", "refused", "written"], **more: Any
    ) -> None:
        """Tell the program that waits, if there is one."""
        if plan.request and self.world.rank == 0:
            self._looked = time.monotonic()  # the next answer does not follow at once
            text = json.dumps({"request": plan.request, "state": state, **more})
            try:
                files.write_text(self.folder / PROFILE_ANSWER, text)
            except OSError as error:
                logger.warning("the request for a profile cannot be answered (%s)", error)

    def ends_after(self, step: int) -> bool:
        """Whether a profile ends after a step, so that it is written then."""
        return self._recording is not None and step >= self._recording.plan.last

    def between(self, step: int) -> None:
        """End a profile after its last step, and begin one before its first. Collective.

        It is called between two steps.

        Args:
            step: the last finished step.
        """
        if self._recording is not None:
            self._recording.step(step)
        if self.ends_after(step):
            self.finish(step)
        # Where two plans overlap, the later one gets the steps that are left.
        due = [plan for plan in self._plans if plan.first <= step + 1 <= plan.last]
        if self._recording is None and due:
            self._plans.remove(due[0])
            plan = replace(due[0], first=step + 1)
            if self.world.rank == 0:
                logger.info("the profile of steps %d-%d begins", plan.first, plan.last)
            self._recording = _Recording(self.world, self.node, plan, self.folder)

    def finish(self, step: int) -> None:
        """End a profile that is under way, and write what it has. Collective.

        Args:
            step: the last finished step.
        """
        recording, self._recording = self._recording, None
        if recording is None:
            return
        plan = recording.plan
        if step < plan.first:
            recording.drop()
            self._answer(plan, "refused", error="the run has stopped")
            return
        steps = [plan.first, step]
        folder = self.folder / f"steps-{plan.first}-{step}"
        if self.world.rank == 0:
            logger.info("the profile of steps %d-%d is being written", *steps)
        try:
            recording.write(folder, step)
        except HpcTrainError as error:  # the same one on all ranks
            if self.world.rank == 0:
                logger.warning(
                    "the profile of steps %d-%d cannot be written (%s); training goes on",
                    *steps,
                    error,
                )
            self._answer(plan, "refused", error=f"it cannot be written: {error.cause}")
            return
        if self.world.rank == 0:
            logger.info("profile of steps %d-%d: %s", *steps, folder)
            if self.event is not None:
                self.event("profile", step, steps=steps, folder=f"{PROFILES}/{folder.name}")
        self._answer(plan, "written", steps=steps, folder=folder.name, note=recording.note)

    def close(self) -> None:
        """Stop recording on this rank alone, where training has ended by an error."""
        if self._recording is not None:
            self._recording.stop()
            self._recording = None
        self._forget_requests()

    def _forget_requests(self) -> None:
        """Remove a request that no step of this job follows any more."""
        if self.world.rank == 0:
            with suppress(OSError):
                files.remove(self.folder / PROFILE_REQUEST)


class _Recording:
    """A profile under way. Collective to make."""

    def __init__(self, world: Group, node: Group, plan: ProfilePlan, folder: Path) -> None:
        self.world, self.plan = world, plan
        self.marks = Marks()
        self.timeline: Path | None = None
        self.note = ""
        """What the profile lacks, and why."""
        self._torch: Any = None
        self._failure: Exception | None = None
        self._start_timeline(folder)
        self._start_torch()
        self._clocks = ClockComparison(world, node)
        self._begin = self._clocks.read()
        self._origin = world.from_first(lambda: self._begin.reference)
        self._wall = time.time()
        self._since = time.perf_counter()
        world.waiting.phases.listener = self.marks

    def _start_timeline(self, folder: Path) -> None:
        """Start Horovod's own timeline, if Horovod runs. It writes the file on rank 0."""
        hvd = runtime.running_horovod()
        if hvd is None:
            return
        if runtime.TIMELINE not in os.environ:
            self.note = NO_TIMELINE
            if self.world.rank == 0:
                logger.info("%s", NO_TIMELINE)
            return
        path = folder / f"horovod-steps-{self.plan.first}-{self.plan.last}.json"
        try:
            if self.world.rank == 0:
                folder.mkdir(parents=True, exist_ok=True)
            hvd.start_timeline(str(path))
            self.timeline = path
        except (OSError, ValueError) as error:
            if self.world.rank == 0:
                logger.warning("Horovod's timeline cannot be started (%s)", error)

    def _start_torch(self) -> None:
        """Start torch.profiler, if it is to run on this rank. The first start takes seconds."""
        if not self.plan.has(self.world.rank):
            return
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it would write to the console
        try:
            self._torch = torch.profiler.profile()
            self._torch.start()
        except Exception as error:  # noqa: BLE001  # the others hear of it at the end
            self._failure, self._torch = error, None

    def step(self, number: int) -> None:
        """Mark the end of a step, on this rank."""
        now = time.perf_counter()
        self.marks(STEP, f"step {number}", self._since, now)
        self._since = now
        if self._torch is not None:
            self._torch.step()

    def stop(self) -> None:
        """Stop recording, on this rank."""
        self.world.waiting.phases.listener = None
        hvd = runtime.running_horovod()
        if self.timeline is not None and hvd is not None:
            hvd.stop_timeline()
        if self._torch is not None:
            try:
                self._torch.stop()
            except Exception as error:  # noqa: BLE001  # the others hear of it in an agreement
                self._failure, self._torch = error, None

    def drop(self) -> None:
        """Stop, and write nothing. Collective."""
        self.stop()
        self._clocks.close()

    def write(self, folder: Path, last: int) -> None:
        """Stop, and write everything. Collective.

        Raises:
            HpcTrainError: something could not be written on some rank; on all ranks.
        """
        end = self._clocks.read()  # before `stop`, which takes torch.profiler seconds
        self.drop()
        about = {
            "steps": f"{self.plan.first}-{last}",
            "begin": self._wall,
            "ranks": self.world.size,
        }
        common, path = CommonTime(self._begin, end), folder / "trace.json.gz"
        lost = write_trace(self.world, path, self.marks, common, self._origin, about)
        failure = self._failure or lost or self._exported(folder)
        if isinstance(failure, OSError):  # such as a full disk: its traceback says nothing more
            failure = HpcTrainError(str(failure))
        settle(self.world, failure)
        if self.timeline is not None and self.world.rank == 0:
            logger.info("Horovod's timeline of these steps: %s", self.timeline)

    def _exported(self, folder: Path) -> Exception | None:
        """Write torch.profiler's trace of this rank; returns the error, if any."""
        if self._torch is None:
            return None
        path = folder / f"rank-{self.world.rank:03d}.torch.json.gz"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._torch.export_chrome_trace(str(path))
        except Exception as error:  # noqa: BLE001  # the others hear of it in an agreement
            return error
        return None
