"""Run another program and return what it prints."""

from __future__ import annotations

import subprocess


def output(*words: str, timeout: float, errors: bool = False, needs_success: bool = False) -> str:
    """Run a program to its end. Returns what it prints, or "" if it cannot be run.

    Args:
        words: the program and its arguments.
        timeout: seconds after which the program is killed. The result is then "".
        errors: return also what it prints on standard error.
        needs_success: return "" if its exit code is not 0.
    """
    try:
        done = subprocess.run(
            words, capture_output=True, text=True, errors="replace", timeout=timeout, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    if needs_success and done.returncode:
        return ""
    return done.stdout + (done.stderr if errors else "")
