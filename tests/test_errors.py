"""The words of messages."""

from __future__ import annotations

import errno
import io
import os
import sys
from pathlib import Path

import pytest

from hpc_train import files
from hpc_train.errors import (
    Stopped,
    UserError,
    file_error,
    plural,
    print_error,
    print_line,
    size_text,
)


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


def test_a_size_has_the_unit_that_suits_it_and_at_most_four_digits():
    told = [size_text(nbytes) for nbytes in (0, 8, 1536, 3 * 2**19, 5 * 2**29, 123456789, 2**41)]
    assert told == ["0 B", "8 B", "1.5 KiB", "1.5 MiB", "2.5 GiB", "117.7 MiB", "2 TiB"]


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


@pytest.mark.parametrize(
    ("number", "path", "line", "code"),
    [
        (errno.EACCES, "/a", "/a cannot be used (Permission denied): get permission for it", 2),
        (errno.ENAMETOOLONG, "a", "a cannot be used (File name too long): give a shorter name", 2),
        (errno.ENOENT, b"a", "a cannot be used (No such file or directory): give another path", 2),
        (errno.ENOSPC, None, "a file cannot be written (No space left on device): free some", 2),
        (errno.ESTALE, "a", "a cannot be used (Stale file handle): look whether its file sys", 1),
        (errno.ECONNREFUSED, None, None, 0),
        (errno.EBADF, 7, None, 0),
    ],
)
def test_a_file_that_the_system_refuses_is_one_line(number, path, line, code):
    told = file_error(OSError(number, os.strerror(number), path))
    assert told is None if line is None else str(told).startswith(line)
    assert (0 if told is None else told.exit_code) == code


def test_the_users_own_code_keeps_its_traceback(tmp_path):
    with pytest.raises(FileNotFoundError) as caught:
        files.sync(tmp_path / "none")
    error = caught.value
    assert file_error(error) is None, "this test is not of the package"
    error.__traceback__ = error.__traceback__.tb_next
    assert str(tmp_path / "none") in str(file_error(error))
