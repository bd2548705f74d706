"""What the supervisor makes of an attempt that has failed."""

from __future__ import annotations

import os
import shlex
import socket
import subprocess
import sys

import pytest

from hpc_train.config import DataSection, ParallelSection, RunConfig
from hpc_train.errors import EXIT_STOPPED
from hpc_train.launch import supervise
from hpc_train.launch.attempt import Attempt, Outcome
from hpc_train.launch.command import shrinking
from hpc_train.launch.hosts import Host
from hpc_train.launch.launchers import FoundLauncher
from hpc_train.launch.lines import LaunchedJob, Line
from hpc_train.launch.protocol import LAUNCH, STOP, JobProgress, read_progress, write_progress
from hpc_train.launch.supervise import Supervisor, cause_of
from tests.waiting import wait_until

NOTICED = "mpirun noticed that process rank 3 with PID 0 on node {} exited on signal 9 (Killed)."


@pytest.mark.parametrize(
    ("host", "starved", "expected"),
    [
        (socket.gethostname(), True, "was ended by SIGKILL: its host ran out of memory"),
        (socket.gethostname(), False, "was ended by SIGKILL, perhaps for lack of memory"),
        ("elsewhere", True, "was ended by SIGKILL, perhaps for lack of memory"),
    ],
)
def test_a_kernel_that_has_ended_a_rank_for_memory_is_told(host, starved, expected):
    outcome = Outcome(137, [NOTICED.format(host)], 0.0, JobProgress(5, 0.0), starved)
    assert cause_of(outcome) == f"rank 3 ({host}) {expected}"


def test_silence_is_named_as_the_cause():
    outcome = Outcome(-9, [], 61.0, JobProgress(5, 60.0))
    assert cause_of(outcome).startswith("no progress for 61 s after step 5")


@pytest.mark.parametrize(
    ("batch", "micro_batch", "tp", "slots", "ranks"),
    [
        (16, 2, 1, 7, 4),
        (16, None, 1, 7, 4),
        (12, None, 1, 7, 6),
        (16, 2, 2, 7, 4),
        (16, 2, 4, 3, 0),
        (3, None, 1, 2, 1),
    ],
)
def test_a_job_shrinks_to_what_its_batch_can_be_divided_by(batch, micro_batch, tp, slots, ranks):
    config = RunConfig(
        data=DataSection(batch=batch, micro_batch=micro_batch), parallel=ParallelSection(tp=tp)
    )
    assert shrinking(config)(slots) == (ranks, [])
    given = RunConfig(data=config.data, parallel=ParallelSection(tp=tp, dp=8))
    options = ["--parallel.dp", str(ranks // tp)] if ranks else []
    assert shrinking(given)(slots) == (ranks, options)


def test_a_job_that_never_begins_is_given_up(tmp_path):
    line = Line([sys.executable, "-c", "import time; time.sleep(60)"], {})
    attempt = Attempt(line, os.environ, tmp_path / "progress.json", start_limit=1.0)
    outcome = attempt.watch()
    assert outcome.silent > 1
    assert cause_of(outcome).startswith("no sign of training for 1 s")


def test_output_is_copied_before_its_line_ends(tmp_path, capfd):
    said = r"printf 'one\ntwo\r50%%\303'; read line < go; printf '\251\r100%% \nthree'"
    go = tmp_path / "go"
    os.mkfifo(go)
    line = Line(["sh", "-c", f"cd {tmp_path}; {said}"], {})
    attempt = Attempt(line, os.environ, tmp_path / "progress.json")
    copied = []
    wait_until(lambda: copied.append(capfd.readouterr().out) or "".join(copied) == "one\ntwo\r50%")
    go.write_text("\n")
    outcome = attempt.watch()
    assert capfd.readouterr().out == "é\r100% \nthree"
    assert outcome.lines == ["one", "two\r50%é\r100% ", "three"]


def test_an_attempt_neither_removes_nor_believes_what_another_has_told(tmp_path):
    path = tmp_path / "progress.json"
    write_progress(path, "other-0", 7, 60.0, done=True)
    outcome = Attempt(Line(["true"], {}), {**os.environ, LAUNCH: "mine"}, path).watch()
    assert (outcome.progress.step, outcome.progress.done) == (-1, False)
    assert read_progress(path, "other-0").step == 7


def test_a_record_that_cannot_be_written_does_not_end_the_job(tmp_path, capsys):
    (tmp_path / "launch.jsonl").symlink_to("/dev/full")
    launcher = FoundLauncher("mpirun", lambda job: Line(["sh", "-c", "exit 75"], {}))
    supervisor = Supervisor(
        launcher, LaunchedJob(["train"], 1), [], 0, tmp_path / "progress", tmp_path, 0.0,
        lambda slots: (slots, []), print,
    )  # fmt: skip
    assert supervisor.run() == 75
    assert "launch.jsonl cannot be written (No space left on device)" in capsys.readouterr().out


def test_any_other_program_takes_what_is_left():
    assert shrinking(None)(7) == (7, [])


def attempted(monkeypatch, outcomes, run_dir=None):
    """The exit code of a job whose attempts end so, and what each attempt was given."""
    given = []

    def once(supervisor, job, restart, lost_after):
        given.append((job.ranks, job.command, lost_after))
        return outcomes.pop(0)

    monkeypatch.setattr(Supervisor, "_once", once)
    monkeypatch.setattr(Supervisor, "_alive", lambda supervisor, *_: supervisor.hosts[:1])
    hosts = [Host("one", 4), Host("two", 4)]
    supervisor = Supervisor(
        FoundLauncher("srun", lambda job: Line([], {})), LaunchedJob(["train"], 8, hosts), hosts, 3,
        run_dir, run_dir, 0.0, lambda slots: (slots, ["--parallel.dp", str(slots)]), print,
    )  # fmt: skip
    return supervisor.run(), given


def ended(code, step):
    return Outcome(code, [], 0.0, JobProgress(step, 0.0))


def test_a_job_that_has_lost_a_host_goes_on_with_fewer_ranks(monkeypatch):
    code, given = attempted(monkeypatch, [ended(1, 5), ended(1, -1), ended(2, 7)])
    assert code == 2
    smaller = ["train", "--parallel.dp", "4"]
    assert given == [(8, ["train"], 0), (4, smaller, 5), (4, smaller, 5)]


def test_a_failed_job_whose_directory_has_a_stop_file_is_not_started_again(monkeypatch, tmp_path):
    (tmp_path / STOP).touch()
    code, given = attempted(monkeypatch, [ended(1, 5)], tmp_path)
    assert (code, len(given)) == (EXIT_STOPPED, 1)


class Site:
    """A launcher that takes notes: hosts in `dead` start nothing, and hosts in `slow` late."""

    def __init__(self, folder, dead=(), slow=()):
        self.calls = folder / "calls"
        self.calls.touch()
        self.dead, self.slow = set(dead), set(slow)

    def make(self, job):
        names = [host.name for host in job.hosts]
        assert job.ranks == len(names), "a rank on each host"
        seconds = 3 if self.slow & set(names) else 0
        end = "exit 1" if self.dead & set(names) else shlex.join(job.command)
        script = f"echo {' '.join(names)} >> {self.calls}; sleep {seconds}; {end}"
        return Line(["sh", "-c", script], {})

    def steps(self):
        return sorted(self.calls.read_text().splitlines())


def answering(site, names, tmp_path, cause="rank 0 exited with code 1"):
    """Names of the hosts that the supervisor finds alive after a failure."""
    hosts = [Host(name, 8) for name in names]
    supervisor = Supervisor(
        FoundLauncher("srun", site.make), LaunchedJob(["train"], 8, hosts), hosts, 3,
        tmp_path / "progress", None, 0.0, lambda slots: (slots, []), print,
    )  # fmt: skip
    outcome = Outcome(1, [], 0.0, JobProgress(-1, 0.0))
    return [host.name for host in supervisor._alive(cause, outcome)]


NODES = [f"none{number}" for number in range(40)]


def test_sound_hosts_are_probed_by_one_step(tmp_path):
    site = Site(tmp_path)
    assert answering(site, NODES, tmp_path) == NODES
    assert site.steps() == [" ".join(NODES)]


def test_a_probe_is_patient_with_slow_hosts(tmp_path, monkeypatch):
    assert supervise.HOST_PROBE_SECONDS == 60
    monkeypatch.setattr(supervise, "HOST_PROBE_SECONDS", 1.0)
    site = Site(tmp_path, slow=["none3"])
    assert answering(site, NODES[:4], tmp_path) == NODES[:3]


def test_a_probe_is_alone_in_its_session_and_leaves_nothing_there(tmp_path, monkeypatch):
    """So a terminal's Ctrl-C does not end it, as if all hosts were dead."""
    monkeypatch.setattr(supervise, "HOST_PROBE_SECONDS", 1.0)
    site = Site(tmp_path)
    script = f"ps -o sid= -p $$ >> {site.calls}; sleep 600; exit"
    site.make = lambda job: Line(["sh", "-c", script], {})
    assert answering(site, NODES[:1], tmp_path, "host none0 was lost") == []
    (session,) = map(int, site.steps())
    assert session != os.getsid(0)
    ps = ["ps", "-s", str(session), "-o", "args="]
    wait_until(lambda: "sleep 600" not in subprocess.run(ps, capture_output=True, text=True).stdout)


def test_a_dead_host_is_found_among_sound_ones(tmp_path):
    site = Site(tmp_path, dead=["none7"])
    assert answering(site, NODES, tmp_path) == [name for name in NODES if name != "none7"]
    assert len(site.steps()) < 20, "halves of the hosts, not a step for each"


def test_a_host_that_is_named_as_the_cause_is_probed_by_itself(tmp_path):
    """So it does not spoil the step of the others."""
    site = Site(tmp_path, dead=["none7"])
    sound = [name for name in NODES if name != "none7"]
    assert answering(site, NODES, tmp_path, "host none7 was lost") == sound
    assert site.steps() == [" ".join(sound), "none7"]


def test_a_probe_imports_nothing_from_the_network_file_system(tmp_path):
    commands = []
    site = Site(tmp_path)
    make = site.make
    site.make = lambda job: commands.append(job.command) or make(job)
    answering(site, NODES[:2], tmp_path)
    assert commands == [["true"]]
