"""What a rank says of itself: its MPI, its cores, its devices."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpc_train.errors import HpcTrainError
from hpc_train.host.cores import physical_cores
from hpc_train.mpi import gpus, runtime, visible

if TYPE_CHECKING:
    from hpc_train.launch.launchers import FoundLauncher

RANK_PROBE_SECONDS = 240  # a first import of torch from a network file system takes minutes


def probe() -> list[dict[str, Any]]:
    """Start MPI, and describe this rank; on rank 0 returns all ranks' descriptions. Collective."""
    offered = _gpus()  # before the rank is given one of them
    try:
        started = runtime.start_runtime()
        MPI = runtime.import_mpi()
    except HpcTrainError as error:
        return [{"error": error.cause, "remedy": error.remedy}]
    torch_error = _torch_error()
    with_horovod, horovod_error = (None, "") if torch_error else _horovod()
    mine = {
        "rank": started.world.rank,
        "local_rank": started.node.rank,
        "host": socket.gethostname(),
        "cores": sorted(os.sched_getaffinity(0)),
        "physical_cores": sorted(physical_cores(os.sched_getaffinity(0))),
        "mpi": runtime.library_version(MPI),
        "mpi4py": importlib.metadata.version("mpi4py"),
        "thread_multiple": MPI.Query_thread() == MPI.THREAD_MULTIPLE,
        "torch_error": torch_error,
        "horovod": with_horovod,
        "horovod_error": horovod_error,
        "libmpi": _loaded_libmpi(),
        "devices": [] if torch_error else _devices(),
        "gpus": offered,
        "build": ("", "") if torch_error else _build(),
        "products": None if torch_error or started.node.rank else _products(),
    }
    everyone = started.world.comm.gather(mine) if started.world.comm else [mine]
    started.close()
    return everyone or [mine]


def _torch_error() -> str:
    """Why torch does not load; "" if it does."""
    try:
        importlib.import_module("torch")
    except Exception as error:  # noqa: BLE001  # a library that is missing is an OSError, for one
        return f"{type(error).__name__}: {' '.join(str(error).split())}"
    return ""


def _horovod() -> tuple[dict[str, Any] | None, str]:
    if not runtime.horovod_built():
        return None, ""
    try:
        import horovod
        import horovod.torch as hvd
    except Exception as error:  # noqa: BLE001  # a wrong build can fail in many ways
        return None, " ".join(str(error).split())
    metadata = json.loads(
        Path(horovod.__file__).with_name("metadata.json").read_text(encoding="utf-8")
    )
    return {
        "version": horovod.__version__,
        "mpi": bool(hvd.mpi_built()),
        "nccl": bool(hvd.nccl_built()),
        "torch": metadata.get("pytorch", "?"),
    }, ""


def _loaded_libmpi() -> list[str]:
    """The MPI libraries that this process has loaded."""
    maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    return sorted(set(re.findall(r"\S*/libmpi(?:_abi)?\.so\S*", maps)))


def _devices() -> list[str]:
    import torch

    return [
        module.get_device_name(number)
        for module in (torch.cuda, torch.xpu)
        for number in range(module.device_count())
    ]


def _build() -> tuple[str, str]:
    """As `built_for`."""
    from hpc_train.training.device import built_for

    return built_for()


def _gpus() -> tuple[int, str, str] | None:
    """Number, vendor and torch's build of the GPUs that this process may use; None: it has none."""
    found = visible.offered(os.environ, gpus.count_gpus(Path("/"), os.environ))
    return (found.count, found.vendor.name, found.vendor.build) if found.count else None


def _products() -> dict[str, Any] | None:
    """The table's choice for float32 matrices here, and oneDNN's measured speed; None on GPUs."""
    from hpc_train.models import linear, trial

    if _devices():
        return None
    speed = trial.onednn_speed() if linear.onednn_works() else None
    return {**linear.of_table()._asdict(), "onednn_speed": speed}


def probe_in_a_rank() -> list[dict[str, Any]]:
    """Start one rank that runs `probe` and prints the result."""
    from hpc_train.launch.lines import LaunchedJob, Line

    program = [sys.executable, "-m", "hpc_train.cli.doctor"]
    try:
        line = chosen_launcher().make(LaunchedJob(program, 1))
    except HpcTrainError:  # `launchers` reports it; the process alone may still tell something
        line = Line(program, {})
    said = "nothing"
    try:
        done = subprocess.run(
            line.words,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=RANK_PROBE_SECONDS,
            env={**os.environ, **line.environ},
            check=False,
        )
        said = why_it_failed(done.returncode, done.stderr.strip().splitlines())
        found: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        error = f"the rank that was started did not answer within {RANK_PROBE_SECONDS} s"
        remedy = "try again, as a first import of torch may take as long; or run it inside a job"
        return [{"error": error, "remedy": remedy}]
    except (OSError, ValueError, IndexError):
        remedy = "load the site's MPI module; where login nodes refuse MPI, run this inside a job"
        return [{"error": f"MPI does not start here: {said}", "remedy": remedy}]
    return found


def chosen_launcher(wanted: str | None = None) -> FoundLauncher:
    """The launcher that `hpc-train launch` would choose.

    Args:
        wanted: the program that the user has named, or None.

    Raises:
        HpcTrainError: there is none, or the scheduler's variables are wrong.
    """
    from hpc_train.launch.hosts import allocated
    from hpc_train.launch.launchers import find_launcher

    allocation = allocated(os.environ)
    return find_launcher(wanted, allocation.scheduler if allocation else None)


def why_it_failed(code: int, lines: list[str]) -> str:
    """Why a launcher failed: what its known lines tell, else the first one, which is nearest."""
    from hpc_train.launch.cause import explain

    told = explain(code, lines)
    return told if told != explain(code, []) or not lines else lines[0]
