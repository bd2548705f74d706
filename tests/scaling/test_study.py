"""The runs of a study: their order, their options, and what cannot be divided."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hpc_train.config.file import load
from hpc_train.errors import UserError
from hpc_train.scaling.study import ATTEMPT, STUDY, ScaleStudy, cause_of_failure


def study(folder, *options, nodes=(1, 2, 4), weak=False, **changed):
    config = load(None, ["--run.dir", "runs/my", "--data.batch", "16", *options])
    made = ScaleStudy(config, folder, nodes, 2, weak, 2, 8, 2)
    return replace(made, **changed)


def given(run, key):
    return run.options[run.options.index(f"--{key}") + 1]


def test_all_numbers_of_nodes_take_turns(tmp_path):
    runs = list(study(tmp_path).runs())
    assert [run.nodes for run in runs] == [1, 2, 4, 1, 2, 4]
    assert len({run.directory for run in runs}) == 6


@pytest.mark.parametrize(
    ("weak", "batches"), [(False, ["16", "16", "16"]), (True, ["16", "32", "64"])]
)
def test_dp_grows_and_the_batch_grows_in_weak_scaling_only(tmp_path, weak, batches):
    made = study(tmp_path, "--parallel.tp", "2", weak=weak)
    made.check()
    runs = list(made.runs())[:3]
    assert [given(run, "data.batch") for run in runs] == batches
    assert [given(run, "parallel.dp") for run in runs] == ["1", "2", "4"]


@pytest.mark.parametrize(
    ("options", "changed", "message"),
    [
        ([], {"nodes": (1, 3)}, "on 3 nodes data.batch 16 is not divisible by parallel.dp 6:"),
        ([], {"nodes": (2, 3), "weak": True, "ranks_per_node": 1, "repeats": 1}, ""),
        (["--data.batch", "15"], {"nodes": (2, 3), "weak": True}, "on 2 nodes data.batch 15"),
        (["--parallel.tp", "4"], {}, "no multiple of parallel.tp x parallel.pp"),
        (["--data.micro_batch", "4"], {}, "on 4 nodes"),
        ([], {"warmup": 8}, "give more steps"),
    ],
)
def test_what_cannot_be_divided_is_refused_before_anything_runs(
    tmp_path, options, changed, message
):
    made = study(tmp_path, *options, **changed)
    if not message:
        made.check()
        return
    with pytest.raises(UserError, match=message):
        made.check()


def test_a_folder_has_one_study_which_may_grow(tmp_path):
    study(tmp_path, steps=9).claim()
    study(tmp_path).claim()  # no run of the other one has begun
    (tmp_path / "nodes-1-run-1").mkdir()
    study(tmp_path, nodes=(1, 2, 4, 8), repeats=5, warmup=4).claim()
    with pytest.raises(UserError, match="another configuration"):
        study(tmp_path, "--optimizer.lr", "0.5").claim()
    with pytest.raises(UserError, match="another --steps"):
        study(tmp_path, steps=9).claim()


@pytest.mark.parametrize("content", ["[1]", "3", "{", "[" * 50_000])
def test_a_damaged_study_is_written_anew(tmp_path, content):
    (tmp_path / STUDY).write_text(content)
    (tmp_path / "nodes-1-run-1").mkdir()
    study(tmp_path).claim()
    with pytest.raises(UserError, match="another --steps"):
        study(tmp_path, steps=9).claim()


def test_nodes_that_the_batch_cannot_be_divided_over_cannot_run(tmp_path):
    assert [n for n in range(1, 20) if study(tmp_path).can_run(n)] == [1, 2, 4, 8]


def test_the_cause_of_a_failure_is_that_of_the_last_attempt(tmp_path):
    run = next(study(tmp_path).runs())
    assert cause_of_failure(run) == ""
    run.directory.mkdir()
    output = run.directory / "launch.out"
    first = f"{ATTEMPT}hpc-train: error: no data: give data.path\n"
    output.write_text(first)
    assert cause_of_failure(run) == "no data: give data.path"
    output.write_text(f"{first}{ATTEMPT}Killed\n")
    assert cause_of_failure(run) == ""


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        study(tmp_path / "file" / "study").claim()
