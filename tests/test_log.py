"""The files of a job's log."""

from __future__ import annotations

import io
import logging
import sys

from hpc_train import log


def test_a_character_that_the_locale_lacks_loses_no_line(tmp_path, monkeypatch):
    console = io.TextIOWrapper(io.BytesIO(), encoding="latin-1")
    monkeypatch.setattr(sys, "stdout", console)
    handlers = [log.to_console(0), log.to_file(tmp_path, 0, 1)]
    try:
        # Not by a logger: pytest would keep the message, and cannot hand such a character on.
        bad = b"bad\xff".decode(errors="surrogateescape")
        record = logging.LogRecord(log.ROOT, logging.INFO, __file__, 0, "ö → %s", (bad,), None)
        for handler in handlers:
            handler.handle(record)
    finally:
        log.stop(*handlers)
    assert (tmp_path / "rank-000.log").read_text(encoding="utf-8").endswith(" ö → bad\\udcff\n")
    assert console.buffer.getvalue() == b"\xf6 \\u2192 bad\\udcff\n"


def test_a_log_that_cannot_be_written_is_one_warning(tmp_path, capsys):
    (tmp_path / "rank-000.log").symlink_to("/dev/full")
    handlers = [log.to_console(0), log.to_file(tmp_path, 0, 1)]
    try:
        for number in range(3):
            logging.getLogger(f"{log.ROOT}.part").info("line %d", number)
    finally:
        log.stop(*reversed(handlers))  # and an error in closing would hide that of the run
    shown = capsys.readouterr()
    lines = shown.out.splitlines()
    assert [line for line in lines if line.startswith("line")] == ["line 0", "line 1", "line 2"]
    (warning,) = (line for line in lines if not line.startswith("line"))
    assert "rank-000.log cannot be written (No space left on device)" in warning
    assert not shown.err
