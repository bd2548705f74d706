"""`hpc-train plan` without a machine description, and what its table leaves out."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from hpc_train.cli import plan
from hpc_train.errors import UserError
from hpc_train.training import measure
from tests.programs import hpc_train as command
from tests.programs import run

MODEL = ("--model.layers=2", "--model.hidden=64", "--model.heads=4", "--model.vocab=256")
JOB = ("--nodes=2", "--ranks_per_node=2")


@pytest.fixture
def planned(monkeypatch, tmp_path, capsys):
    """Plan in an empty folder, with measurements of a moment."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(measure, "SECONDS", 0.01)
    monkeypatch.setattr(measure, "STREAM", 1 << 16)
    monkeypatch.setattr(plan.os, "getloadavg", lambda: (0.0, 0.0, 0.0))

    def plan_it(*options):
        assert plan.run([*MODEL, *options]) == 0
        return capsys.readouterr()

    return plan_it


def test_this_machine_is_measured_and_each_figure_says_where_it_comes_from(planned):
    said = planned(*JOB)
    assert "there is no machine.yaml: measuring this machine" in said.err
    origins = dict(re.findall(r"^ *(\S+) +\S+ +(measured|assumed) ", said.out, re.MULTILINE))
    assert origins["compute.float32.rank"] == "measured"
    assert origins["compute.float32.node"] == "measured"
    assert origins["memory_bandwidth"] == "measured"
    assert origins["across.beta"] == "assumed"
    assert "mpirun -np 4 hpc-train plan CONFIG.yaml --measure" in said.out
    assert "warning" not in said.out


def test_the_ranks_that_are_measured_are_those_of_the_job(planned):
    with pytest.raises(UserError, match="--measure measures its own ranks"):
        planned("--measure", *JOB)


def test_a_busy_machine_is_warned_of(planned, monkeypatch):
    monkeypatch.setattr(plan.os, "getloadavg", lambda: (1000.0, 0.0, 0.0))
    assert "warning: others use this machine (load 1000.0, " in planned(*JOB).out


def test_json_has_the_figures_in_a_field(planned):
    tree = json.loads(planned(*JOB, "--json", "--precision.dtype=bfloat16").out)
    figures = {figure["key"]: figure for figure in tree["figures"]}
    assert figures["compute.bfloat16.rank"]["origin"] == "measured"
    assert figures["compute.bfloat16.rank"]["value"] > 0
    assert figures["inside.alpha"]["origin"] == "assumed"
    assert tree["layouts"][0]["step_seconds"] > 0


def test_without_torch_everything_is_assumed_and_said(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['torch'] = None\n")
    here = Path(plan.__file__).parents[2]
    words = command("plan", *MODEL, *JOB, "--json")
    done = run(*words, environ={"PYTHONPATH": f"{tmp_path}:{here}"}, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    tree = json.loads(done.stdout)
    assert "measuring it failed: ModuleNotFoundError" in tree["warning"]
    assert {one["key"] for one in tree["figures"] if one["origin"] == "measured"} == {"node_gib"}


def test_free_memory_is_what_the_job_may_have(planned, monkeypatch):
    monkeypatch.setattr("hpc_train.host.memory.free_bytes", lambda: 3 << 30)
    monkeypatch.setattr(measure, "measure_alone", lambda *_: 1 / 0)
    figures = json.loads(planned(*JOB, "--json").out)["figures"]
    assert [one["value"] for one in figures if one["key"] == "node_gib"] == [3.0]


def test_a_mistake_is_told_before_anything_is_measured(tmp_path):
    done = run(*command("plan", *MODEL, "--nodes=4000"), cwd=tmp_path)
    assert done.returncode == 2
    assert "4000 ranks are too many" in done.stderr
    assert "measuring" not in done.stderr


def test_a_description_that_is_there_or_named_is_taken(planned, tmp_path):
    (tmp_path / "machine.yaml").write_text(
        "compute: {float32: {rank: 1e9}}\nmemory_bandwidth: 1e9\n"
        "inside: {alpha: 0, beta: 0}\nacross: {alpha: 0, beta: 0}\n"
    )
    said = planned(*JOB, "--json")
    assert json.loads(said.out)["figures"] == []
    assert not said.err


MANY = ("--nodes=16", "--ranks_per_node=8", "--model.heads=12", "--model.hidden=768")


def test_sizes_that_are_left_out_take_a_few_lines_and_all_of_them_one_option(planned):
    def left_out(*options):
        lines = planned(*MANY, "--model.layers=12", "--data.batch=96", *options).out.splitlines()
        return [line for line in lines if line.startswith("left out: ")]

    few, every = left_out(), left_out("--all")
    assert 1 <= len(few) <= plan.REASONS + 1
    assert "--all shows each" in few[-1]
    assert len(every) > len(few)
    counted = sum(int(re.search(r"left out: (\d+) size", line)[1]) for line in few)
    named = sum(line.partition(": ")[2].partition(": ")[0].count(",") + 1 for line in every)
    assert counted == named


def test_the_help_has_the_line_that_measures_on_a_cluster():
    text = run(*command("plan", "--help")).stdout
    assert "\n  srun --nodes=2 --ntasks-per-node=8 hpc-train plan my.yaml --measure\n" in text


def test_the_descriptions_of_the_manual_can_be_planned_with(planned, tmp_path):
    page = (Path(plan.__file__).parents[2] / "docs/how-to/plan.md").read_text()
    processors, gpus = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    for text, dtype in ((processors, "float32"), (gpus, "bfloat16")):
        (tmp_path / "written.yaml").write_text(text)
        options = ("--machine=written.yaml", f"--precision.dtype={dtype}", *MANY)
        assert "the first: --parallel.dp" in planned("--data.batch=96", *options).out
