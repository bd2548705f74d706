"""The words of messages."""

from __future__ import annotations

import io
import sys

import pytest

from hpc_train.errors import Stopped, UserError, plural, print_error


@pytest.mark.parametrize(
    ("count", "nouns", "text"),
    [
        (1, ["row"], "1 row"),
        (0, ["row"], "0 rows"),
        (2, ["micro-batch"], "2 micro-batches"),
        (1, ["step is", "steps are"], "1 step is"),
        (3, ["step is", "steps are"], "3 steps are"),
    ],
)
def test_a_count_has_its_noun_in_the_right_number(count, nouns, text):
    assert plural(count, *nouns) == text


def test_an_error_is_one_write(monkeypatch):
    """Otherwise a line of another rank could come between its text and its end."""
    writes = []
    stream = io.StringIO()
    stream.write = lambda text: writes.append(text)
    monkeypatch.setattr(sys, "stderr", stream)
    print_error(UserError("a cause", "a remedy"))
    assert [text for text in writes if text] == ["hpc-train: error: a cause: a remedy\n"]


def test_a_run_that_a_file_has_stopped_needs_it_removed():
    assert Stopped(3, "SIGTERM").remedy("the same command") == (
        "the same command resumes from there"
    )
    assert Stopped(3, "the file runs/a/STOP").remedy("the same command") == (
        "remove the file, and the same command resumes from there"
    )
