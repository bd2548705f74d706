"""Batch jobs on a real SLURM: they end themselves, go on by themselves, and survive dead hosts."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from hpc_train.staging.environment import REMOVER_WAITS
from tests.cluster.hosts import hosts, write_script
from tests.cluster.slurm import Slurm, slurm
from tests.conftest import small_program
from tests.programs import ENVIRON, LAUNCHED, Program, hpc_train, run
from tests.waiting import wait_until


@pytest.fixture(scope="module")
def up():
    with hosts(4, 2) as cluster, slurm(cluster) as started:
        yield started


@pytest.fixture
def program(tmp_path: Path, text_data: Path) -> Program:
    """The small training job, on the engine that needs no search for the fastest way."""
    made = small_program(tmp_path, text_data)
    made.config.write_text(made.config.read_text() + "gradients: {engine: mpi}\n")
    return made


def submit(up: Slurm, program: Program, name: str, *words: str, **environ: str) -> int:
    """Submit the training from its folder, over all hosts."""
    size = ["--scheduler", "slurm", "--nodes", "4", "--ranks_per_node", "2"]
    run_dir = ["--run.dir", str(program.root / name)]
    command = hpc_train("submit", str(program.config), *size, *run_dir, *words)
    done = up.run(command, cwd=program.root, environ={**LAUNCHED, **environ})
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


def output(program: Program, name: str) -> str:
    """What a run's jobs have printed."""
    return "".join(path.read_text() for path in (program.root / name).glob("*.out"))


def uninterrupted(up: Slurm, program: Program, *options: str) -> int:
    """Train the run `whole` by mpirun over the same hosts; returns mpirun's exit code."""
    return up.cluster.run(program.command("whole", *options), 8).returncode


def test_cancel_ends_a_job_for_good(up, program):
    job = submit(up, program, "endless", "--run.steps", "1000000", "--checkpoint.every", "0")
    metrics = program.root / "endless/metrics.jsonl"
    wait_until(lambda: metrics.exists() and len(metrics.read_text().splitlines()) > 3)
    done = up.run(hpc_train("cancel", str(program.root / "endless")))
    assert done.returncode == 0, done.stderr
    assert up.wait(job) == "FAILED"  # by its exit code, 75
    assert up.job(job)["Restarts"] == "0"
    assert "checkpoint written" in output(program, "endless")
    again = submit_fails(up, program)
    assert "STOP is there" in again


def test_export_none_holds_for_each_job_and_keeps_nothing_from_the_ranks(up, tmp_path):
    start = hpc_train("submit", "--scheduler", "slurm", "--nodes", "2", "--ranks_per_node", "1")
    options = ["--requeue_by", "submit", "--directive", "--export=NONE", "--run.dir", "run"]
    program = 'echo "rank: $MINE $OTHER"; test "$HPC_TRAIN_QUEUED" || exit 75'
    words = [*start, *options, "--setup", "export MINE=mine", "--", "sh", "-c", program]
    done = up.run(words, cwd=tmp_path, environ={**LAUNCHED, "OTHER": "other"})
    assert done.returncode == 0, done.stderr
    assert up.wait(int(done.stdout)) == "COMPLETED"
    wait_until(lambda: not up.run(["squeue", "--noheader"]).stdout)
    printed = "".join(path.read_text() for path in (tmp_path / "run").glob("*.out"))
    assert printed.count("rank: mine \n") == 4, printed


def test_launch_below_salloc_has_the_cores_of_the_job_and_not_of_the_login_host(up):
    words = ["salloc", "--nodes=2", "--ntasks-per-node=1", *hpc_train("launch"), "--"]
    tell = ["sh", "-c", 'echo "$OMP_NUM_THREADS on $SLURMD_NODENAME"']
    done = up.run([*words, *tell], environ={"OMP_NUM_THREADS": ""})
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["1 on node1", "1 on node2"]


STAGES = """#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=1 --output=out
srun --mpi=pmix hpc-train stage --environment none --data data --to /dev/shm
srun --overlap --mem=0 "/dev/shm/hpc_train-$SLURM_JOB_ID/remove_at_end" &
. "/dev/shm/hpc_train-$SLURM_JOB_ID/activate"
srun sh -c 'trap "sleep 1; ls $HPC_TRAIN_STAGED/data/data; exit" TERM; echo started
    while :; do sleep 0.1; done'
"""


def test_a_cancelled_job_keeps_its_copies_while_ranks_use_them_and_no_longer(up, tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data/shard").touch()
    write_script(tmp_path / "job.sh", STAGES)
    job = up.submit(tmp_path / "job.sh")
    out = tmp_path / "out"
    wait_until(lambda: out.exists() and out.read_text().count("started") == 2)
    for host in ("node1", "node2"):
        waits = ["ls", f"/dev/shm/hpc_train-{job}/{REMOVER_WAITS}"]
        wait_until(lambda host=host, waits=waits: up.cluster.on(host, waits).returncode == 0)
    assert up.run(["scancel", str(job)]).returncode == 0
    assert up.wait(job) == "CANCELLED"
    assert out.read_text().count("shard\n") == 2, out.read_text()
    for host in ("node1", "node2"):
        left = up.cluster.on(host, ["ls", "-A", "/dev/shm"]).stdout
        assert "hpc_train" not in left, f"{host}: {left}"


def test_a_run_has_one_job_which_cancel_now_ends(up, program):
    endless = ["--run.steps", "1000000", "--checkpoint.every", "0"]
    folder = str(program.root / "one")
    job = submit(up, program, "one", *endless)
    wait_until(lambda: "RUNNING" in up.run(hpc_train("status", folder)).stdout)
    again = hpc_train("submit", str(program.config), "--run.dir", folder, *endless)
    done = up.run(again, cwd=program.root)
    assert done.returncode == 2
    assert f"has a job already: {job} (RUNNING)" in done.stderr
    done = up.run(hpc_train("cancel", "--now", folder))
    assert done.returncode == 0, done.stderr
    assert f"ended or removed from the queue: {job}" in done.stdout
    told = "no job in the queue"
    wait_until(lambda: told in up.run(hpc_train("status", folder)).stdout)
    (program.root / "one/STOP").unlink()
    done = up.run([*again, "--nodes", "1"], cwd=program.root)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > job
    assert up.run(hpc_train("cancel", "--now", folder)).returncode == 0
    wait_until(lambda: told in up.run(hpc_train("status", folder)).stdout)
    sweep = ["--sweep", "run.seed=1,2,3", "--tasks_at_once", "1"]
    job = submit(up, program, "sweep", *endless, *sweep)
    folder = str(program.root / "sweep")
    assert f"{job}_[" in up.run(hpc_train("status", folder)).stdout
    done = up.run(hpc_train("cancel", "--now", folder))
    assert done.returncode == 0, done.stderr
    wait_until(lambda: told in up.run(hpc_train("status", folder)).stdout)


def submit_fails(up: Slurm, program: Program) -> str:
    """The error of a second submission of the run `endless`."""
    run_dir = ["--run.dir", str(program.root / "endless")]
    done = up.run(hpc_train("submit", str(program.config), *run_dir), cwd=program.root)
    assert done.returncode == 2
    return done.stderr


# What ends the first job: SLURM's shortest time limit, or a job that is told of an earlier end.
ENDS = {
    "told": 'test "$SLURM_RESTART_COUNT" || export HPC_TRAIN_DEADLINE=$(($(date +%s) + 40))',
    # Half of the minute passes before the training starts, so that less has to be repeated.
    "limit": 'test "$SLURM_RESTART_COUNT" || sleep 30',
}


@pytest.mark.slow("jobs over four hosts, one after the other")
@pytest.mark.parametrize("end", ["told", pytest.param("limit", marks=pytest.mark.long)])
def test_a_chain_of_jobs_of_a_minute_ends_as_one_run(up, program, end):
    options = ["--checkpoint.every", "0", "--optimizer.schedule", "constant"]
    options += ["--run.deterministic", "true"]  # not whichever way of averaging is faster now
    chain = ["--time", "00:01:00", "--setup", ENDS[end], *options, "--run.steps", "1000000"]
    job = submit(up, program, "chain", *chain)
    stopped = "stopped by time_limit (the end of the job)"
    wait_until(lambda: stopped in output(program, "chain"))
    before = len(program.losses("chain"))
    wait_until(lambda: len(program.losses("chain")) > before + 20)
    done = up.run(hpc_train("cancel", str(program.root / "chain")))
    assert done.returncode == 0, done.stderr
    assert up.wait(job) == "FAILED", "by its exit code, 75"
    assert up.job(job)["Restarts"] == "1"
    assert output(program, "chain").count(stopped) == 1
    steps = len(program.losses("chain"))
    assert uninterrupted(up, program, *options, "--run.steps", str(steps)) == 0
    assert program.losses("chain") == program.losses("whole")
    ends = [str(program.checkpoint(name, steps)) for name in ("chain", "whole")]
    differences = run(*hpc_train("checkpoint", "diff", *ends)).stdout.splitlines()
    assert len(differences) == 1, differences  # the other bits are the same
    assert differences[0].startswith("score:"), "only the run that ended has been validated"


@pytest.mark.slow("jobs over four hosts, and one that dies")
def test_a_job_goes_on_without_a_host_that_dies(up, program):
    options = ["--run.steps", "80", "--checkpoint.every", "20", "--optimizer.lr", "0.001"]
    assert uninterrupted(up, program, *options) == 0
    job = submit(up, program, "dying", *options)
    metrics = program.root / "dying/metrics.jsonl"
    wait_until(lambda: metrics.exists() and len(metrics.read_text().splitlines()) > 21)
    begin = time.monotonic()
    up.power_off("node3")
    try:
        assert up.wait(job) == "COMPLETED", output(program, "dying")
    finally:
        up.boot("node3")
    print(f"finished {time.monotonic() - begin:.0f} s after the host's end")
    lines = (program.root / "dying/launch.jsonl").read_text().splitlines()
    starts = [json.loads(line) for line in lines if '"start"' in line]
    assert len(starts) == 2
    assert "node3" not in starts[1]["hosts"]
    assert starts[1]["ranks"] == 4, "16 samples by 2 each: 8 or 4 replicas, not 6"
    # Additions in another order, for some hundred steps.
    assert program.losses("dying") == pytest.approx(program.losses("whole"), rel=1e-8)


@pytest.mark.long
def test_a_job_is_requeued_when_its_script_dies_after_an_earlier_watch_died(up, program):
    endless = ["--run.steps", "1000000", "--checkpoint.every", "10"]
    job = submit(up, program, "watched", *endless, HPC_TRAIN_SILENCE="6")
    metrics = program.root / "watched/metrics.jsonl"
    wait_until(lambda: metrics.exists() and len(metrics.read_text().splitlines()) > 3)
    up.power_off("node4")  # the last one watches
    wait_until(lambda: up.nodes()["node4"].startswith("down"))
    up.boot("node4")
    time.sleep(10)  # the script waits 5 before it starts another watch
    up.power_off("node1")
    try:
        wait_until(lambda: up.job(job)["Restarts"] == "1")
    finally:
        up.boot("node1")
    wait_until(lambda: output(program, "watched").count("resumed from") >= 2)
    done = up.run(hpc_train("cancel", str(program.root / "watched")))
    assert done.returncode == 0, done.stderr
    assert up.wait(job) == "FAILED", "by its exit code, 75"


@pytest.fixture(scope="module")
def pbs():
    """Two hosts whose jobs find PBS's variables, and whose qsub is SLURM's translation."""
    with hosts(2, 2) as cluster, slurm(cluster, pbs=True) as started:
        yield started


@pytest.mark.slow("SLURM's shortest time limit is a minute")
@pytest.mark.parametrize("scheduler", ["pbs", pytest.param("torque", marks=pytest.mark.long)])
def test_a_pbs_job_submits_itself_again_until_it_is_done(pbs, program, scheduler):
    """By hand its script is given less time, and steps until it has stopped once."""
    size = ["--scheduler", scheduler, "--nodes", "2", "--ranks_per_node", "2"]
    run_dir = program.root / "run"
    options = ["--run.dir", str(run_dir), "--checkpoint.every", "0", "--run.steps", "1234567"]
    words = hpc_train("submit", str(program.config), *size, *options, "--dry_run")
    made = pbs.run(words, cwd=program.root, environ=LAUNCHED)
    assert made.returncode == 0, made.stderr
    run_dir.mkdir()
    steps = program.root / "steps"
    steps.write_text("1234567")
    script = run_dir / "job.sh"
    changed = made.stdout.replace("walltime=3600", "walltime=35")
    script.write_text(changed.replace(" 1234567", f' "$(cat {steps})"'))

    def printed() -> str:
        return "".join(path.read_text() for path in program.root.rglob("*.o*"))

    done = pbs.run(["qsub", str(script)], cwd=program.root, environ=LAUNCHED)
    assert done.returncode == 0, done.stderr
    wait_until(lambda: "stopped by time_limit (the end of the job)" in printed())
    last = len(program.losses("run")) + 20
    steps.write_text(str(last))
    wait_until(lambda: len(program.losses("run")) == last)
    wait_until(lambda: not pbs.run(["squeue", "--noheader"]).stdout)
    assert "start 0, on 2 nodes" in printed()
    assert "start 1, on 2 nodes" in printed()
    assert len(program.losses("run")) == last, "each step once"


# ssh [OPTIONS] HOST [OPTIONS] COMMAND...
SSH = """#!/bin/sh
host=
while :; do
    case $1 in
        -o | -p | -i) shift 2 ;;
        -*) shift ;;
        *)
            [ ! "$host" ] || break
            host=$1
            shift
            ;;
    esac
done
exec {folder}/enter $host "$@"
"""


@pytest.fixture(scope="module")
def wide():
    """Four hosts of eight slots, which horovodrun can reach by an ssh that enters them."""
    with hosts(4, 8) as cluster, slurm(cluster) as started:
        write_script(cluster.folder / "ssh", SSH.format(folder=cluster.folder))
        yield started


def line(launcher: str, per_host: int) -> list[str]:
    """A launcher's command line that starts `per_host` ranks on each of the four hosts."""
    hosts_of = ",".join(f"node{number}:{per_host}" for number in range(1, 5))
    if launcher == "srun":
        size = ["--nodes=4", f"--ntasks-per-node={per_host}"]
        return ["srun", *size, "--mpi=pmix", "--kill-on-bad-exit=1"]
    ranks = ["-np", str(4 * per_host)]
    return [launcher, *ranks, "--host" if launcher == "mpirun" else "-H", hosts_of]


@pytest.mark.slow("up to 32 ranks")
@pytest.mark.parametrize("per_host", [2, pytest.param(8, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    "launcher",
    [*(pytest.param(name, marks=pytest.mark.long) for name in ("mpirun", "horovodrun")), "srun"],
)
def test_four_hosts_by_every_launcher(wide, program, launcher, per_host):
    ranks = 4 * per_host
    options = ["--run.steps", "4", "--data.batch", "32", "--data.micro_batch", "1"]
    engine = "horovod" if launcher == "horovodrun" else "mpi"
    train = program.command("run", *options, "--gradients.engine", engine)
    environ = {"PATH": f"{wide.cluster.folder}:{ENVIRON['PATH']}"}
    host = "head" if launcher == "srun" else "node1"
    done = wide.run([*line(launcher, per_host), *train], host, environ=environ)
    assert done.returncode == 0, done.stderr
    assert f"preflight of {ranks} ranks on 4 hosts" in done.stdout
    alone = program.train("alone", *options)
    assert alone.returncode == 0, alone.stderr
    assert program.losses("run") == pytest.approx(program.losses("alone"), rel=1e-10)
