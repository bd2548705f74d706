"""`hpc-train report` as a user calls it."""

from __future__ import annotations

import pytest

from tests.programs import hpc_train, only_line, run
from tests.report.runs import record, write_lines


@pytest.fixture
def runs(tmp_path):
    for name in ("a", "b"):
        write_lines(tmp_path / name / "metrics.jsonl", [record(step) for step in (1, 2, 3)])
    return tmp_path


def report(folder, *words):
    return run(*hpc_train("report", *words), cwd=folder)


def test_the_page_of_one_run_lies_in_it_and_that_of_several_here(runs):
    for words, path in ((["a"], "a/report.html"), (["a", "b"], "report.html")):
        done = report(runs, *words)
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith(f"{path} (0.")
        assert (runs / path).read_text().startswith("<!doctype html>")
    assert report(runs, "a", "b", "--out", "x.html").returncode == 0
    assert (runs / "x.html").exists()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["missing"], "missing is not a run directory"),
        (["a", "--out", "b"], "b is a folder"),
        (["a", "--out", "none/x.html"], "none/x.html cannot be written"),
        (["a", "--out", "a/metrics.jsonl"], "a/metrics.jsonl is there, and is no report"),
        ([], "RUN"),
    ],
)
def test_what_cannot_be_done_is_one_line(runs, words, told):
    done = report(runs, *words)
    assert done.returncode == 2
    assert told in only_line(done.stderr)


def test_metrics_that_cannot_be_read_are_one_line(runs):
    (runs / "a/metrics.jsonl").unlink()
    (runs / "a/metrics.jsonl").mkdir()
    done = report(runs, "a")
    assert done.returncode == 2
    assert "metrics.jsonl cannot be read" in only_line(done.stderr)
    assert not list((runs / "a").glob("*report*"))


def test_a_link_stays_one_and_a_pipe_gets_the_page(runs):
    (runs / "link.html").symlink_to("real.html")
    for _ in range(2):  # the second report takes the place of the first
        assert report(runs, "a", "--out", "link.html").returncode == 0
    assert (runs / "link.html").is_symlink()
    assert (runs / "real.html").read_text().startswith("<!doctype html>")
    done = report(runs, "a", "--out", "/dev/stderr")
    assert done.returncode == 0
    assert done.stderr.startswith("<!doctype html>")


def test_a_reader_that_has_enough_ends_the_verb_without_a_word(runs):
    records = [record(step) for step in range(1, 1000)]  # a page that no pipe holds
    write_lines(runs / "a/metrics.jsonl", records)
    words = " ".join(hpc_train("report", str(runs / "a"), "--out", "/dev/stdout"))
    done = run("bash", "-c", f"{words} | head -c 9; exit ${{PIPESTATUS[0]}}")
    assert (done.returncode, done.stdout, done.stderr) == (141, "<!doctype", "")
