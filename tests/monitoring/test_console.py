from __future__ import annotations

import io
import os
import pty
import subprocess

import pytest

from hpc_train.monitoring.console import LiveProgress, describe_record, shorter_line
from tests.programs import ENVIRON


def on_a_terminal(command):
    """What a program writes when its output is a terminal."""
    ours, theirs = pty.openpty()
    environ = ENVIRON | {"TERM": "xterm", "COLUMNS": "120"}
    with subprocess.Popen(command, stdout=theirs, stderr=theirs, env=environ) as process:
        os.close(theirs)
        pieces = []
        while True:
            try:
                piece = os.read(ours, 4096)
            except OSError:  # Linux's way to tell that the other end is closed
                break
            if not piece:
                break
            pieces.append(piece)
    os.close(ours)
    return process.returncode, b"".join(pieces).decode()


def test_a_line_says_what_the_record_has():
    record = {"step": 7, "loss": 1.25, "lr": 0.001, "samples_per_second": 12.34}
    assert describe_record(record) == "step 7  loss 1.2500  lr 1.00e-03  12.3 samples/s"


def test_small_and_huge_numbers_have_three_digits():
    record = {"step": 7, "loss": 1.234e-5, "grad_norm": 1e300, "samples_per_second": 0.0273}
    assert describe_record(record) == "step 7  loss 1.23e-05  grad norm 1e+300  0.0273 samples/s"


def test_a_bar_knows_the_time_left_however_rare_the_records_are(monkeypatch):
    monkeypatch.setattr("sys.stdout", io.StringIO())
    bar = LiveProgress(100)
    now = 0.0
    bar._bar.get_time = lambda: now
    for step in (40, 50, 60):
        bar.show({"step": step})
        now += 200.0
    bar.close()
    (task,) = bar._bar.tasks
    assert task.time_remaining == pytest.approx(40 * 20)


@pytest.mark.parametrize(
    ("room", "line"),
    [
        (48, "step 7  loss 1.2500  lr 1.00e-03  12.3 samples/s"),
        (47, "step 7  loss 1.2500  12.3 samples/s"),
        (22, "step 7  12.3 samples/s"),
        (20, "step 7"),
        (3, "step 7"),
    ],
)
def test_a_narrow_line_keeps_the_step_and_the_speed_as_long_as_it_can(room, line):
    assert shorter_line("step 7  loss 1.2500  lr 1.00e-03  12.3 samples/s", room) == line


def test_a_terminal_gets_one_line_that_is_redrawn(program):
    code, text = on_a_terminal(program.command("run"))
    assert code == 0
    assert "\x1b[" in text
    assert "12/12" in text
    assert "step 5: checkpoint" in text, "what is logged meanwhile stays visible"


@pytest.mark.parametrize("ranks", ["1", "2"])
def test_a_launchers_terminal_gets_plain_lines(program, ranks):
    """Open MPI gives its ranks pseudo-terminals; batch logs are not to be full of escapes."""
    words = ["mpirun", "-np", ranks, *program.command("run")]
    code, text = on_a_terminal(words)
    assert code == 0
    assert "\x1b[" not in text
    assert "step 12  loss" in text


def test_a_pipe_gets_plain_lines(program):
    done = subprocess.run(
        program.command("run"), capture_output=True, text=True, env=ENVIRON, check=False
    )
    assert done.returncode == 0
    assert "\x1b" not in done.stdout
    assert "step 12  loss" in done.stdout
