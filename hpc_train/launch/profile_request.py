"""Asks a running job for a profile, by a file in its run directory.

The job removes the request when it takes it up, and writes its answer to another file: first that
it has begun, then where the profile is.
"""

from __future__ import annotations

import json
import secrets
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from hpc_train import files
from hpc_train.config.profile import check_ranks, check_steps
from hpc_train.errors import UserError
from hpc_train.launch.alive import SILENCE, newest_claim
from hpc_train.launch.protocol import PROFILE_ANSWER, PROFILE_REQUEST, PROFILES

PROFILE_POLL = 0.2
GONE_SECONDS = 5.0  # seconds until a request is given up that is gone and has no answer


class ProfileRequest:
    """A request to a running job. It is written when the object is made.

    Args:
        run: the run directory.
        steps: number of steps to profile.
        ranks: on which torch.profiler runs, as `run.profile.ranks` has it.

    Raises:
        UserError: there is no such folder, no job runs there, another request waits, there are no
            such ranks, or these are too many steps for torch.profiler.
    """

    def __init__(self, run: Path, steps: int, ranks: str) -> None:
        check_ranks("--ranks", ranks)
        check_steps("--steps", steps, ranks)
        if not run.is_dir():
            raise UserError(f"{run} is not a run directory", "give the run.dir of a job")
        self.run, self.folder = run, run / PROFILES
        self.note = ""
        """What the profile lacks, and why; empty if there is nothing, or it is not written."""
        self._number = secrets.token_hex(8)
        self._file = self.folder / PROFILE_REQUEST
        self._claim = newest_claim(run)
        self._check_runs()
        if (
            read_profile_request(run).get("claim") == self._claim.name
        ):  # one to a former job is replaced
            raise UserError(
                f"another request for a profile waits in {self._file}",
                "wait until the job takes it up, or remove the file",
            )
        try:
            self.folder.mkdir(exist_ok=True)
            asked = {"request": self._number, "claim": self._claim.name}
            text = json.dumps({**asked, "steps": steps, "ranks": ranks})
            files.write_text(self._file, text)
            # The file system's clock gives both times.
            silent = self._file.stat().st_mtime - self._claim.stat().st_mtime
        except OSError as error:
            raise UserError(
                f"{self._file} cannot be written ({error.strerror})", "ask as the run's owner"
            ) from None
        if silent > SILENCE:
            self._withdraw()
            raise UserError(
                f"the job of {run} was last heard of {silent:.0f} s ago, so it does not run",
                "start it, or set run.profile.steps",
            )

    def _check_runs(self) -> None:
        if not self._claim.exists() or self._claim.with_suffix(".free").exists():
            raise UserError(f"no job runs in {self.run}", "start it, or set run.profile.steps")

    def _withdraw(self) -> None:
        if self._waits():  # else a request that is there now is another's
            with suppress(OSError):
                files.remove(self._file)

    def _waits(self) -> bool:
        """Whether the request is still there."""
        return read_profile_request(self.run).get("request") == self._number

    def wait(self, timeout: float) -> Path:
        """Wait until the profile is written; returns the trace.

        Args:
            timeout: seconds that the job has to take the request up.

        Raises:
            UserError: the job refuses, does not answer or has ended, or the request is gone.
        """
        begin = heard = there = time.monotonic()
        beat, taken = 0.0, False
        try:
            while True:
                said = self._answer()
                taken = taken or bool(said)
                if said.get("state") == "refused":
                    raise UserError(f"there is no profile: {said['error']}")
                if said.get("state") == "written":
                    self.note = str(said.get("note") or "")
                    return self.folder / str(said["folder"]) / "trace.json.gz"
                now = time.monotonic()
                if not taken and now - begin > timeout:
                    raise UserError(
                        f"the job of {self.run} has not answered for {timeout:.0f} s",
                        "give --timeout more than a step takes, or look whether the job still runs",
                    )
                self._check_runs()
                with suppress(OSError):
                    if (new := self._claim.stat().st_mtime) != beat:
                        beat, heard = new, now
                if now - heard > SILENCE:
                    raise UserError(f"the job of {self.run} has ended without a profile")
                if taken or self._waits():
                    there = now
                if now - there > GONE_SECONDS:
                    raise UserError(
                        f"the request was removed, and the job of {self.run} has not answered it",
                        "ask again",
                    )
                time.sleep(PROFILE_POLL)
        finally:
            self._withdraw()

    def _answer(self) -> dict[str, Any]:
        """What the job says to this request; empty if it has said nothing yet."""
        with suppress(OSError, ValueError):
            said = json.loads((self.folder / PROFILE_ANSWER).read_text(encoding="utf-8"))
            if isinstance(said, dict) and said.get("request") == self._number:
                return said
        return {}


def read_profile_request(run: Path) -> dict[str, Any]:
    """The request that waits in a run directory; empty if there is none that can be read."""
    with suppress(OSError, ValueError):
        asked = json.loads((run / PROFILES / PROFILE_REQUEST).read_text(encoding="utf-8"))
        if isinstance(asked, dict):
            return asked
    return {}
