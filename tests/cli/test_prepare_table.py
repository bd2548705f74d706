"""`hpc-train prepare table` on many ranks: as a function, and as it is run."""

from __future__ import annotations

import signal
import subprocess

import psutil
import pytest

from hpc_train.cli.prepare_table import prepare_table_together
from hpc_train.cli.shared_portions import holds_hdf5
from hpc_train.data.tables.prepare_table import prepare_table
from hpc_train.data.tables.table_manifest import read_table_manifest
from hpc_train.data.tables.table_request import TableOptions
from tests.data.prepared import made_table, prepared, request_of, seen, write_csv, write_parts
from tests.programs import COLD, ENVIRON, command, hpc_train, only_line, run, wait_for_end
from tests.waiting import wait_until

SMALL = TableOptions(shard_mb=0.01)


@pytest.mark.ranks(1, 2, 3, 4)
def test_any_number_of_ranks_makes_the_same_table(group, together):
    if group.rank == 0:
        write_parts(together / "in", made_table(1000), 9)
    group.barrier()
    made = prepare_table_together(
        group, lambda: request_of(together / "in", together / "out", SMALL)
    )
    if group.rank == 0:
        alone = prepare_table(request_of(together / "in", together / "alone", SMALL))
        assert made == alone
        assert len(made.splits["train"]) > 3
        assert seen(together / "out") == seen(together / "alone")
        assert not list(together.glob(".*"))


def test_a_killed_preparation_continues(tmp_path):
    write_parts(tmp_path / "in", made_table(1000), 20)
    words = ["prepare", "table", "in", "--out", "out", "--target", "label", "--shard_mb", "0.01"]
    ranks = command("mpirun", 2, *words)
    started = subprocess.Popen(
        ranks,
        env=ENVIRON | COLD,
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    wanted = ".out.partial/*/statistics/statistics-*5.json"
    wait_until(lambda: list(tmp_path.glob(wanted)), pause=0.002)
    for process in [*psutil.Process(started.pid).children(recursive=True), started]:
        process.send_signal(signal.SIGKILL)
    started.wait()
    wait_for_end(tmp_path / "out", 30)
    assert not (tmp_path / "out").exists()
    done = run(*ranks, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "continues: " in done.stdout
    prepared(tmp_path / "in", tmp_path / "alone", options=SMALL)
    assert seen(tmp_path / "out") == seen(tmp_path / "alone")
    checked = run(*hpc_train("data", "verify", "out"), cwd=tmp_path)
    assert "sound" in checked.stdout


def test_a_schema_is_written_edited_and_used(tmp_path):
    write_csv(tmp_path / "a.csv", table := made_table(200))
    words = ["prepare", "table", "a.csv"]
    found = run(*hpc_train(*words, "--target", "label", "--write_schema", "s.yaml"), cwd=tmp_path)
    assert found.returncode == 0, found.stderr
    assert found.stdout.splitlines()[-1].startswith("s.yaml: 8 columns (")
    text = (tmp_path / "s.yaml").read_text().replace("who: categorical", "who: ignored")
    (tmp_path / "s.yaml").write_text(text)
    write_csv(tmp_path / "a.csv", table | {"label": ["", *table["label"][1:]]})
    done = run(*hpc_train(*words, "--schema", "s.yaml", "--out", "out"), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    made = read_table_manifest(tmp_path / "out")
    assert done.stdout.splitlines()[-1] == (
        f"out: {made.rows('train')} rows to train on, {made.rows('validation')} held out, "
        f"{len(made.features.numeric)} numeric and 1 categorical feature, target label of 3 "
        "classes, 0 wrong rows and 1 other left out (1 without a target)"
    )
    both = run(
        *hpc_train(*words, "--schema", "s.yaml", "--time", "when", "--out", "b"), cwd=tmp_path
    )
    assert both.returncode == 2
    assert "--schema and --time are both given" in only_line(both.stderr)


def test_mistakes_end_with_one_line(tmp_path):
    table = made_table(200)
    table["count"][150] = "many"
    write_csv(tmp_path / "a.csv", table)
    words = ["prepare", "table", "a.csv", "--out", "out"]
    for more, message in (
        ((), "no target is given"),
        (("--target", "no"), "no column 'no'"),
        (("--target", "label"), "a.csv, line 152"),
    ):
        done = run(*hpc_train(*words, *more), cwd=tmp_path)
        assert done.returncode == 2, done.stderr
        assert message in only_line(done.stderr)
    done = run(*hpc_train(*words, "--target", "label", "--wrong_rows", "count"), cwd=tmp_path)
    assert "1 wrong row and" in done.stdout
    trained = run(*hpc_train("train", "--data.path", "out", "--run.dir", "run"), cwd=tmp_path)
    assert trained.returncode == 2
    assert "rows of a table, not tokens of texts" in only_line(trained.stderr)


def test_hdf5_files_are_found_in_folders(tmp_path):
    (tmp_path / "in" / "part").mkdir(parents=True)
    (tmp_path / "in" / "part" / "a.H5").touch()
    (tmp_path / "in" / "b.csv").touch()
    for name, found in {"in": True, "in/b.csv": False, "none": False, "c.hdf5": True}.items():
        assert holds_hdf5(str(tmp_path / name)) == found
