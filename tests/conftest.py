"""Fixtures, and what makes pytest safe on several ranks.

Tests marked `mpi` run under `mpirun -np 4 python -m pytest --only-mpi -m mpi`; all others in one
process. A test that fails on one rank fails on all of them: without that, the ranks would drift
apart and wait for each other in different tests. Tests put no collective behind an assertion.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import sysconfig
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from hypothesis import settings

from hpc_train.data.prepare.work import prepare_text
from hpc_train.job import preemption
from hpc_train.mpi import environment, runtime
from hpc_train.mpi.group import Group
from hpc_train.mpi.idle import Idle
from hpc_train.mpi.runtime import Runtime
from hpc_train.warm import key, meeting
from tests.programs import WARM, Program


def pytest_addoption(parser):
    parser.addoption(
        "--durations_file", type=Path, help="write the seconds of each test there, longest first"
    )


settings.register_profile("any speed", deadline=None)
settings.load_profile("any speed")

LIMIT = 20.0  # seconds, above which a test has to say why
WHY: dict[str, str] = {}  # by test that is marked `slow`
SECONDS: dict[str, float] = {}  # of each test, with what it sets up first and takes down last


def pytest_runtest_logreport(report):
    WHY.update((report.nodeid, why) for name, why in report.user_properties if name == "slow")
    SECONDS[report.nodeid] = SECONDS.get(report.nodeid, 0.0) + report.duration


def pytest_sessionfinish(session):
    launch = environment.read_launch(os.environ)
    if hasattr(session.config, "workerinput") or (launch and launch.rank > 0):
        return  # one of several that run side by side
    meeting.dismiss(WARM[key.WARM])
    if path := session.config.getoption("durations_file"):
        rows = sorted(SECONDS.items(), key=lambda row: -row[1])
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(f"{seconds:.2f}\t{name}\n" for name, seconds in rows))


def pytest_terminal_summary(terminalreporter):
    long = [name for name, seconds in SECONDS.items() if seconds > LIMIT]
    if long:
        terminalreporter.section(f"tests of more than {LIMIT:.0f} s")
    for name in sorted(long, key=lambda name: -SECONDS[name]):
        why = WHY.get(name, "it does not say why: see the marker `slow`")
        terminalreporter.line(f"{SECONDS[name]:.0f} s  {name}: {why}")


@pytest.hookimpl(trylast=True)
def pytest_configure(config):
    launch = environment.read_launch(os.environ)
    if launch and launch.rank > 0:  # rank 0 reports for all
        config.pluginmanager.unregister(name="terminalreporter")


@cache
def names_mpi(path: Path) -> bool:
    """Whether a module names a marker of tests of several ranks."""
    return re.search(r"\bmark\.(mpi|ranks)\b", path.read_text()) is not None


def pytest_ignore_collect(collection_path: Path, config) -> bool | None:
    """Under `--only-mpi`, leave out modules without such a test: each rank would import all."""
    module = config.getoption("only_mpi") and collection_path.match("test_*.py")
    return True if module and not names_mpi(collection_path) else None


STARTERS = ("run", "ENVIRON", "hosts")  # names of what starts programs and hosts


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Mark the tests that start programs, and begin with the modules that take longest.

    Refuse names that differ in each process, and what pytest-mpi would skip in silence: it takes
    any name `mpi` for its marker.
    """
    for item in items:
        if " at 0x" in item.nodeid:  # workers that run side by side would not know it by its name
            raise pytest.UsageError(f"{item.nodeid}: give its parameters `ids`")
        if "mpi" in item.keywords and item.get_closest_marker("mpi") is None:
            raise pytest.UsageError(f"{item.nodeid}: no folder or parameter may be named mpi")
        if "mpi" in item.keywords and not names_mpi(item.path):
            raise pytest.UsageError(f"{item.nodeid}: its own module has to name the marker mpi")
        for slow in item.iter_markers("slow"):
            if not slow.args:
                raise pytest.UsageError(f"{item.nodeid}: the marker slow needs a reason")
            item.user_properties.append(("slow", slow.args[0]))
        if {"program", "slow"} & {*item.fixturenames, *item.keywords} or any(
            getattr(item.module, name, None) is not None for name in STARTERS
        ):
            item.add_marker("programs")
    items.sort(key=lambda item: -MODULES.get(item.nodeid.partition("::")[0], 0.0))


def module_seconds() -> dict[str, float]:
    """Seconds that each module took when `durations.tsv` was written."""
    found: dict[str, float] = {}
    for line in (Path(__file__).parent / "durations.tsv").read_text().splitlines():
        seconds, _, name = line.partition("\t")
        module = name.partition("::")[0]
        found[module] = found.get(module, 0.0) + float(seconds)
    return found


MODULES = module_seconds()


def pytest_generate_tests(metafunc):
    """Give `group` the sizes of the marker `ranks`, which are then in the test's name."""
    test = metafunc.definition
    marker = test.get_closest_marker("ranks")
    if (marker is not None) != ("group" in metafunc.fixturenames):
        raise pytest.UsageError(
            f"{test.nodeid}: the marker ranks and the fixture group go together"
        )
    if marker is not None:
        later = marker.kwargs.get("later", ())
        sizes = [
            pytest.param(
                size,
                id=f"ranks={size}",
                marks=[pytest.mark.mpi(min_size=size), *([pytest.mark.long] * (size in later))],
            )
            for size in (*marker.args, *later)
        ]
        metafunc.parametrize("group", sizes, indirect=True)


@pytest.hookimpl(specname="pytest_pyfunc_call", tryfirst=True)
def pytest_leave_out_ranks(pyfuncitem):
    """Ranks outside of the group set up the fixtures, which may be collective, and do no more."""
    marker = pyfuncitem.get_closest_marker("ranks")
    if marker is None or marker.kwargs.get("everywhere"):
        return None
    return True if pyfuncitem.funcargs["group"] is None else None


def stop_horovod() -> None:
    """Its threads would look for work until the processes end.

    Ranks that share their cores would then take twice as long for the tests that follow.
    """
    horovod = sys.modules.get("horovod.torch")
    if horovod is not None and horovod.is_initialized():
        horovod.shutdown()


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem):
    if "mpi" not in pyfuncitem.keywords:
        return (yield)
    comm = runtime.import_mpi().COMM_WORLD
    failure, result = None, None
    try:
        result = yield
    except (KeyboardInterrupt, pytest.exit.Exception):
        raise
    except BaseException as error:  # noqa: BLE001  # pytest's own failures are no Exception
        failure = error
    skipped = isinstance(failure, pytest.skip.Exception)
    everyone, idle = comm.Ibarrier(), Idle(polite=True)
    while not everyone.Test():  # ranks that are not in the test's group leave their cores to others
        idle.pause()
    verdicts = comm.allgather(None if failure is None or skipped else repr(failure))
    failed = {rank: text for rank, text in enumerate(verdicts) if text is not None}
    stop_horovod()
    if failure is not None:
        raise failure
    assert not failed, f"failed on other ranks: {failed}"
    return result


@pytest.fixture(autouse=True)
def stop_signals() -> Iterator[None]:
    """Put their handlers back: a job that stops ignores them, and programs would inherit that.

    No signal of this test stops the next one.
    """
    before = {number: signal.getsignal(number) for number in preemption.REQUEST_SIGNALS}
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
    preemption.StopRequests.unanswered = 0
    left = signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    assert left == blocked, "the test leaves signals blocked, and programs would inherit that"


@pytest.fixture(scope="session")
def job() -> Iterator[Runtime]:
    """The runtime of the whole test job."""
    started = runtime.start_runtime()
    yield started
    started.close()


@pytest.fixture
def group(request, job: Runtime) -> Iterator[Group | None]:
    """The first ranks, as many as the marker `ranks` says; None on all others."""
    inside = job.world.rank < request.param
    comm = job.world.comm
    if comm is None:
        yield Group()
        return
    part = comm.Split(0 if inside else 1, job.world.rank)
    yield Group(part.rank, part.size, part) if inside else None
    part.Free()


@pytest.fixture
def together(mpi_tmp_path: Path) -> Path:
    """A temporary folder that all ranks share."""
    return mpi_tmp_path


@pytest.fixture(scope="session")
def text_data(tmp_path_factory) -> Path:
    """Byte tokens of a part of the standard library, with some 60 samples for validation."""
    return small_text(tmp_path_factory.mktemp("data") / "text")


def small_text(out: Path) -> Path:
    """Prepare the text there."""
    library = Path(sysconfig.get_path("stdlib"))
    prepare_text([library / "json", library / "email"], out, shard_mb=0.1, validation=0.005)
    return out


SMALL = """
run: {steps: 12, log_every: 1, deterministic: true}
model: {layers: 2, hidden: 32, heads: 2, sequence: 32, dropout: 0.1}
data: {batch: 16, micro_batch: 2}
optimizer: {lr: 0.01, clip_norm: 1.0, warmup_steps: 3, schedule: cosine, weight_decay: 0.1}
precision: {dtype: float64}
checkpoint: {every: 5, keep: 0}
"""


def small_program(folder: Path, data: Path) -> Program:
    """The small training job, writing into a folder."""
    config = folder / "small.yaml"
    config.write_text(SMALL.replace("data: {", f"data: {{path: {data}, "))
    return Program(config, folder)


@pytest.fixture
def program(tmp_path: Path, text_data: Path) -> Program:
    """The small training job, to be run through its command line."""
    return small_program(tmp_path, text_data)


def records(run: Path) -> list[dict]:
    """A run's metrics."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
