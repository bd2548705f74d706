from __future__ import annotations

import logging
import os

import pytest

from hpc_train.errors import SetupError
from hpc_train.mpi import runtime

MIB = 1 << 20
needs_horovod = pytest.mark.skipif(not runtime.horovod_built(), reason="Horovod is not built")


@pytest.mark.parametrize(
    ("bucket_bytes", "cycle"), [(1, "1"), (4 * MIB, "1"), (16 * MIB, "3.91"), (1 << 30, "10")]
)
def test_the_cycle_is_as_long_as_the_sum_of_a_bucket(bucket_bytes, cycle):
    settings = runtime.horovod_settings({}, bucket_bytes)
    assert settings == {"HOROVOD_DISABLE_GROUP_FUSION": "1", "HOROVOD_CYCLE_TIME": cycle}


def test_what_the_user_has_set_stays():
    given = {"HOROVOD_CYCLE_TIME": "7", "HOROVOD_DISABLE_GROUP_FUSION": "0"}
    assert runtime.horovod_settings(given, MIB) == {}


def test_with_a_fusion_threshold_the_cycle_is_left_alone():
    settings = runtime.horovod_settings({"HOROVOD_FUSION_THRESHOLD": "0"}, MIB)
    assert settings == {"HOROVOD_DISABLE_GROUP_FUSION": "1"}


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
    assert "HOROVOD_DISABLE_GROUP_FUSION" in os.environ
    expected = ["HOROVOD_AUTOTUNE=true means off to Horovod, which reads numbers: set 1"]
    assert caplog.messages == (expected if job.world.rank == 0 else [])
