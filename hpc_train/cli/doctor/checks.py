"""The checks of this machine, from what its ranks say of themselves."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import statistics
import sys
from collections.abc import Sequence
from typing import Any

from hpc_train.cli.doctor.findings import ERROR, OK, WARNING, Finding
from hpc_train.cli.doctor.probe import chosen_launcher
from hpc_train.errors import HpcTrainError, plural
from hpc_train.host.programs import output
from hpc_train.mpi import environment, runtime

LAUNCHER_NAMES = ("mpirun", "mpiexec", "srun", "horovodrun")
FASTER = 1.1  # speed from which on the other way to multiply matrices is recommended


def python() -> Finding:
    """The Python interpreter."""
    return Finding("Python", OK, f"{platform.python_version()} ({sys.executable})")


def torch(ranks: list[dict[str, Any]]) -> Finding:
    """Check that torch is installed, and that it loads on all ranks."""
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return Finding(
            "torch", ERROR, "not installed", "load the site's module or `pip install torch`"
        )
    for rank in ranks:
        if rank["torch_error"]:
            text = f"{version} does not load on {rank['host']}: {rank['torch_error']}"
            return Finding("torch", ERROR, text, "install torch again, or load its module")
    return Finding("torch", OK, version)


def hdf5() -> Finding:
    """Check that shards can be read. Any h5py will do; parallel HDF5 is not needed."""
    try:
        import h5py
    except ImportError as error:
        return Finding("HDF5", ERROR, f"h5py does not load: {error}", "`pip install h5py`")
    kind = "parallel" if h5py.get_config().mpi else "serial, which is enough"
    text = f"{h5py.version.hdf5_version} (h5py {h5py.version.version}, {kind})"
    return Finding("HDF5", OK, text)


def launchers() -> list[Finding]:
    """Find the launcher that `hpc-train launch` uses here, or the one that started this process."""
    from hpc_train.launch.lines import LaunchedJob

    launch = environment.read_launch(os.environ)
    if launch:
        text = f"started by {launch.launcher}"
        return [Finding("launcher", OK, text)]
    try:
        chosen = chosen_launcher()
    except HpcTrainError as error:
        return [Finding("launcher", ERROR, error.cause, error.remedy)]
    program = chosen.make(LaunchedJob([], 1)).words[0]
    found = {name: shutil.which(name) for name in LAUNCHER_NAMES}
    others = [name for name, path in found.items() if path and program not in (name, path)]
    text = f"{program} ({chosen.version})" + (f"; also {', '.join(others)}" if others else "")
    findings = [Finding("launcher", OK, text)]
    if chosen.note:
        remedy = "load the module of your MPI, or take the unknown one off the PATH"
        findings.append(Finding("launcher", WARNING, chosen.note, remedy))
    if "horovodrun" in others and not re.search(r"Open MPI\) [1-4]\.", mpirun_version()):
        text = "it works with the mpirun of Open MPI up to version 4 only, and this one is another"
        findings.append(Finding("horovodrun", WARNING, text, "start jobs with mpirun or srun"))
    return findings


def mpirun_version() -> str:
    """What the first mpirun on the PATH says of its version; "" if there is none."""
    from hpc_train.launch.launchers import identify

    found = identify("mpirun")
    return found.version if found else ""


def _output(command: Sequence[str]) -> str:
    """The output of a program; "nothing" if it does not run."""
    return output(*command, timeout=20).strip() or "nothing"


def mpi_io_component() -> str:
    """The MPI-IO component that Open MPI chooses in jobs, by `ompi_info`; "" if it says none."""
    settings = {**runtime.ROMIO_FIRST, **os.environ}
    words = ["env", *(f"{name}={settings[name]}" for name in runtime.ROMIO_FIRST)]
    text = _output([*words, "ompi_info", "--parsable", "--level", "9", "--param", "io", "all"])
    found = re.findall(r"^mca:io:\w+:param:io_(\w+)_priority:value:(-?\d+)$", text, re.MULTILINE)
    wanted = re.search(r"^mca:io:base:param:io:value:(.*)$", text, re.MULTILINE)
    names = wanted[1] if wanted else ""  # a list; a caret before it excludes these
    listed, excludes = names.lstrip("^").split(","), not names or names.startswith("^")
    priorities = {
        name: int(priority)
        for name, priority in found
        if not name.endswith("_delete") and (name in listed) != excludes
    }
    return max(priorities, key=priorities.__getitem__, default="")


def mpi(rank: dict[str, Any], mpirun: str) -> Finding:
    """Check the MPI library, that threads may call it, and that `mpirun` has its version."""
    text = f"{rank['mpi']}, mpi4py {rank['mpi4py']}"
    if not rank["thread_multiple"]:
        remedy = "unset MPI4PY_RC_THREAD_LEVEL, or use an MPI that is built with thread support"
        return Finding("MPI", ERROR, f"{text}, without MPI_THREAD_MULTIPLE", remedy)
    version = _numbers(mpirun)
    if version and version != _numbers(rank["mpi"]):
        remedy = "put the mpirun of that library first on the PATH, or load its module"
        return Finding("MPI", WARNING, f"{text}, but mpirun is of {version}", remedy)
    return Finding("MPI", OK, f"{text}, MPI_THREAD_MULTIPLE")


def _numbers(text: str) -> str:
    found = re.search(r"\d+\.\d+(\.\d+)?", text)
    return found[0] if found else ""


def horovod(rank: dict[str, Any]) -> Finding:
    """Check that Horovod is built, for this torch and with MPI."""
    if rank["torch_error"]:
        return Finding("Horovod", WARNING, "not tried, as torch does not load", "mend torch first")
    built, error = rank["horovod"], rank["horovod_error"]
    build = f"`{runtime.BUILD_HOROVOD}`"
    if built is None and not error:
        remedy = f"build it with {build}; engine mpi trains without it"
        return Finding("Horovod", WARNING, "not installed", remedy)
    if built is None:
        remedy = f"build it again with {build} --rebuild; engine mpi trains without it"
        return Finding("Horovod", WARNING, f"does not load: {error}", remedy)
    text = f"{built['version']} for torch {built['torch']}"
    text += ", MPI" if built["mpi"] else ", without MPI"
    text += ", NCCL" if built["nccl"] else ""
    if not built["mpi"] or built["torch"] != importlib.metadata.version("torch"):
        return Finding(
            "Horovod", WARNING, text, f"build it for this torch and MPI: {build} --rebuild"
        )
    return Finding("Horovod", OK, text)


def one_libmpi(rank: dict[str, Any]) -> list[Finding]:
    """Check that mpi4py and Horovod share one MPI library: two in a process corrupt each other."""
    libraries = rank["libmpi"]
    if not libraries:
        return []
    if len({os.path.realpath(library) for library in libraries}) > 1:
        remedy = f"build Horovod against mpi4py's MPI: `{runtime.BUILD_HOROVOD} --rebuild`"
        text = f"mpi4py and Horovod load different libraries: {', '.join(libraries)}"
        return [Finding("libmpi", ERROR, text, remedy)]
    users = "mpi4py and Horovod" if rank["horovod"] else "mpi4py"
    return [Finding("libmpi", OK, f"{libraries[0]}, for {users}")]


def mpi_io(library: str, component: str) -> Finding:
    """Check the implementation of MPI-IO that writes checkpoints."""
    if not library.startswith("Open MPI"):
        return Finding("MPI-IO", OK, f"the one of {library} (ROMIO in MPICH and its relatives)")
    if component.startswith("romio"):
        return Finding("MPI-IO", OK, f"ROMIO (component {component})")
    if not component:
        return Finding("MPI-IO", OK, "ROMIO if this Open MPI has it; ompi_info does not say")
    text = "OMPIO, which reports success when the disk is full; checkpoints are read back anyway"
    return Finding("MPI-IO", WARNING, text, "unset OMPI_MCA_io, or use an Open MPI with ROMIO")


def nodes(ranks: list[dict[str, Any]]) -> Finding:
    """Count the ranks on each host."""
    hosts = [rank["host"] for rank in ranks]
    each = ", ".join(f"{host}: {hosts.count(host)}" for host in dict.fromkeys(hosts))
    text = f"{plural(len(set(hosts)), 'node')}, {plural(len(hosts), 'rank')} ({each})"
    return Finding("nodes and ranks", OK, text)


def binding(ranks: list[dict[str, Any]]) -> Finding:
    """Check that the ranks of each node have physical cores of their own."""
    texts = []
    for host in dict.fromkeys(rank["host"] for rank in ranks):
        masks = [frozenset(rank["physical_cores"]) for rank in ranks if rank["host"] == host]
        # These cores are all that some ranks have: first the smallest set of cores.
        for cores in sorted({*masks, frozenset[str]().union(*masks)}, key=len):
            held = sum(mask <= cores for mask in masks)
            text = f"{plural(held, 'rank')} on {plural(len(cores), 'core')} of {host}"
            if held > len(cores):
                remedy = "bind each rank to a core of its own, or start fewer ranks per node"
                return Finding("binding", WARNING, f"{text}: they share cores", remedy)
        texts.append(text)
    return Finding("binding", OK, texts[0])


def devices(ranks: list[dict[str, Any]]) -> Finding:
    """List the devices that the ranks see, and check that these are all kinds of GPU there are."""
    for rank in ranks:
        if rank["gpus"] and not rank["devices"]:
            return _unused(rank)
    names = sorted({name for rank in ranks for name in rank["devices"]})
    return Finding("devices", OK, ", ".join(names) or "CPU only")


def _unused(rank: dict[str, Any]) -> Finding:
    """The finding for a host with GPUs of which torch finds none."""
    (count, vendor, needed), (build, why) = rank["gpus"], rank["build"]
    text = f"{rank['host']} has {count} {vendor} GPUs, and torch "
    if build != needed:
        text += f"is built for {build}" if build else "does not load"
        remedy = f"install torch for {needed}: docs/how-to/cluster.md has the line"
        return Finding("devices", WARNING, text, remedy)
    text += f"finds none, although it is built for {build}" + (f": {why}" if why else "")
    remedy = f"load the module of {build}, or install torch for the version of the node's driver"
    return Finding("devices", WARNING, text, remedy)


def matrix_products(ranks: list[dict[str, Any]]) -> list[Finding]:
    """Check, for each kind of host, that the table has the faster way to multiply matrices."""
    measured = [rank["products"] for rank in ranks if rank["products"]]
    return [
        _products_of([one for one in measured if one["why"] == why])
        for why in dict.fromkeys(one["why"] for one in measured)
    ]


def _products_of(alike: list[dict[str, Any]]) -> Finding:
    """The finding for hosts that have the same entry in the table."""
    topic, way = "matrix products", alike[0]["way"]
    text = f"float32 by {way} ({alike[0]['why']})"
    speeds = [one["onednn_speed"] for one in alike if one["onednn_speed"]]
    if not speeds:
        return Finding(topic, OK, text)
    by_load = {load: statistics.median(speed[load] for speed in speeds) for load in speeds[0]}
    numbers = ", ".join(f"{speed:.2f} ({load})" for load, speed in by_load.items())
    text += f"; here onednn is {numbers} times as fast as torch's own"
    onednn = statistics.geometric_mean(by_load.values())
    other, gain = ("torch", 1 / onednn) if way == "onednn" else ("onednn", onednn)
    if gain <= FASTER:
        return Finding(topic, OK, text)
    remedy = f"train with --precision.matmul {other}, which is {gain:.2f} times as fast here"
    return Finding(topic, WARNING, text, remedy)
