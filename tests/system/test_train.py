"""The main job as its users run it: launchers, stopping and resuming, what a run leaves behind."""

from __future__ import annotations

import json
import random
import shutil
import signal
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import pytest

from hpc_train.data.manifest import read_manifest
from hpc_train.mpi import runtime
from hpc_train.report.page import report_of
from tests.conftest import small_program
from tests.programs import (
    COLD,
    ENVIRON,
    hear_ctrl_c,
    hpc_train,
    only_line,
    python,
    ranks_of,
    run,
)
from tests.waiting import wait_until

ENGINES = ["mpi", "horovod"]
if not runtime.horovod_built():  # pragma: no cover
    ENGINES.remove("horovod")


def assert_succeeded(done, code=0):
    assert done.returncode == code, f"{done.returncode}\n{done.stdout}\n{done.stderr}"


@pytest.mark.slow("four jobs, one of each way to start and to average")
def test_every_launcher_runs_the_same_program_with_the_same_result(program):
    assert_succeeded(program.train("alone"))
    names = []
    for launcher, engine in [*(("mpirun", engine) for engine in ENGINES), ("horovodrun", "mpi")]:
        names.append(f"{launcher} {engine}")
        options = ["--gradients.engine", engine]
        assert_succeeded(program.train(names[-1], *options, launcher=launcher, ranks=2))
        assert program.losses(names[-1]) == pytest.approx(program.losses("alone"), rel=1e-10)
    both = [program.checkpoint(name, 12).read_bytes() for name in ("mpirun mpi", "horovodrun mpi")]
    assert both[0] == both[1]


def test_cold_ranks_train_bit_for_bit_as_forked_ones_do(program):
    options = ["--run.deterministic", "true", "--gradients.engine", "mpi"]
    assert_succeeded(program.train("warm", *options, launcher="mpirun", ranks=2))
    words = python("-m", "hpc_train", "train", str(program.config), warm=False)
    words += ["--run.dir", str(program.root / "cold"), *options]
    assert_succeeded(run("mpirun", "-np", "2", *words, environ=COLD))
    both = [program.checkpoint(name, 12).read_bytes() for name in ("warm", "cold")]
    assert both[0] == both[1]


def test_ranks_do_not_load_what_they_do_not_need(program):
    """Imports take most of the time that a job needs to start again."""
    train = ("train", str(program.config), "--run.dir", str(program.root / "run"))
    words = [sys.executable, "-X", "importtime", "-m", "hpc_train", *train, "--run.steps", "1"]
    done = run(*words, environ=COLD)
    assert_succeeded(done)
    loaded = {line.split("|")[-1].strip() for line in done.stderr.splitlines()}
    assert "torch" in loaded
    unneeded = {"torch._dynamo", "sympy", "tensorboard", "pandas", "matplotlib"}
    assert loaded & unneeded == set()


@pytest.mark.parametrize("first", [True, False], ids=["loaded before", "loaded after"])
def test_a_compiled_model_is_deterministic_too(first):
    load = "import torch._inductor.config as inductor"
    make = "from hpc_train.training.device import make_deterministic as make; make()"
    tell = "print(inductor.deterministic, torch.are_deterministic_algorithms_enabled())"
    lines = ["import torch", *([load, make] if first else [make, load]), tell]
    done = run(sys.executable, "-c", "\n".join(lines))
    assert done.stdout == "True True\n", done.stderr


def test_a_run_leaves_what_the_design_promises(program):
    done = program.train("run", launcher="mpirun", ranks=2)
    assert_succeeded(done)
    found = {str(path.relative_to(program.root / "run")) for path in program.root.rglob("run/**/*")}
    assert found == {
        "config.yaml",
        "events.jsonl",
        "metrics.jsonl",
        "logs",
        "logs/rank-000.log",
        "logs/rank-001.log",
        "checkpoints",
        "checkpoints/LATEST",
        "checkpoints/.save-seconds",
        ".claim",
        ".claim/000001",
        ".claim/000001.free",
        *(f"checkpoints/step-{step:09d}.safetensors" for step in (5, 10, 12)),
    }
    lines = done.stdout.splitlines()
    assert sum("step 7  loss" in line for line in lines) == 1, "rank 0 alone writes to the console"
    assert "\x1b" not in done.stdout, "plain lines in a batch log"
    last = program.metrics("run")[-1]
    assert {"tokens_per_second", "validation_loss", "grad_norm", "comm_seconds"} <= last.keys()


def test_a_run_goes_on_with_other_samples_in_place_of_damaged_ones(program, text_data):
    data = program.root / "data"
    shutil.copytree(text_data, data)
    shard = read_manifest(data).splits["train"][1]
    with (data / shard.name).open("r+b") as file:
        file.seek(shard.offset)
        file.write(bytes(100))
    options = ["--data.path", str(data), "--data.damaged", "substitute"]
    done = program.train("run", *options, launcher="mpirun", ranks=2)
    assert_succeeded(done)
    counted = program.metrics("run")[-1]["substituted_samples"]
    assert 0 < counted < 12 * 16
    logs = [path.read_text() for path in (program.root / "run" / "logs").iterdir()]
    lines = [text.count(f"{shard.name} is damaged: block 0 of its dataset tokens") for text in logs]
    assert sorted(lines) in ([0, 1], [1, 1])
    assert_succeeded(program.train("run", *options, "--run.steps", "13"))
    assert program.metrics("run")[-1]["substituted_samples"] >= counted


STEPS = 120
LONG = ["--run.steps", str(STEPS), "--checkpoint.every", "1000"]
LATER = pytest.mark.long
BACKGROUND = [
    "--checkpoint.every",
    "3",
    "--checkpoint.keep",
    "2",
    "--checkpoint.background",
    "true",
]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory, text_data):
    """The long run in one piece."""
    program = small_program(tmp_path_factory.mktemp("whole"), text_data)
    assert_succeeded(program.train("run", *LONG, launcher="mpirun", ranks=2))
    return program


def stop_at_random(program, generator, options):
    """Start the long run, wait for a random step, and signal one of its ranks."""
    command = program.command("run", *options, launcher="mpirun", ranks=2)
    wanted = generator.randint(1, STEPS * 3 // 4)
    metrics = program.root / "run" / "metrics.jsonl"
    with subprocess.Popen(command, env=ENVIRON, stdout=subprocess.DEVNULL) as process:
        wait_until(lambda: metrics.exists() and metrics.read_text().count("\n") >= wanted)
        ranks = ranks_of(process)
        assert len(ranks) == 2
        number = generator.choice([signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2])
        generator.choice(ranks).send_signal(number)
    assert process.returncode == 75


def test_ctrl_c_stops_with_a_checkpoint_where_there_is_no_launcher(program):
    metrics = program.root / "run" / "metrics.jsonl"
    command = program.command("run", *LONG, "--run.steps", "1000000")
    with subprocess.Popen(
        command, env=ENVIRON, stdout=subprocess.PIPE, text=True, preexec_fn=hear_ctrl_c
    ) as process:
        wait_until(lambda: metrics.exists() and metrics.read_text().count("\n"))
        process.send_signal(signal.SIGINT)
        told = process.communicate()[0]
    assert process.returncode == 75
    assert "stopped by Ctrl-C after step" in told
    assert program.checkpoint("run", len(program.losses("run"))).exists()


OWN_PROGRAM = """
import os, signal, sys, time, torch, hpc_train

def main(runtime):
    press = lambda: os.kill(os.getpid(), signal.SIGINT)
    if sys.argv[1] == "beside":
        press()
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with hpc_train.Loop(runtime, "run", model, optimizer) as loop:
        for _, batches in loop.epochs(torch.ones(8, 2), batch=4, epochs=9):
            for batch in batches:
                loop.backward(model(batch).mean())
                press()
                if sys.argv[1] == "twice":
                    time.sleep(1.1)
                    press()
                loop.step()

signal.signal(signal.SIGINT, signal.default_int_handler)
sys.exit(hpc_train.run(main))
"""


ENDED = "hpc-train: interrupted\n"


@pytest.mark.parametrize(
    ("where", "code", "told"), [("loop", 75, ""), ("twice", 130, ENDED), ("beside", 130, ENDED)]
)
def test_ctrl_c_stops_an_own_loop_with_a_checkpoint_and_ends_all_else(tmp_path, where, code, told):
    script = tmp_path / "own.py"
    script.write_text(OWN_PROGRAM)
    done = run(*python(str(script)), where, cwd=tmp_path)
    assert_succeeded(done, code)
    assert done.stderr == told
    assert (tmp_path / "run" / "step-000000001.safetensors").exists() == (where == "loop")


def holds(process, number):
    """Whether a process blocks a signal, which it does while it starts."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    mask = next(line for line in status.splitlines() if line.startswith("SigBlk:"))
    return bool(int(mask.split()[1], 16) >> (number - 1) & 1)


@pytest.mark.slow("it starts the same job three times")
@pytest.mark.parametrize("attempt", [1, *(pytest.param(n, marks=LATER) for n in (0, *range(2, 8)))])
def test_a_run_stopped_at_a_random_step_goes_on_bit_for_bit(program, uninterrupted, attempt):
    options = [*LONG, *BACKGROUND] if attempt % 2 else LONG
    stop_at_random(program, random.Random(attempt), options)
    stopped_after = len(program.losses("run"))
    assert 0 < stopped_after < STEPS
    assert program.checkpoint("run", stopped_after).exists()
    assert_succeeded(program.train("run", *options, launcher="mpirun", ranks=2))
    assert program.losses("run") == uninterrupted.losses("run")
    final = [each.checkpoint("run", STEPS).read_bytes() for each in (program, uninterrupted)]
    assert final[0] == final[1]


def test_a_rank_that_is_killed_ends_the_job_and_nothing_before_its_checkpoint_is_lost(
    program, uninterrupted
):
    often = [*LONG[:2], "--checkpoint.every", "20", "--checkpoint.keep", "2"]
    command = program.command("run", *often, launcher="mpirun", ranks=2)
    newest = program.root / "run" / "checkpoints" / "LATEST"
    with subprocess.Popen(command, env=ENVIRON, stdout=subprocess.DEVNULL) as process:
        wait_until(newest.exists)
        ranks_of(process)[-1].kill()
    assert process.returncode not in (0, 75)
    done = program.train("run", *often, launcher="mpirun", ranks=2)
    assert_succeeded(done)
    assert "resumed from" in done.stdout
    assert program.losses("run") == uninterrupted.losses("run")


def test_mpirun_passes_a_signal_on_and_returns_75(program):
    command = program.command("run", "--run.steps", "100000", launcher="mpirun", ranks=2)
    with subprocess.Popen(command, env=ENVIRON, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            if "step 3 " in line:
                process.send_signal(signal.SIGUSR1)
                break
        rest = process.stdout.read()
    assert process.returncode == 75
    assert "stopped by SIGUSR1 after step" in rest
    assert "checkpoint written; the same command resumes" in rest


def test_signals_while_starting_and_while_ending_do_not_lose_the_exit_code(program):
    command = program.command("run", "--run.steps", "100000", launcher="mpirun", ranks=2)
    how = {"env": ENVIRON | COLD, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **how) as process:
        wait_until(lambda: any(holds(rank, signal.SIGUSR1) for rank in ranks_of(process)))
        next(r for r in ranks_of(process) if holds(r, signal.SIGUSR1)).send_signal(signal.SIGUSR1)
        for line in process.stdout:
            if "stopped by SIGUSR1" in line:
                process.send_signal(signal.SIGUSR2)
    assert process.returncode == 75


def test_a_run_may_start_from_another_runs_checkpoint_and_goes_on_from_its_own(program):
    constant = ["--optimizer.schedule", "constant"]
    assert_succeeded(program.train("first", "--run.steps", "5", *constant))
    start = ["--checkpoint.resume", str(program.checkpoint("first", 5)), *constant]
    assert_succeeded(program.train("second", "--run.steps", "8", *start))
    done = program.train("second", "--run.steps", "12", *start)
    assert_succeeded(done)
    assert "step-000000008.safetensors, after step 8" in done.stdout
    assert_succeeded(program.train("whole", *constant))
    losses = [record["loss"] for record in program.metrics("second")]
    assert losses == program.losses("whole")[5:]


LIMIT = 8  # seconds; a start beside other tests takes three


@pytest.mark.parametrize("launcher", ["mpirun", pytest.param("horovodrun", marks=LATER)])
def test_the_time_limit_stops_every_rank_with_75_before_it_is_over(program, launcher):
    options = ["--run.steps", "1000000", "--run.time_limit", str(LIMIT)]
    done = program.train("run", *options, launcher=launcher, ranks=2)
    ended = datetime.now()
    assert_succeeded(done, 75)
    logs = sorted((program.root / "run" / "logs").iterdir())
    assert len(logs) == 2
    for path in logs:  # a launcher takes as long as it takes, what the ranks take is theirs
        times = [line[:23] for line in path.read_text().splitlines() if line[:4].isdigit()]
        begin, end = (datetime.strptime(t, "%Y-%m-%d %H:%M:%S,%f") for t in (times[0], times[-1]))
        assert (end - begin).total_seconds() < LIMIT
        assert (ended - begin).total_seconds() < LIMIT + 6
    assert f"stopped by time_limit ({LIMIT} s)" in done.stdout


@pytest.mark.slow("three jobs")
def test_losses_do_not_depend_on_the_number_of_ranks_also_after_a_resume(program):
    constant = ["--optimizer.schedule", "constant"]  # others end where run.steps says
    assert_succeeded(program.train("straight", *constant))
    assert_succeeded(
        program.train("bent", "--run.steps", "5", *constant, launcher="mpirun", ranks=4)
    )
    assert_succeeded(program.train("bent", *constant, launcher="mpirun", ranks=2))
    assert program.losses("bent") == pytest.approx(program.losses("straight"), rel=1e-10)


@pytest.mark.long
@pytest.mark.slow("it prepares texts, and starts four jobs")
def test_whole_documents_have_the_same_losses_on_any_ranks_and_after_a_resume(program):
    texts = [f"{n} " + "ab cd" * (n % 23) for n in range(600)]
    lines = [json.dumps({"text": text}) for text in texts]
    (program.root / "texts.jsonl").write_text("\n".join(lines))
    words = ["prepare", "text", str(program.root / "texts.jsonl"), "--validation", "0.2"]
    data = program.root / "documents"
    assert_succeeded(run(*hpc_train(*words, "--out", str(data))))
    own = ["--data.path", str(data), "--data.loss", "token", "--optimizer.schedule", "constant"]
    own += ["--model.vocab", "264"]
    apart = [*own, "--data.across_documents", "false"]
    one = program.train("one", *apart, "--data.workers", "1")
    assert_succeeded(one)
    assert "samples of whole documents" in one.stdout
    two = ["--run.steps", "5", "--parallel.tp", "2"]
    assert_succeeded(program.train("bent", *apart, *two, launcher="mpirun", ranks=4))
    done = program.train("bent", *apart, "--parallel.pp", "2", launcher="mpirun", ranks=2)
    assert_succeeded(done)
    assert program.losses("bent") == pytest.approx(program.losses("one"), rel=1e-10)
    held_out = [program.metrics(name)[-1]["validation_loss"] for name in ("one", "bent")]
    assert held_out[0] == pytest.approx(held_out[1], rel=1e-10)
    done = program.train("bent", *own, "--run.steps", "20")
    assert done.returncode == 2
    assert "data.across_documents False" in only_line(done.stderr)


def test_generate_knows_only_the_tokens_of_the_text(program):
    assert_succeeded(program.train("run", "--run.steps", "1", "--model.vocab", "4096"))
    words = ["generate", str(program.root / "run"), "--tokens", "50", "--temperature", "5"]
    assert_succeeded(run(*hpc_train(*words)))


def test_generate_writes_text_from_a_checkpoint_or_a_run(program):
    assert_succeeded(program.train("run"))
    texts = []
    for source in (program.root / "run", program.checkpoint("run", 12)):
        words = ["generate", str(source), "--prompt", "def ", "--tokens", "40", "--seed", "3"]
        done = run(*hpc_train(*words))
        assert_succeeded(done)
        texts.append(done.stdout)
    assert texts[0] == texts[1]
    assert texts[0].startswith("def ")
    assert len(texts[0]) > 20
    latin = {"PYTHONIOENCODING": "latin-1"}  # it lacks what young models write
    assert_succeeded(run(*hpc_train(*words), environ=latin))
    words = ["generate", str(program.root / "run"), "--prompt", "def ", "--tokens", "40"]
    assert_succeeded(run(*hpc_train(*words, "--seed", "3", "--record")))
    [sample] = [
        json.loads(line) for line in (program.root / "run/samples.jsonl").read_text().splitlines()
    ]
    assert (sample["step"], "def " + sample["text"] + "\n") == (12, texts[0])
    assert 'class="prompt">def </span>' in report_of([program.root / "run"])
    alone = program.root / "alone.safetensors"
    shutil.copy(program.checkpoint("run", 12), alone)
    done = run(*hpc_train("generate", str(alone), "--record"))
    assert done.returncode == 2
    assert "does not lie in a run directory" in only_line(done.stderr)
