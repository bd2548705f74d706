"""A directory has one writer, whatever the file system does late, and whoever sleeps meanwhile."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import threading
import time
from collections import deque
from dataclasses import replace

import pytest

from hpc_train import files
from hpc_train.checkpoint import claim as claims
from hpc_train.checkpoint import owner as owners
from hpc_train.checkpoint.catalogue import find_checkpoints, step_of
from hpc_train.checkpoint.claim import Claim, claimed, take_claim
from hpc_train.checkpoint.owner import NOWHERE, Jobs, Owner, ProcessPlace, void
from hpc_train.errors import ClaimError, ConfigError
from hpc_train.host.process import begun_ticks
from hpc_train.mpi.group import Group
from tests.checkpoint.faults import Call, fail, faults
from tests.checkpoint.states import found, save, store

OTHERS: deque[int] = deque()
JOB = ProcessPlace("slurm:c:7")
LAUNCH = ProcessPlace(launch="a", attempt=1)


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(claims, "OWNER_PATIENCE", 0.3)
    monkeypatch.setattr(claims, "LOOK_SECONDS", 0.01)


@pytest.fixture(scope="module", autouse=True)
def processes():
    started = [subprocess.Popen(["sleep", "1000"]) for _ in range(8)]
    OTHERS.extend(process.pid for process in started)
    yield
    OTHERS.clear()
    for process in started:
        process.kill()
        process.wait()


def living(place: ProcessPlace = NOWHERE, timeout: float = 1800.0) -> Owner:
    """A process that is there, and is neither this one nor that of the call before."""
    OTHERS.rotate()
    here = Owner.here(place, timeout)
    return replace(here, process=OTHERS[0], begin=begun_ticks(OTHERS[0]))


@pytest.mark.parametrize(
    ("his", "mine", "ended", "named", "expected"),
    [
        (ProcessPlace(), ProcessPlace(), False, None, False),
        (ProcessPlace(), ProcessPlace(), True, None, True),
        (ProcessPlace(), ProcessPlace(), None, None, False),
        (LAUNCH, LAUNCH._replace(attempt=2), False, None, True),
        (LAUNCH, LAUNCH._replace(attempt=0), None, None, False),
        (LAUNCH, LAUNCH, False, None, False),
        (LAUNCH, LAUNCH._replace(launch="b", attempt=2), None, None, False),
        (JOB, JOB._replace(requeued=1), False, None, True),
        (JOB._replace(requeued=1), JOB, False, None, False),
        (JOB, JOB, False, None, False),
        (JOB, ProcessPlace("slurm:c:8"), None, {"slurm:c:8"}, True),
        (JOB, ProcessPlace("slurm:c:8"), None, {"slurm:c:7", "slurm:c:8"}, False),
        (JOB, ProcessPlace("slurm:d:8"), None, {"slurm:d:8"}, False),
        (JOB, ProcessPlace("slurm:c:8"), None, None, False),
    ],
)
def test_who_may_take_a_directory_from_whom(his, mine, ended, named, expected):
    jobs = None if named is None else Jobs(frozenset(named), age=3.0)
    owner, wants = living(his), living(mine)
    assert void(owner, wants, silent=5.0, ended=ended, jobs=jobs) is expected
    if expected is False:
        assert void(owner, wants, silent=1801.0, ended=ended, jobs=None)
        assert not void(replace(owner, timeout=0.0), wants, silent=1e9, ended=ended, jobs=None)


def test_a_step_of_a_job_takes_no_directory_of_another_step_that_lives(tmp_path, monkeypatch):
    """A rank on another host of one allocation: nobody can tell whether its process has ended."""
    former = replace(living(JOB), boot="another", host="another")
    assert not void(former, living(JOB), silent=20.0, ended=None, jobs=None)
    assert void(former, living(JOB), silent=26.0, ended=None, jobs=None)
    monkeypatch.setattr(owners, "RESTART_SILENCE", 0.6)
    claim = take_claim(tmp_path, former)
    again = take_claim(tmp_path, living(JOB))  # waits for longer than for other owners
    with pytest.raises(ClaimError, match="taken over by SLURM job 7"):
        claim.check()
    again.release()


def test_a_job_that_began_after_the_scheduler_was_asked_is_not_taken_for_gone():
    owner, mine = living(JOB), living(ProcessPlace("slurm:c:8"))
    jobs = Jobs(frozenset({"slurm:c:8"}), age=20.0)
    assert not void(owner, mine, silent=15.0, ended=None, jobs=jobs)
    assert void(owner, mine, silent=25.0, ended=None, jobs=jobs)
    assert not void(replace(owner, user=-1), mine, silent=25.0, ended=None, jobs=jobs)


def test_an_answer_of_the_scheduler_ages_while_a_start_waits(tmp_path, monkeypatch):
    """Also where the machine stands still between two looks."""

    def ask():
        take_claim(tmp_path, living(JOB))  # it begins after the scheduler has looked
        return Jobs(frozenset({"slurm:c:8"}), age=0.0)

    def slow(*arguments):
        time.sleep(0.2)
        return silent(*arguments)

    silent = claims._silent
    monkeypatch.setattr(claims, "_silent", slow)
    with pytest.raises(ClaimError, match="in use by SLURM job 7"):
        take_claim(tmp_path, living(ProcessPlace("slurm:c:8")), ask)


def test_a_process_with_the_number_of_one_that_has_ended_is_not_taken_for_it():
    owner = living()
    assert owner.has_ended(living()) is False
    assert replace(owner, begin=owner.begin - 1).has_ended(living()) is True


def test_a_remedy_can_be_pasted_where_a_path_has_a_space(tmp_path):
    folder = tmp_path / "my run"
    folder.mkdir()
    claim = take_claim(folder, living(JOB))
    with pytest.raises(ClaimError, match=f"`rm -r '{folder}/.claim'`$"):
        take_claim(folder, living(JOB))
    claim.release()


def test_of_many_jobs_that_claim_at_once_one_wins_and_the_others_name_it(tmp_path):
    made: list[Claim] = []
    refused: list[str] = []

    def start(owner: Owner) -> None:
        try:
            made.append(take_claim(tmp_path, owner))
        except ClaimError as error:
            refused.append(str(error))

    threads = [threading.Thread(target=start, args=(living(JOB),)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(made), len(refused)) == (1, 7)
    for line in refused:
        assert re.search(r"in use by SLURM job 7 \(process \d+ on ", line)
        assert line.endswith(f"`rm -r {tmp_path}/.claim`")
    made[0].check()
    made[0].release()
    take_claim(tmp_path, living()).release()


def test_the_command_in_the_message_frees_the_directory_and_the_owner_notices(tmp_path):
    owner = take_claim(tmp_path, living())
    with pytest.raises(ClaimError, match="in use by process"):
        take_claim(tmp_path, living())
    shutil.rmtree(tmp_path / ".claim")
    with pytest.raises(ClaimError, match="taken from this job"):
        owner.check()
    other = take_claim(tmp_path, living())
    owner.release()
    other.check()  # which has the same number
    other.release()


def test_a_directory_that_was_moved_or_removed_is_told(tmp_path):
    owner = take_claim(tmp_path / "run", living())
    (tmp_path / "run").rename(tmp_path / "moved")
    with pytest.raises(ClaimError, match=r"run is no longer there.*new path as run\.dir.*removed"):
        owner.check()


def test_processes_of_others_that_proc_hides_may_live(monkeypatch):
    mine, other = living(), living()
    monkeypatch.setattr(owners, "begun_ticks", lambda process: None)
    assert other.has_ended(mine)
    assert replace(other, user=mine.user + 1).has_ended(mine) is None


def test_a_reboot_ends_all_owners_of_a_machine(tmp_path):
    before = replace(living(), boot="another")
    owner = take_claim(tmp_path, before)
    take_claim(tmp_path, living()).release()
    owner.release()
    owner = take_claim(tmp_path, replace(before, host="another"))
    with pytest.raises(ClaimError):
        take_claim(tmp_path, living())
    owner.release()


def test_a_claim_whose_maker_died_before_it_had_written_it_blocks_for_moments(tmp_path):
    folder = tmp_path / ".claim"
    folder.mkdir()
    (folder / "000004").touch()
    assert take_claim(tmp_path, living()).number == 5


@pytest.mark.parametrize(
    "change",
    [
        lambda told: told | {"new": 1},
        lambda told: told | {"place": [*told["place"], "new"]},
        lambda told: {key: told[key] for key in told.keys() - {"begin", "place"}},
        lambda told: {"owner": told},
        lambda told: told | {"place": ["x"], "timeout": None, "process": "1"},
    ],
    ids=["more", "longer", "less", "other", "odd"],
)
def test_a_claim_of_another_version_is_respected_while_it_has_a_heartbeat(tmp_path, change):
    take_claim(tmp_path, living()).release()
    (tmp_path / ".claim" / "000001.free").unlink()
    claim = tmp_path / ".claim" / "000001"
    claim.write_text(json.dumps(change(json.loads(claim.read_text()))))
    os.utime(claim, (time.time() - 60,) * 2)
    with pytest.raises(ClaimError, match="in use by .*process"):
        take_claim(tmp_path, living())
    os.utime(claim, (time.time() - 2000,) * 2)
    take_claim(tmp_path, living()).release()


@pytest.mark.parametrize("stale", ["list", "read"])
def test_a_stale_nfs_view_does_not_give_away_a_claimed_directory(tmp_path, stale):
    """The view of an NFS client that has not looked at the server again."""
    take_claim(tmp_path, living()).release()
    folder = tmp_path / ".claim"
    names = [path.name for path in folder.iterdir()]
    owner = take_claim(tmp_path, living())

    def late(name: str, function: Call, *arguments: object) -> object:
        if name == stale == "list":
            return names
        if name == stale and looks.names.count("read") < 5:
            return 0  # the file, as it was when it had just been made
        return function(*arguments)

    with faults() as looks, pytest.MonkeyPatch.context() as patch:
        call = lambda *words: (looks.names.append(words[0]), late(*words))[1]  # noqa: E731
        patch.setattr(files, "call", call)
        with pytest.raises(ClaimError, match="in use by"):
            take_claim(tmp_path, living())
    owner.check()
    owner.release()


def test_locks_are_not_used(tmp_path, monkeypatch):
    import fcntl

    def fail(*arguments: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", fail)
    monkeypatch.setattr(fcntl, "lockf", fail)
    take_claim(tmp_path, living()).release()


def test_a_folder_that_cannot_be_written_is_the_users_to_mend(tmp_path):
    (tmp_path / "file").touch()
    with (
        pytest.raises(ConfigError, match="cannot be written"),
        claimed(Group(), tmp_path / "file" / "run", 1.0),
    ):
        pass


@pytest.mark.parametrize("name", ["run", "run/.claim"])
def test_a_link_that_leads_nowhere_is_named(tmp_path, name):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).symlink_to("gone")
    told = re.escape(f"{tmp_path / name} is a link to gone, where no folder is: restore")
    with pytest.raises(ConfigError, match=told), claimed(Group(), tmp_path / "run", 1.0):
        pass


def test_a_full_disk_is_told_with_the_folder(tmp_path):
    told = re.escape(f"{tmp_path} cannot be written (No space left on device)")

    def full(name, *call):
        return fail(name, *call) if name == "write" else call[0](*call[1:])

    with (
        pytest.MonkeyPatch.context() as patch,
        pytest.raises(ConfigError, match=told),
    ):
        patch.setattr(files, "call", full)
        with claimed(Group(), tmp_path, 1.0):
            pass


def test_former_claims_are_removed_but_for_the_last(tmp_path):
    for _ in range(20):
        take_claim(tmp_path, living()).release()
    names = [path.name for path in (tmp_path / ".claim").iterdir()]
    numbers = [int(name) for name in names if name.isdigit()]
    assert len(numbers) <= claims.FORMER_CLAIMS + 1
    assert max(numbers) == 20


def calls_of_a_save(directory) -> int:
    """How many there are, with an owner that looks."""
    made = store(directory, Group(), keep=1)
    made.claim = take_claim(directory, living())
    save(made, 2)
    with faults() as seen:
        save(made, 3)
    made.claim.release()
    return len(seen.names)


@pytest.mark.parametrize(
    ("background", "every"),
    [
        (False, 4),
        (True, 7),
        pytest.param(False, 1, marks=pytest.mark.long),
        pytest.param(True, 1, marks=pytest.mark.long),
    ],
)
def test_an_owner_that_wakes_after_a_takeover_at_any_call_of_a_save_harms_nothing(
    tmp_path, small_extents, background, every
):
    """At each call in turn, another job takes the directory, resumes, and saves a later step."""
    told = 0
    for at in range(0, calls_of_a_save(tmp_path / "counted"), every):
        directory = tmp_path / str(at)
        asleep = store(directory, Group(), keep=1)
        asleep.claim = take_claim(directory, living(timeout=0.02))
        asleep.claim._over.set()  # no heartbeat
        save(asleep, 2)

        def other(name: str, function: Call, *arguments: object, to=directory) -> object:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(files, "call", lambda name, function, *given: function(*given))
                awake = store(to, Group(), keep=1)
                awake.claim = take_claim(to, living())
                assert awake.resume() in (2, 3)
                save(awake, 4)
            return function(*arguments)

        with faults(other, at):
            try:
                save(asleep, 3, background=background)
            except ClaimError:  # it has looked, or its file is gone
                told += 1
        with pytest.raises(ClaimError, match="was taken over by process"):
            asleep.save(5)
        assert found(directory, Group()) == 4
        assert 4 in map(step_of, find_checkpoints(directory, "auto"))
        assert not [*directory.glob(".step-*.partial")]
    assert told
