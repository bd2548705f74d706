from __future__ import annotations

import logging
import os

import pytest

from hpc_train.errors import SetupError
from hpc_train.mpi import runtime

needs_horovod = pytest.mark.skipif(not runtime.horovod_built(), reason="Horovod is not built")


def test_horovods_fusion_buffer_is_set_on_request_and_its_cycle_time_never():
    assert set(runtime.horovod_settings({})) == {"HOROVOD_CACHE_CAPACITY"}
    assert runtime.horovod_settings({}, 0)["HOROVOD_FUSION_THRESHOLD"] == "0"


def test_a_timeline_is_made_possible_on_request_as_it_costs_time():
    assert runtime.horovod_settings({}, timeline=True)["HOROVOD_TIMELINE"] == "DYNAMIC"


def test_what_the_user_has_set_stays():
    given = dict.fromkeys(runtime.horovod_settings({}, 1, timeline=True), "10")
    assert runtime.horovod_settings(given, 1 << 20, timeline=True) == {}


@needs_horovod
@pytest.mark.mpi(min_size=4)
def test_a_second_start_that_would_crash_horovod_is_refused(job, monkeypatch):
    hvd = runtime.start_horovod(job.world)
    monkeypatch.setenv("HOROVOD_CYCLE_TIME", "1")
    monkeypatch.setenv("HOROVOD_FUSION_THRESHOLD", "0")
    with pytest.raises(SetupError, match="give start_horovod all process sets at first"):
        runtime.start_horovod(job.world, [[0, 1, 3]])
    assert hvd.is_initialized()
    assert runtime.start_horovod(job.world) is hvd


@needs_horovod
@pytest.mark.mpi
def test_a_switch_that_is_a_word_is_warned_of(job, monkeypatch, caplog):
    if runtime.running_horovod():
        runtime.running_horovod().shutdown()
    monkeypatch.setenv("HOROVOD_AUTOTUNE", "true")
    with caplog.at_level(logging.WARNING, logger="hpc_train"):
        runtime.start_horovod(job.world)
    assert "HOROVOD_CACHE_CAPACITY" in os.environ
    expected = ["HOROVOD_AUTOTUNE=true means off to Horovod, which reads numbers: set 1"]
    assert caplog.messages == (expected if job.world.rank == 0 else [])
