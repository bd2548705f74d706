from __future__ import annotations

import pytest

from hpc_train.collectives.coroutines import CoroutineScheduler, drive


def waits(switch: dict[str, bool], name: str, log: list[str]):
    yield lambda: switch[name]
    log.append(name)


def test_each_coroutine_resumes_when_its_own_wait_ends():
    switch, log, scheduler = {"a": False, "b": False}, [], CoroutineScheduler()
    for name in switch:
        scheduler.start(waits(switch, name, log))
    assert not scheduler.advance()
    switch["b"] = True
    assert scheduler.advance()
    assert log == ["b"]
    assert not scheduler.idle
    switch["a"] = True
    scheduler.finish()
    assert log == ["b", "a"]
    assert scheduler.idle


def test_a_coroutine_that_waits_for_several_resumes_after_the_last():
    switch, log = {"a": True, "b": False}, []

    def parent():
        yield [waits(switch, "a", log), waits(switch, "b", log)]
        log.append("parent")

    scheduler = CoroutineScheduler()
    scheduler.start(parent())
    scheduler.advance()
    assert log == ["a"]
    switch["b"] = True
    scheduler.finish()
    assert log == ["a", "b", "parent"]


def test_run_returns_the_result():
    def steps():
        yield lambda: True
        return 7

    assert drive(steps()) == 7


def test_an_error_comes_out():
    def fails():
        yield lambda: True
        raise ValueError("here")

    with pytest.raises(ValueError, match="here"):
        drive(fails())
