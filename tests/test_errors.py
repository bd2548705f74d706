"""The words of messages."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path

import pytest

from hpc_train.errors import Stopped, UserError, plural, print_error, print_line


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


def test_a_stream_that_cannot_be_written_ends_no_job():
    with Path("/dev/full").open("w") as full:
        print_line("a line", full)
        with pytest.raises(OSError, match="No space left"):  # it keeps the line for the next try
            full.flush()
        os.dup2(os.open(os.devnull, os.O_WRONLY), full.fileno())


def test_a_run_that_a_file_has_stopped_needs_it_removed():
    assert Stopped(3, "SIGTERM").remedy("the same command") == (
        "the same command resumes from there"
    )
    assert Stopped(3, "the file runs/a/STOP").remedy("the same command") == (
        "remove the file, and the same command resumes from there"
    )
