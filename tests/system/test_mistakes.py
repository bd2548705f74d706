"""Bad input: one clear line, exit code 2 on every rank, no hang, nothing lost."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch

import hpc_train
from hpc_train.mpi import runtime
from tests.data.corruption import sealed
from tests.programs import hpc_train as command
from tests.programs import only_line, own_server, run

RANKS = {"launcher": "mpirun", "ranks": 2}


def refused(done) -> str:
    """Check that a job ended as it should on a mistake; returns its one line."""
    assert done.returncode == 2, f"{done.returncode}\n{done.stdout}\n{done.stderr}"
    assert "Traceback" not in done.stderr
    return only_line(done.stdout + done.stderr)


@pytest.mark.parametrize(
    "launcher", ["alone", "mpirun", pytest.param("horovodrun", marks=pytest.mark.long)]
)
def test_a_misspelt_key(program, launcher):
    ranks = 1 if launcher == "alone" else 2
    line = refused(program.train("run", "--run.stepps", "3", launcher=launcher, ranks=ranks))
    assert "unknown option --run.stepps: did you mean --run.steps?" in line
    assert not (program.root / "run").exists()


def test_a_batch_that_the_ranks_cannot_share(program):
    line = refused(program.train("run", "--data.batch", "30", "--data.micro_batch", "4", **RANKS))
    assert "data.batch 30 is not divisible by 2 ranks x data.micro_batch 4" in line
    assert "nearest that are: 24, 32" in line


@pytest.fixture
def own_data(program, text_data):
    """A copy of the data that a test may damage, as options."""
    copy = program.root / "data"
    shutil.copytree(text_data, copy)
    return copy, ["--data.path", str(copy)]


def test_a_missing_shard(program, own_data):
    copy, options = own_data
    (copy / "train-00001.h5").unlink()
    assert "train-00001.h5 is missing" in refused(program.train("run", *options, **RANKS))


def test_a_truncated_shard(program, own_data):
    copy, options = own_data
    os.truncate(copy / "train-00000.h5", 1000)
    line = refused(program.train("run", *options, **RANKS))
    assert "train-00000.h5 has 1000 bytes, its manifest says" in line


def test_a_manifest_of_other_shards(program, own_data):
    copy, options = own_data
    tree = json.loads((copy / "manifest.json").read_text())
    tree["splits"]["train"][0]["hash"] = "0" * 32
    (copy / "manifest.json").write_text(sealed(tree))
    line = refused(program.train("run", *options, **RANKS))
    assert "is not the one its manifest describes" in line


def test_more_damage_than_samples_may_be_substituted_for(program, own_data):
    copy, options = own_data
    options += ["--data.damaged", "substitute"]
    (copy / "train-00001.h5").unlink()
    line = refused(program.train("run", *options, **RANKS))
    assert "are in 1 shard that cannot be used" in line
    assert "train-00001.h5 is missing" in line
    text = (copy / "manifest.json").read_text()
    (copy / "manifest.json").write_text(text.replace('"vocab": 256', '"vocab": 255'))
    line = refused(program.train("run", *options, **RANKS))
    assert "manifest.json is damaged (its hash is " in line


def test_no_data(program):
    line = refused(program.train("run", "--data.path", "/no/data", **RANKS))
    assert "/no/data holds no prepared data" in line
    assert "hpc-train prepare text" in line


def test_a_checkpoint_of_another_model(program):
    assert program.train("run", "--run.steps", "2").returncode == 0
    path = program.checkpoint("run", 2)
    before = path.read_bytes(), (path.parents[1] / "config.yaml").read_bytes()
    assert (
        "nothing to do: step 2 of 1 is done; raise run.steps"
        in program.train("run", "--run.steps", "1").stdout
    )
    elsewhere = ["--checkpoint.resume", str(path.parents[1]), "--run.steps", "2"]
    assert "nothing to do: step 2 of 2" in program.train("other", *elsewhere).stdout
    assert program.checkpoint("other", 2).read_bytes() == before[0]  # it is a run like others
    heads = refused(program.train("run", "--model.heads", "4"))  # the shapes are the same
    assert "was made with model.heads 2" in heads
    line = refused(program.train("run", "--model.hidden", "64", **RANKS))
    assert "is of another model: its model." in line
    assert (path.read_bytes(), (path.parents[1] / "config.yaml").read_bytes()) == before


def test_a_checkpoint_of_other_data_or_batches(program, own_data):
    copy, options = own_data
    assert program.train("run", "--run.steps", "2").returncode == 0
    tree = json.loads((copy / "manifest.json").read_text())
    tree["documents"] += 1
    (copy / "manifest.json").write_text(sealed(tree))
    line = refused(program.train("run", *options, **RANKS))
    assert f"step-000000002.safetensors was made from other data than {copy}: " in line
    assert "was made with data.batch 16" in refused(program.train("run", "--data.batch", "32"))


def test_a_start_behind_the_folders_checkpoints(program):
    assert program.train("run", "--run.steps", "2").returncode == 0
    line = refused(program.train("run", "--checkpoint.resume", "none", **RANKS))
    assert "has checkpoints beyond this start, up to step-000000002" in line


def test_a_run_directory_that_cannot_be(program):
    (program.root / "run").write_text("a file")
    line = refused(program.train("run", **RANKS))
    assert f"{program.root / 'run'} cannot be written" in line


def test_mpi_io_without_mpi(program):
    line = refused(program.train("run", "--checkpoint.engine", "mpiio"))
    assert "checkpoint.engine is mpiio, but this process runs without MPI" in line
    assert not (program.root / "run").exists(), "it is told before anything trains"


def test_a_time_limit_that_leaves_no_step(program):
    line = refused(program.train("run", "--run.time_limit", "0", **RANKS))
    assert "time_limit (0 s) is over before the first step" in line


def test_nothing_to_validate_on(program, tmp_path):
    text = tmp_path / "text"
    text.write_text("words " * 1000)
    none = ["--out", str(tmp_path / "bare"), "--validation", "0"]
    assert run(*command("prepare", "text", str(text), *none)).returncode == 0
    options = ["--data.path", str(tmp_path / "bare"), "--data.validation_every", "5"]
    assert "but nothing is held out" in refused(program.train("run", *options))


def test_a_vocabulary_that_the_data_exceeds(program, own_data):
    copy, options = own_data
    tree = json.loads((copy / "manifest.json").read_text())
    (copy / "manifest.json").write_text(sealed(tree | {"vocab": 50}))
    assert "beyond its manifest's vocabulary of 50" in refused(program.train("run", *options))


def test_a_foreign_safetensors_file(tmp_path):
    safetensors.torch.save_file({"a": torch.zeros(3)}, tmp_path / "a.safetensors")
    line = refused(run(*command("generate", str(tmp_path / "a.safetensors"))))
    assert "is no checkpoint of hpc_train" in line
    assert "delete" not in line


def on_two_ranks(first: list[str], second: list[str], **how):
    """Start two different commands as the two ranks of one job."""
    return run("mpirun", "-np", "1", *first, ":", "-np", "1", *second, **how)


def test_another_configuration_on_one_rank(program):
    train = ["train", str(program.config), "--run.dir", str(program.root / "run")]
    line = refused(on_two_ranks(command(*train), command(*train, "--optimizer.lr", "0.5")))
    assert "rank 1 (" in line
    assert "the configuration differs from that of rank 0" in line


def test_other_data_on_one_rank(program, text_data):
    for name in ("a", "b"):
        shutil.copytree(text_data, program.root / name / "data")
    tree = json.loads((program.root / "b/data/manifest.json").read_text())
    tree["documents"] += 1
    (program.root / "b/data/manifest.json").write_text(sealed(tree))
    train = command("train", str(program.config), "--run.dir", "run", "--data.path", "data")
    words = [["-wdir", str(program.root / name), *train] for name in ("a", "b")]
    line = refused(on_two_ranks(*words))
    assert "the data in data differs from that of rank 0" in line


def test_other_code_on_one_rank(program):
    copy = program.root / "other"
    shutil.copytree(Path(hpc_train.__file__).parent, copy / "hpc_train")
    with (copy / "hpc_train" / "errors.py").open("a") as file:
        file.write("# changed\n")
    train = command("train", str(program.config), "--run.dir", str(program.root / "run"))
    # Elsewhere than in the checkout, which python -m would take the package from.
    done = on_two_ranks(train, ["env", f"PYTHONPATH={copy}", *train], cwd=program.root)
    line = refused(done)
    assert "the code of hpc_train differs from that of rank 0" in line


def test_mpi_without_threads(program):
    done = program.train("run", **RANKS, environ={"MPI4PY_RC_THREAD_LEVEL": "single"})
    line = refused(done)
    assert "MPI is not initialised with THREAD_MULTIPLE" in line
    assert "unset MPI4PY_RC_THREAD_LEVEL" in line


@pytest.fixture
def without_horovod(tmp_path):
    """An environment in which Horovod is not installed."""
    (tmp_path / "hide").mkdir()
    hide = "import sys\nsys.modules['horovod'] = None\n"
    (tmp_path / "hide" / "sitecustomize.py").write_text(hide)
    return {"PYTHONPATH": str(tmp_path / "hide")} | own_server("without-horovod")


def test_horovod_missing(program, without_horovod):
    options = ["--gradients.engine", "horovod"]
    line = refused(program.train("run", *options, **RANKS, environ=without_horovod))
    assert f"build it once with `{runtime.BUILD_HOROVOD}`" in line
    assert "use --gradients.engine mpi, which needs no Horovod" in line
    done = program.train("run", **RANKS, environ=without_horovod)
    assert done.returncode == 0, "engine auto needs none"


def test_ranks_started_without_mpi(program):
    done = program.train("run", environ={"TORCHELASTIC_RUN_ID": "1", "RANK": "0"})
    assert "started by torchrun, which starts no MPI ranks" in refused(done)


def test_a_launcher_of_another_mpi_is_noticed(program):
    """Ranks that each think they are alone would all write to one run directory."""
    stranger = {"PMI_RANK": "0", "PMI_SIZE": "4", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "4"}
    done = run("mpirun", "-np", "1", "env", "-u", "OMPI_COMM_WORLD_SIZE",
               *program.command("run"), environ=stranger)  # fmt: skip
    assert "started 4 ranks but MPI sees 1: mpi4py uses another MPI" in refused(done)
    # PALS tells a rank's number, but not how many there are, if it starts ranks by PMIx.
    pals = {"PALS_RANKID": "0", "PALS_LOCAL_SIZE": "2"}
    done = run("mpirun", "-np", "1", "env", "-u", "OMPI_COMM_WORLD_SIZE",
               *program.command("run"), environ=pals)  # fmt: skip
    assert "PALS started at least 2 ranks but MPI sees 1" in refused(done)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "verb"),
        (["trian"], "invalid choice: 'trian'"),
        (["--", "doctor"], "`hpc-train --help` lists the verbs"),
        (["cancel"], "required: RUN: `hpc-train cancel --help` lists the options"),
        (["checkpoint", "lst", "run"], "`hpc-train checkpoint --help` lists the actions"),
        (
            ["generate", "run", "--tokens", "few"],
            "argument --tokens: 'few' is not a whole number of 0 or more",
        ),
        (["plan", "my.yaml", "--top", "0"], "--top: '0' is not a whole number of 1 or more"),
        (["train", "/no/such.yaml"], "there is no configuration /no/such.yaml"),
        (["prepare", "text", "--out", "x"], "required"),
        (["prepare", "text", "/no/text", "--out", "/tmp/never"], "/no/text does not exist"),
        (["generate", "/no/checkpoint"], "no such checkpoint: /no/checkpoint"),
        (["predict", "run", "t.csv"], "the following arguments are required: --out"),
        (["predict", "/no/run", "t.csv", "--out", "p.csv"], "no such checkpoint: /no/run"),
        (["doctor", "--jsn"], "unrecognized arguments: --jsn"),
    ],
)
def test_command_lines(words, message):
    assert message in refused(run(*command(*words)))


CRASH = """
import hpc_train

def main(runtime):
    if runtime.world.rank == 1:
        raise ZeroDivisionError("as it happens")
    runtime.world.barrier()

raise SystemExit(hpc_train.run(main))
"""


def test_a_crash_on_one_rank_ends_the_job_with_its_traceback(tmp_path):
    (tmp_path / "crash.py").write_text(CRASH)
    python = sys.executable
    done = run("mpirun", "-np", "2", python, str(tmp_path / "crash.py"))
    assert done.returncode == 1
    assert "rank 1 (" in done.stdout
    assert "ZeroDivisionError: as it happens" in done.stdout


EVERYWHERE = """
import hpc_train

def main(runtime):
    if KIND == "memory":
        raise MemoryError
    hpc_train.load_config(options=["--run.stepps", "3"]) if "mistake" == KIND else 1 / 0

raise SystemExit(hpc_train.run(main))
"""


@pytest.mark.parametrize(("kind", "code"), [("mistake", 2), ("bug", 1), ("memory", 1)])
def test_what_goes_wrong_on_all_ranks_is_told_once(tmp_path, kind, code):
    (tmp_path / "wrong.py").write_text(EVERYWHERE.replace("KIND", f'"{kind}"'))
    done = run("mpirun", "-np", "3", sys.executable, str(tmp_path / "wrong.py"))
    assert done.returncode == code
    told = {
        "mistake": "did you mean --run.steps?",
        "bug": "ZeroDivisionError: ",
        "memory": "This rank has run out of memory. What needs less",
    }[kind]
    assert (done.stdout + done.stderr).count(told) == 1


def test_leaving_with_a_code_of_ones_own(tmp_path):
    program = "import hpc_train, sys; hpc_train.run(lambda runtime: sys.exit(4))"
    assert run("mpirun", "-np", "2", sys.executable, "-c", program).returncode == 4
