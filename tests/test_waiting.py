"""The limits of waits."""

from __future__ import annotations

import time

import pytest

from tests.waiting import wait_until


def test_a_machine_that_stands_still_does_not_use_a_limit_up(monkeypatch):
    """Its clock goes on for minutes in one turn."""
    clock, turns = [0.0], []
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(time, "sleep", lambda pause: clock.append(clock.pop() + 300))
    wait_until(lambda: turns.append(0) or len(turns) > 4, limit=5)
    with pytest.raises(TimeoutError, match="not within 5 seconds"):
        wait_until(lambda: False, limit=5)
    assert clock[0] == 300 * (4 + 6)
