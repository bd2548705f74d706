"""`hpc-train launch`: jobs that fail go on, and what the user hears of it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from contextlib import contextmanager

import psutil
import pytest

from hpc_train.launch.launchers import cores_here
from tests.conftest import small_program
from tests.programs import ENVIRON, LAUNCHED, hpc_train, only_line, ranks_of, read_until, run
from tests.waiting import PATIENCE

OPTIONS = ("--run.steps", "80", "--checkpoint.every", "20", "--gradients.engine", "mpi")


@contextmanager
def launched(*words, cwd=None, on_hangup=signal.SIG_DFL):
    """`hpc-train launch` at work, as from a terminal; its output is one pipe of text."""

    def hear() -> None:
        signal.signal(signal.SIGHUP, on_hangup)
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # ignored if these tests are in a background

    with subprocess.Popen(
        hpc_train("launch", *words),
        env=ENVIRON | LAUNCHED,
        cwd=cwd,
        preexec_fn=hear,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def training(program, *options):
    return "train", str(program.config), "--run.dir", str(program.root / "run"), *options


def journal(program):
    lines = (program.root / "run/launch.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def rank_process(launcher, rank):
    for process in ranks_of(launcher):
        with_rank = process.environ().get("OMPI_COMM_WORLD_RANK") == str(rank)
        if with_rank and "hpc_train" in process.cmdline():
            return process
    raise AssertionError(f"no rank {rank}")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, text_data):
    """The losses of a job that nobody kills."""
    whole = small_program(tmp_path_factory.mktemp("whole"), text_data)
    done = whole.train("run", *OPTIONS, launcher="mpirun", ranks=2)
    assert done.returncode == 0, done.stderr
    return whole.losses("run")


@pytest.mark.slow("ranks start twice, cold ones load all they need each time")
@pytest.mark.parametrize(
    "how", [(), pytest.param(("--cold",), marks=pytest.mark.long)], ids=["warm", "cold"]
)
def test_a_killed_rank_is_named_and_the_job_goes_on_bit_for_bit(program, undisturbed, how):
    words = ["-np", "2", "--max_restarts", "2", *how, "--", *training(program, *OPTIONS)]
    with launched(*words) as process:
        read_until(process, "step 30 ")
        rank_process(process, 1).kill()
        text = read_until(process, "restart 1 of 2")
        assert "rank 1 (" in text
        assert "was ended by SIGKILL" in text
        rest = process.communicate(timeout=PATIENCE)[0]
    assert process.returncode == 0, rest
    assert program.losses("run") == undisturbed
    events = journal(program)
    assert [event["event"] for event in events] == ["start", "end", "start", "end"]
    assert "SIGKILL" in events[1]["cause"]
    assert events[-1]["code"] == 0
    last = program.metrics("run")[-1]
    assert last["restarts"] == 1
    assert 0 <= last["lost_steps"] <= events[1]["step"]


def test_a_killed_launcher_takes_its_ranks_with_it_and_the_job_goes_on(program):
    words = ["-np", "2", "--max_restarts", "1", "--", *training(program, *OPTIONS)]
    with launched(*words) as process:
        read_until(process, "step 30 ")
        old = ranks_of(process)
        for child in psutil.Process(process.pid).children():
            child.kill()
        read_until(process, "restart 1 of 1")
        psutil.wait_procs(old, 10)
        assert not [rank for rank in old if rank.is_running() and rank.status() != "zombie"]
        text = process.communicate(timeout=PATIENCE)[0]
    assert process.returncode == 0, text


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGUSR1, marks=pytest.mark.long), signal.SIGINT]
)
def test_told_to_stop_it_saves_and_ends_with_75(program, number):
    endless = ("--run.steps", "1000000", "--checkpoint.every", "0")
    with launched("-np", "2", "--max_restarts", "9", "--", *training(program, *endless)) as process:
        read_until(process, "step 10 ")
        process.send_signal(number)
        text = process.communicate(timeout=PATIENCE)[0]
    assert process.returncode == 75, text
    assert "checkpoint written" in text
    assert len(journal(program)) == 2, "it was not started again"


def test_a_job_that_always_fails_ends_early_with_the_cause(tmp_path):
    script = tmp_path / "fails.py"
    script.write_text("raise ValueError('no luck')")
    words = ["-np", "2", "--max_restarts", "50", "--", sys.executable, str(script)]
    begin = time.monotonic()
    done = run(*hpc_train("launch", *words))
    assert done.returncode == 1
    line = only_line(done.stderr)
    assert "ValueError: no luck" in line
    assert "3 starts in a row made no progress" in line
    assert time.monotonic() - begin < 60


def test_a_mistake_is_not_tried_again(program):
    words = ["-np", "2", "--max_restarts", "5", "--", *training(program, "--data.path", "/none")]
    done = run(*hpc_train("launch", *words), environ=LAUNCHED)
    assert done.returncode == 2
    assert "restart" not in done.stderr


def test_any_program_is_launched_with_its_threads_and_its_code(tmp_path):
    script = tmp_path / "tell.py"
    # mpirun ends a rank that has not told yet when the other one ends.
    script.write_text("""import os, sys, time
from pathlib import Path

os.write(1, os.environb[b"OMP_NUM_THREADS"] + b" ")
Path(__file__).with_name(f"told-{os.getpid()}").touch()
while len(list(Path(__file__).parent.glob("told-*"))) < 2:
    time.sleep(0.01)
time.sleep(0.5)  # the launcher passes on what the ranks have written
sys.exit(75)
""")
    words = ["-np", "2", "--", sys.executable, str(script)]
    done = run(*hpc_train("launch", *words), environ={"OMP_NUM_THREADS": ""})
    assert done.returncode == 75, done.stderr
    assert done.stdout.split() == 2 * [str(max(1, cores_here() // 2))]


def test_a_dry_run_prints_a_line_that_runs(tmp_path):
    tell = "import os; os.write(1, os.environb[b'OMP_NUM_THREADS'] + b' ')"
    program = [sys.executable, "-c", tell]
    done = run(*hpc_train("launch", "-np", "2", "--dry_run", "--", *program))
    assert done.returncode == 0, done.stderr
    assert "mpirun -np 2" in done.stdout
    again = subprocess.run(
        ["bash", "-c", done.stdout], env=ENVIRON, capture_output=True, text=True, check=True
    )
    assert again.stdout.split() == ["1", "1"]


def test_a_sites_own_line_is_restarted_too(tmp_path):
    script = "import os, sys; sys.exit(0 if 'HPC_TRAIN_RESTARTS' in os.environ else 3)"
    words = ["-np", "2", "--line", "mpirun -np {ranks} --bind-to none", "--max_restarts", "1"]
    done = run(*hpc_train("launch", *words, "--", sys.executable, "-c", script))
    assert done.returncode == 0, done.stderr
    assert "restart 1 of 1 with 2 ranks" in done.stderr
    assert "not bound" not in done.stderr, "the line says how they are bound"


def test_a_full_disk_below_its_standard_error_changes_no_exit_code():
    buffered = {"PYTHONUNBUFFERED": ""}  # so Python has something to write at its end
    script = "import os, sys; sys.exit(0 if 'HPC_TRAIN_RESTARTS' in os.environ else 3)"
    words = hpc_train(
        "launch", "-np", "1", "--max_restarts", "1", "--", sys.executable, "-c", script
    )
    for line, code in (words, 0), (hpc_train("train", "missing.yaml"), 2):
        done = run("sh", "-c", '"$@" 2>/dev/full', "sh", *line, environ=buffered)
        assert done.returncode == code


@pytest.mark.parametrize(
    ("cores", "environ", "told"),
    [
        ("8", {}, ""),
        ("2", {}, "4 ranks of 2 threads need 8 cores, and a host has 2"),
        (
            "2",
            {"SLURM_JOB_NODELIST": "n1", "SLURM_TASKS_PER_NODE": "4", "SLURM_HET_SIZE": "2"},
            "--threads-per-core=1",
        ),
    ],
)
def test_it_says_that_ranks_are_not_bound(cores, environ, told):
    words = ["-np", "4", "--cores", cores, "--dry_run", "--", sys.executable, "-c", "pass"]
    done = run(*hpc_train("launch", *words), environ={"OMP_NUM_THREADS": "2", **environ})
    assert told in done.stderr
    assert ("ranks are not bound to cores" in done.stderr) == bool(told)
    assert ("is heterogeneous" in done.stderr) == ("SLURM_HET_SIZE" in environ)
    in_slurm = "SLURM_JOB_NODELIST" in environ
    assert ("SLURM_EXPORT_ENV=ALL" in done.stdout) == in_slurm, "for jobs of --export=NONE"


@pytest.mark.parametrize(
    ("words", "remedy"),
    [(["-H", "a:2,b:2"], ""), (["-np", "2"], ""), ([], "give the hosts by -H")],
)
def test_a_heterogeneous_job_of_salloc_needs_its_hosts_or_a_number(words, remedy):
    environ = {"SLURM_JOB_ID": "5", "SLURM_HET_SIZE": "2", "SLURM_JOB_NODELIST_HET_GROUP_0": "a"}
    done = run(*hpc_train("launch", *words, "--dry_run", "--", "hostname"), environ=environ)
    assert (done.returncode == 2) == bool(remedy), done.stderr
    assert remedy in done.stderr


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ("n1\nn1\nn2\nn2\n", "-np 4 --host n1:2,n2:2"),  # PBS Pro's mpiprocs=2, Torque's ppn=2
        ("n1\nn2\n", "-np 2 --host n1:1,n2:1"),  # PBS Pro without mpiprocs: a line per chunk
        ("n1\nn2\nn1\nn2\n", "-np 4 --host n1:2,n2:2"),  # chunks dealt out by turns
        ("n1.cluster\nn1.cluster\nn2.cluster\n", "-np 3 --host n1.cluster:2,n2.cluster:1"),
    ],
)
def test_hosts_of_a_pbs_job(tmp_path, nodes, expected):
    (tmp_path / "nodes").write_text(nodes)
    environ = {"PBS_JOBID": "7.server", "PBS_NODEFILE": str(tmp_path / "nodes")}
    words = ["--dry_run", "--", "train", "--run.seed", "1"]
    done = run(*hpc_train("launch", *words), environ=environ)
    assert f"mpirun {expected} " in done.stdout, done.stderr


@pytest.mark.parametrize(
    "program", [["hpc-train"], ["/x/bin/hpc-train"], ["python3", "-m", "hpc_train"], []]
)
def test_the_training_is_known_however_it_is_written(program):
    """So a mistake in its configuration is told before anything starts."""
    words = [*program, "train", "--run.stepps", "3"]
    done = run(*hpc_train("launch", "-np", "2", "--", *words))
    assert done.returncode == 2
    assert "did you mean --run.steps" in only_line(done.stderr)
    assert "mpirun" not in done.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--", "train"], "the number of ranks is not given"),
        (["-np", "2"], "no command"),
        (["-np", "2", "train"], "write the command after --"),
        (["-np", "2", "--", "trian", "my.yaml"], "did you mean train?"),
        (["-np", "2", "--", "/none/program"], "there is no program '/none/program'"),
        (["-np", "2", "--", "train"], "train has no configuration"),
        (["--ranks_per_node", "2", "--", "train"], "--ranks_per_node needs hosts"),
        (["-np", "0", "--", "train"], "np"),
        (["-np", "9", "-H", "a:2,b:2", "--", "train"], "more than the 4 slots"),
        (["-np", "2", "-H", "a:x", "--", "train"], "-H has 'a:x'"),
        (["-np", "2", "-H", "", "--", "train"], "-H names no hosts"),
        (["-np", "2", "--hostfile", "", "--", "train"], "--hostfile names no hosts"),
        (["-H", "a:2", "--hostfile", "f", "--", "train"], "both given"),
        (["--hostfile", "/none", "--", "train"], "/none"),
        (["-np", "2", "--launcher", "ssh", "--", "train"], "--launcher"),
        (["-np", "2", "--", "hpc-train", "submit"], "does not run on ranks"),
        (["-np", "2", "--line", "mpirun {n}", "--", "true"], "--line has {n}"),
        (["-np", "2", "--line", "x", "--launcher", "mpirun", "--", "true"], "both given"),
        (["-np", "2", "--", "train", "--run.stepps", "3"], "did you mean --run.steps"),
    ],
)
def test_mistakes_are_one_line(words, message):
    done = run(*hpc_train("launch", *words))
    assert done.returncode == 2, done.stderr
    assert message in only_line(done.stderr)


def test_ranks_per_node_take_the_place_of_slots():
    words = [
        "-H",
        "a:6,b:6",
        "--ranks_per_node",
        "2",
        "--dry_run",
        "--",
        "train",
        "--run.seed",
        "1",
    ]
    done = run(*hpc_train("launch", *words))
    assert "-np 4 --host a:2,b:2 " in done.stdout, done.stderr


def test_a_rank_that_ends_by_itself_is_named():
    program = "import os, sys; sys.exit(7 * (os.environ['OMPI_COMM_WORLD_RANK'] == '1'))"
    done = run(*hpc_train("launch", "-np", "2", "--", sys.executable, "-c", program))
    assert done.returncode == 1
    assert "rank 1 exited with code 7" in only_line(done.stderr)
    assert "checkpoint" not in only_line(done.stderr), "it is no training of ours"


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGKILL])
def test_no_rank_outlives_the_launch(program, number):
    """A closed terminal stops the job; if `launch` is killed, its ranks end with it."""
    endless = ("--run.steps", "1000000", "--checkpoint.every", "0")
    with launched("-np", "2", "--", *training(program, *endless)) as process:
        read_until(process, "step 10 ")
        ranks = ranks_of(process)
        process.send_signal(number)
        process.communicate(timeout=PATIENCE)
        _, left = psutil.wait_procs(ranks, 20)
    assert process.returncode == (75 if number == signal.SIGHUP else -9)
    assert not [rank for rank in left if rank.status() != "zombie"]


def test_nohup_outlives_the_terminal(program):
    words = training(program, *OPTIONS, "--run.steps", "40")
    with launched("-np", "2", "--", *words, on_hangup=signal.SIG_IGN) as job:
        read_until(job, "step 10 ")
        job.send_signal(signal.SIGHUP)
        text = job.communicate(timeout=PATIENCE)[0]
    assert job.returncode == 0, text


def test_a_signal_that_comes_before_the_ranks_listen_stops_it_too(program):
    endless = ("--run.steps", "1000000", "--checkpoint.every", "0")
    words = ["-np", "2", "--max_restarts", "3", "--", *training(program, *endless)]
    for seconds in (0.9, 1.5):
        with launched(*words) as process:
            time.sleep(seconds)
            process.send_signal(signal.SIGUSR1)
            text = process.communicate(timeout=PATIENCE)[0]
        assert process.returncode == 75, text


def test_a_restart_too_close_to_the_deadline_is_requeued(program):
    """The job has come far; that no time is left for a step is no mistake of the user's."""
    soon = {"HPC_TRAIN_DEADLINE": str(int(time.time()) + 300)}
    margin = ("--run.end_margin", "300")
    first = program.train("run", *margin, environ=soon)
    assert first.returncode == 2
    assert "the end of the job) is over before the first step" in only_line(first.stderr)
    again = program.train("run", *margin, environ={**soon, "HPC_TRAIN_RESTARTS": "1"})
    assert again.returncode == 75, again.stderr
    wrong = program.train("run", environ={"HPC_TRAIN_DEADLINE": "soon"})
    assert wrong.returncode == 2
    assert "HPC_TRAIN_DEADLINE is 'soon'" in only_line(wrong.stderr)


def test_a_launcher_that_says_all_is_well_is_not_believed(program):
    """srun has exited with 0 when it could not start all ranks."""
    fake = program.root / "mpirun"
    fake.write_text("#!/bin/sh\n[ $1 != --version ] || echo 'mpirun (Open MPI) 4.1.8'\nexit 0\n")
    fake.chmod(0o755)
    path = {"PATH": f"{program.root}:{ENVIRON['PATH']}"}
    words = ["-np", "2", "--launcher", "mpirun", "--", *training(program)]
    done = run(*hpc_train("launch", *words), environ=path)
    assert done.returncode == 1
    assert "the training is not finished" in only_line(done.stderr)


def test_a_program_that_may_not_be_executed_is_told_from_one_that_is_not_there(tmp_path):
    (tmp_path / "it.sh").write_text("echo hi\n")
    done = run(*hpc_train("launch", "-np", "2", "--", "./it.sh"), cwd=tmp_path)
    assert done.returncode == 2
    assert "./it.sh may not be executed: chmod +x ./it.sh" in only_line(done.stderr)
