"""Checks before a job's first step: ranks have the same software, no host is slow, no GPU idle.

A difference ends the job with an error that names rank and host. A slow host, an idle GPU or a
nearly full disk is only a warning, because the results are still right.
"""

from __future__ import annotations

import importlib.metadata
import logging
import platform
import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from hpc_train import files
from hpc_train.errors import UserError, plural, remedy_for, size_text, some_of
from hpc_train.host.memory import free_bytes
from hpc_train.job.devices import used_devices
from hpc_train.mpi.agreement import agreed, from_first, same
from hpc_train.mpi.group import Group
from hpc_train.mpi.runtime import Runtime, import_mpi, library_version
from hpc_train.times import time_text

logger = logging.getLogger(__name__)

PACKAGES = ("torch", "mpi4py", "numpy", "h5py", "horovod")
COMPUTE_SECONDS = 0.1  # seconds of each rank's trial
TRIAL_ROUNDS = 3  # rounds of each trial; the fastest counts, because others use the machine too
MORE_ROUNDS, TRIAL_SECONDS = 12, 0.05  # further rounds of a message, as far as there is time
MESSAGE_BYTES = 1 << 20
SLOW = 1.5  # times the median: a rank or host that takes longer is slow
CLOCKS = 2.0  # seconds that hosts' clocks may differ: logs and time limits depend on them
LITTLE = 1 << 30  # bytes of free memory, below which a host is named
SLOW_SHOWN = 4  # number of slow ranks, or of hosts, that are named


class PreflightFinding(NamedTuple):
    """One line of the table."""

    what: str
    found: str
    fine: bool = True


def preflight(
    runtime: Runtime, directory: Path, device: torch.device, needed: int
) -> dict[str, float]:
    """Check all ranks and hosts, and log the findings as one table. Collective.

    Args:
        runtime: the job's runtime. With a single process nothing is checked.
        directory: the run directory, which all hosts must share.
        device: the device that this rank computes on.
        needed: bytes of a checkpoint.

    Returns:
        Bytes per second of a usual host's memory as `link_inside` and of its link to another host
        as `link_across`, as far as there are several ranks and hosts; the same on all ranks.

    Raises:
        UserError: ranks have different versions, or a host does not see the run directory.
    """
    world = runtime.world
    if world.comm is None:
        return {}
    begin = time.monotonic()
    leaders = world.split(0 if runtime.node.rank == 0 else 1, world.rank)
    leads = runtime.node.rank == 0
    found = [same_versions(world), clocks(world)]
    found.append(shared_directory(world, leaders if leads else None, directory, needed))
    found.append(free_memory(world))
    found.append(PreflightFinding("devices", *used_devices(runtime, device)))
    found.append(computing(world, device))
    lines, bandwidths = links(runtime, leaders if leads else None)
    found += lines
    leaders.close()
    logger.info("%s", table(world, found, time.monotonic() - begin))
    for finding in found:
        if not finding.fine and world.rank == 0:
            logger.warning("%s: %s", finding.what, finding.found)
    return bandwidths


def table(world: Group, found: Sequence[PreflightFinding], seconds: float) -> str:
    """The findings as text. Collective."""
    hosts = len(set(world.gathered(world.host)))
    where = f"{plural(world.size, 'rank')} on {plural(hosts, 'host')}"
    title = f"preflight of {where}, {seconds:.1f} s"
    lines = [f"  {' ' if one.fine else '!'} {one.what:<14} {one.found}" for one in found]
    return "\n".join([title, *lines])


def versions() -> dict[str, str]:
    """This rank's Python, packages and MPI library."""
    found = {"Python": platform.python_version()}
    for name in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return {**found, "MPI": library_version(import_mpi())}


def same_versions(world: Group) -> PreflightFinding:
    """Check that all ranks have the same packages and the same MPI library. Collective.

    Raises:
        UserError: a rank has another version.
    """
    mine = versions()
    for name in ("Python", *PACKAGES, "MPI"):
        same(world, f"the version of {name}", mine.get(name, "none"), "install the same everywhere")
    return PreflightFinding("versions", ", ".join(f"{name} {text}" for name, text in mine.items()))


def clocks(world: Group) -> PreflightFinding:
    """How far the hosts' clocks differ. Collective."""
    spreads = []
    for _ in range(TRIAL_ROUNDS):
        world.barrier()
        now = world.gathered(time.time(), "the clocks")
        spreads.append(max(now) - min(now))
    return PreflightFinding("clocks", f"within {min(spreads):.3f} s", min(spreads) < CLOCKS)


def shared_directory(
    world: Group, leaders: Group | None, directory: Path, needed: int
) -> PreflightFinding:
    """Check that all hosts write to the same run directory, and find its free space. Collective.

    Raises:
        UserError: a host cannot write there, or writes to a folder of its own.
    """
    begin = time.monotonic()
    # Each host looks for the file of the next host. If all find it, all see the same folder.
    other = world.host
    if leaders is not None:
        hosts = leaders.gathered(world.host)
        other = hosts[(leaders.rank + 1) % leaders.size]
    own = _mark(directory, world.host)
    try:
        with agreed(world):
            if leaders is not None:
                _write(own)
        with agreed(world):
            if leaders is not None and not _mark(directory, other).exists():
                raise UserError(
                    f"run.dir {directory.absolute()} is not the folder that {other} sees",
                    "give one on a file system that all hosts share",
                )
    finally:
        if leaders is not None:
            with suppress(OSError):
                own.unlink()
    seconds = time.monotonic() - begin
    free = from_first(world, lambda: shutil.disk_usage(directory).free)
    text = f"{size_text(free)} free, written and read by all hosts in {seconds:.2f} s"
    if free < needed:
        return PreflightFinding(
            "run.dir", f"{text}, less than a checkpoint's {size_text(needed)}", False
        )
    return PreflightFinding("run.dir", text)


def _mark(directory: Path, host: str) -> Path:
    return directory / f".preflight-{host}"


def _write(path: Path) -> None:
    try:
        files.write_text(path, "x" * 4096)
    except OSError as error:
        raise UserError(
            f"run.dir {path.parent} cannot be written ({error.strerror})",
            remedy_for(error, "free space there, or give another folder"),
        ) from None


def free_memory(world: Group) -> PreflightFinding:
    """The free memory of the host that has least of it. Collective."""
    free, host = min(world.gathered((free_bytes(), world.host)))
    return PreflightFinding(
        "memory", f"{size_text(free)} free at the least ({host})", free > LITTLE
    )


def computing(world: Group, device: torch.device) -> PreflightFinding:
    """How fast each rank multiplies matrices while all ranks do. Collective."""
    world.barrier()
    seconds = world.gathered((multiply(device), f"rank {world.rank} ({world.host})"), "a trial")
    median = statistics.median_low(second for second, _ in seconds)
    size = _matrix(device)
    rate = f"{2 * size**3 / median / 1e9:.1f} GFLOP/s"
    text = f"{rate} per rank in a trial with {size} x {size} matrices"
    return _with_slow("compute", text, seconds, median)


def multiply(device: torch.device) -> float:
    """Seconds of one product of two float32 matrices: the fastest of many products."""
    size = _matrix(device)
    one = torch.ones(size, size, device=device)
    best, until = float("inf"), time.monotonic() + COMPUTE_SECONDS
    while time.monotonic() < until:
        begin = time.perf_counter()
        product = one @ one
        if device.type != "cpu":
            getattr(torch, device.type).synchronize(device)
        best = min(best, time.perf_counter() - begin)
        del product
    return best


def _matrix(device: torch.device) -> int:
    return 256 if device.type == "cpu" else 4096


def links(
    runtime: Runtime, leaders: Group | None
) -> tuple[list[PreflightFinding], dict[str, float]]:
    """How long a message takes inside each host, and between neighbouring ones. Collective.

    Returns:
        The findings, and the bandwidths that `preflight` returns.
    """
    between = 0.0 if leaders is None or leaders.comm is None else exchange(leaders)
    mine = runtime.world.host, (sum_inside(runtime.node), between)
    everyone = sorted(set(runtime.world.gathered(mine, "trials of the links")))
    found, bandwidths = [], {}
    for place, (what, how, key) in enumerate(
        (
            ("inside hosts", "summed", "link_inside"),
            ("between hosts", "each way", "link_across"),
        )
    ):
        seconds = [(times[place], host) for host, times in everyone if times[place]]
        if seconds:
            median = statistics.median_low(second for second, _ in seconds)
            text = f"{size_text(MESSAGE_BYTES)} {how} in {time_text(median)}"
            found.append(_with_slow(what, text, seconds, median))
            bandwidths[key] = MESSAGE_BYTES / median
    return found, bandwidths


def exchange(leaders: Group) -> float:
    """Seconds of a message each way with a neighbour: the smaller of two neighbours. Collective.

    In a round all hosts exchange at the same time, each with one other host. So a host is slow only
    if it is slow with both of its neighbours. The slower direction counts for both hosts of a pair.
    """
    assert leaders.comm is not None
    out, into = np.zeros(MESSAGE_BYTES, np.uint8), np.empty(MESSAGE_BYTES, np.uint8)
    comm = leaders.comm

    def swap(partner: int | None) -> None:
        if partner is not None:
            with leaders.waiting(f"a message of host {partner}"):
                comm.Sendrecv(out, partner, recvbuf=into, source=partner)
                # What a host has sent may still be on its way: the other one says when it is there.
                comm.Sendrecv(out[:1], partner, recvbuf=into[:1], source=partner)

    best = float("inf")
    for pairs in rounds(leaders.size):
        partner = dict(pairs + [(b, a) for a, b in pairs]).get(leaders.rank)
        seconds = _fastest(leaders, partial(swap, partner))
        best = best if partner is None else min(best, seconds)
    return best


def _fastest(group: Group, message: Callable[[], None]) -> float:
    """Seconds of a message: the fastest of some, and of more if they take little time. Collective.

    A single one is soon disturbed, and is what the report compares all others with.
    """
    taken: list[float] = []

    def repeat(count: int) -> None:
        for _ in range(count):
            group.barrier()
            begin = time.perf_counter()
            message()
            taken.append(time.perf_counter() - begin)

    repeat(TRIAL_ROUNDS)
    slowest = group.largest(int(1e9 * min(taken))) / 1e9
    repeat(min(MORE_ROUNDS, int(TRIAL_SECONDS / max(slowest, 1e-6))))
    return min(taken)


def rounds(count: int) -> Iterator[list[tuple[int, int]]]:
    """Pairs of neighbours on a ring, in rounds. In each round a host is in one pair at most."""
    pairs = [(i, (i + 1) % count) for i in range(count if count > 2 else count - 1)]
    for begin in (0, 1):
        yield [pair for pair in pairs[begin::2] if pair[1] or count == 2]
    if count > 2:
        yield pairs[-1:]


def sum_inside(node: Group) -> float:
    """Seconds of a sum over the ranks of this host: the fastest of some. Collective over them."""
    if node.comm is None:
        return 0.0
    values, total = np.zeros(MESSAGE_BYTES // 8), np.empty(MESSAGE_BYTES // 8)
    comm = node.comm

    def add() -> None:
        with node.waiting("a sum on its host"):
            comm.Allreduce(values, total)

    return _fastest(node, add)


def _with_slow(
    what: str, text: str, seconds: Sequence[tuple[float, str]], median: float
) -> PreflightFinding:
    """A finding that names the ranks or hosts that took far longer than the median.

    Of an even number it is the lower median: of two, the slow one is compared with the other.
    """
    slow = sorted((entry for entry in seconds if entry[0] > SLOW * median), reverse=True)
    if not slow:
        return PreflightFinding(what, text)
    named = some_of([f"{who} {second / median:.1f} times" for second, who in slow], SLOW_SHOWN)
    return PreflightFinding(what, f"{text}; slower: {named}", False)
