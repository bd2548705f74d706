from __future__ import annotations

import logging
import os

import pytest

from hpc_train.errors import SetupError
from hpc_train.mpi import environment, runtime
from tests.programs import python, run

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


BOUND_TWICE = """
import os
from hpc_train.mpi import environment, runtime
cores = sorted(os.sched_getaffinity(0))
for core in cores[environment.launched_rank(os.environ)], cores[0]:
    os.sched_setaffinity(0, {core})
    polite = runtime.start_runtime().world.waiting.polite
    os.environ.pop(environment.YIELD, None)
    print(f"{polite} {runtime.yield_while_waiting(False)}\\n", end="", flush=True)  # in one piece
"""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two ranks need a core for each")
def test_waiting_ranks_leave_a_core_to_others_only_if_they_share_it(tmp_path):
    (tmp_path / "twice.py").write_text(BOUND_TWICE)
    unasked = ["env", "-u", environment.YIELD, "mpirun", "-np", "2", "--bind-to", "none"]
    done = run(*unasked, *python(str(tmp_path / "twice.py"), warm=False))
    own, shared = "False False", "True True"
    assert sorted(done.stdout.splitlines()) == [own, own, shared, shared], done.stderr
