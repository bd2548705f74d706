"""Checks of a container image against this host, before ranks of a job run in it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpc_train import __version__
from hpc_train.cli.doctor.findings import ERROR, OK, WARNING, Finding, runs
from hpc_train.cli.doctor.probe import chosen_launcher, why_it_failed
from hpc_train.errors import HpcTrainError
from hpc_train.host.programs import output
from hpc_train.mpi.gpus import Gpus, count_gpus

if TYPE_CHECKING:
    from hpc_train.launch.containers import Container
    from hpc_train.launch.launchers import FoundLauncher

FACTS_SECONDS = 300.0  # a tool may unpack the image first
SLOW_START = 10.0  # seconds from which on the start of a container is worth a warning
PAIR_SECONDS = 60.0  # for two ranks, besides the start of their containers
FAST_NETWORKS = ("cxi", "verbs", "efa", "psm2", "psm3", "opx", "gni")  # providers of libfabric
NETWORK_DEVICES = ("class/infiniband", "class/cxi", "class/hfi1")  # below /sys
OPEN_MPI, MPICH = "Open MPI", "MPICH"
# Open MPI and MPICH find their ranks in different ways, and neither replaces the other's library.
STARTS = {
    "open_mpi": OPEN_MPI,
    "horovodrun": OPEN_MPI,
    "hydra": MPICH,
    "intel_mpi": MPICH,
    "pals": MPICH,
}
PAIR = """import sys
from hpc_train.errors import HpcTrainError, print_error
from hpc_train.mpi.runtime import start_runtime
try:
    world = start_runtime().world
except HpcTrainError as error:
    print_error(error)
    sys.exit(error.exit_code)
print("started", world.size, flush=True)
if world.size == 2:
    message = bytearray(8 << 20)
    for sender in (0, 1):
        if world.rank == sender:
            world.comm.Send(message, 1 - sender)
        else:
            world.comm.Recv(message, sender)
    print("received", flush=True)
"""


def examine_image(
    image: str, tool: str | None, options: Sequence[str], launcher: str | None
) -> list[Finding]:
    """Check an image, and start two ranks in it by this host's launcher.

    Args:
        image: the image, as the user names it.
        tool: the tool that runs it, or None.
        options: texts with further words for the tool.
        launcher: the launcher's program; None takes the one that `hpc-train launch` would take.
    """
    from hpc_train.launch import containers

    gpus = count_gpus(Path("/"), os.environ)
    try:
        found = chosen_launcher(launcher)
        seen = containers.seen_paths([Path.cwd()])
        container = containers.container_for(image, tool, options, seen)
    except HpcTrainError as error:
        return [Finding("image", ERROR, error.cause, error.remedy)]
    version = (
        output(container.tool, "--version", timeout=20, errors=True).strip().partition("\n")[0]
    )
    findings = [
        Finding("launcher", OK, f"{found.kind} ({found.version})"),
        Finding("tool", OK, version or container.tool),
    ]
    begun = time.monotonic()
    try:
        facts = _facts(container)
    except HpcTrainError as error:
        return [*findings, Finding("image", ERROR, error.cause, error.remedy)]
    seconds = time.monotonic() - begun
    findings += [_start(container, seconds), package(facts), mpi_inside(facts, found)]
    findings += [torch_inside(facts, gpus), glibc(facts, gpus), *network(facts, Path("/sys"))]
    findings += host_python(os.environ)
    if runs(findings):
        findings.append(two_ranks(container, found, PAIR_SECONDS + 2 * seconds))
    return findings


def _facts(container: Container) -> dict[str, Any]:
    """What `inside.py` prints in the image.

    Raises:
        HpcTrainError: the image has no Python, or the tool does not run it.
    """
    from hpc_train.launch.containers import PYTHON

    text = Path(__file__).with_name("inside.py").read_text(encoding="utf-8")
    code, out, err = _output(container.command([PYTHON, "-c", text], 1), {}, FACTS_SECONDS)
    with suppress(ValueError, IndexError):
        facts: dict[str, Any] = json.loads(out.splitlines()[-1])
        return facts
    said = f"no answer within {FACTS_SECONDS:.0f} s"
    if code is not None:
        said = why_it_failed(code, err.strip().splitlines())
    raise HpcTrainError(
        f"{container.tool} does not run {PYTHON} in {container.image}: {said}",
        "an image needs Python, hpc_train and mpi4py: try "
        f"`{container.tool} exec {container.image} {PYTHON} --version`",
    )


def _output(
    words: Sequence[str], environ: Mapping[str, str], seconds: float
) -> tuple[int | None, str, str]:
    """Exit code and both outputs of a program; the code is None if it was ended after the time."""
    with subprocess.Popen(
        words,
        env={**os.environ, **environ},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:
        try:
            out, err = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            process.terminate()  # a launcher ends its ranks then
            with suppress(subprocess.TimeoutExpired):
                process.wait(5.0)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            return None, *process.communicate()
    return process.returncode, out, err


def _start(container: Container, seconds: float) -> Finding:
    text = f"{container.image}, in which Python starts in {seconds:.1f} s"
    if seconds < SLOW_START:
        return Finding("image", OK, text)
    remedy = "if the tool unpacks the image at each start, ask for squashfuse, or use a folder"
    return Finding("image", WARNING, text, remedy)


def package(facts: Mapping[str, Any]) -> Finding:
    """Check that hpc_train is in the image, in the version of this host."""
    inside = facts["hpc_train"]
    text = f"{inside}, Python {facts['python']}"
    if not inside:
        text, remedy = (
            f"not in the image (Python {facts['python']})",
            "`pip install hpc_train` in it",
        )
        return Finding("hpc_train", ERROR, text, remedy)
    if inside != __version__:
        remedy = "install the same version in both"
        return Finding("hpc_train", WARNING, f"{text}, and {__version__} on this host", remedy)
    return Finding("hpc_train", OK, text)


def mpi_inside(facts: Mapping[str, Any], launcher: FoundLauncher) -> Finding:
    """Check that the launcher starts ranks of the image's MPI, so that they find each other."""
    if error := facts["mpi"].get("error"):
        remedy = "install mpi4py in the image, for an MPI of the launcher's kind"
        return Finding("MPI", ERROR, f"mpi4py does not load in the image: {error}", remedy)
    first = re.split(r"[,\n]", facts["mpi"]["version"])[0].replace("Version:", "")
    text = f"{' '.join(first.split())}, mpi4py {facts['mpi']['mpi4py']}"
    text += f", {', '.join(facts['loaded'])}" if facts["loaded"] else ""
    kind = OPEN_MPI if facts["mpi"]["version"].startswith(OPEN_MPI) else MPICH
    starts = STARTS.get(launcher.kind, kind)
    if starts != kind:
        remedy = f"take an image with {starts}, or a launcher of {kind} by --launcher"
        return Finding("MPI", ERROR, f"{text}; {launcher.version} starts ranks of {starts}", remedy)
    if launcher.kind == "srun" and (missing := _not_offered(kind)):
        return Finding("MPI", ERROR, f"{text}; {missing}", "use --launcher mpirun")
    return Finding("MPI", OK, text)


def _not_offered(kind: str) -> str:
    """What is missing if srun has no plugin for an MPI; "" if it has one."""
    from hpc_train.launch.launchers import PLUGINS

    offered = re.findall(r"\w+", output("srun", "--mpi=list", timeout=20, errors=True))
    needed = PLUGINS["open_mpi" if kind == OPEN_MPI else "hydra"]
    if {*needed} & {*offered}:
        return ""
    return f"srun offers {', '.join(offered) or 'nothing'}, and it needs {' or '.join(needed)}"


def torch_inside(facts: Mapping[str, Any], gpus: Gpus) -> Finding:
    """Check that torch is in the image, and is built for this host's GPUs."""
    torch = facts["torch"]
    if not torch:
        return Finding("torch", ERROR, "not in the image", "`pip install torch` in it")
    text = f"{torch['version']} for {torch['build']} {torch['for']}".rstrip()
    if gpus.count and torch["build"] != gpus.vendor.build:
        text += f", and this host has {gpus.count} {gpus.vendor.name} GPUs"
        return Finding(
            "torch", WARNING, text, f"install torch for {gpus.vendor.build} in the image"
        )
    if not gpus.count and torch["build"] != "CPU":
        text += "; this host has no GPU to try it on"
    return Finding("torch", OK, text)


def glibc(facts: Mapping[str, Any], gpus: Gpus) -> Finding:
    """Check the image's C library, with which the host's drivers of GPUs are loaded."""
    inside, here = facts["glibc"], (os.confstr("CS_GNU_LIBC_VERSION") or "").split()[-1:]
    text = (
        f"{''.join(inside) or 'another C library'} ({''.join(here) or 'another one'} on this host)"
    )
    numbers = [[int(n) for n in "".join(one).split(".") if n.isdigit()] for one in (inside, here)]
    if gpus.count and numbers[0] < numbers[1]:
        remedy = "take an image of a newer system if a library of the GPUs does not load"
        return Finding("glibc", WARNING, f"{text}: the host's drivers may need a newer one", remedy)
    return Finding("glibc", OK, text)


def network(facts: Mapping[str, Any], sys_folder: Path) -> list[Finding]:
    """Check that libfabric in the image has a provider for the host's fast network."""
    providers = facts["providers"]
    if providers is None:
        return []
    here = [path.name for name in NETWORK_DEVICES for path in (sys_folder / name).glob("*")]
    text = f"libfabric has {', '.join(providers) or 'nothing'}"
    if here and not {*providers} & {*FAST_NETWORKS}:
        remedy = "bind the host's libfabric: the site's documentation of containers has its paths"
        return [Finding("network", WARNING, f"{text}, and this host has {here[0]}: slow", remedy)]
    return [Finding("network", OK, text)]


def host_python(environ: Mapping[str, str]) -> list[Finding]:
    """Warn of variables of the host's Python, which the image's Python reads, too."""
    found = [name for name in ("PYTHONHOME", "PYTHONPATH") if environ.get(name)]
    if not found:
        return []
    text = f"{found[0]} is {environ[found[0]]} here, and the image's Python may get it"
    return [Finding("variables", WARNING, text, f"unset {found[0]} in the job")]


def two_ranks(container: Container, launcher: FoundLauncher, seconds: float) -> Finding:
    """Start two ranks in the image, which send each other a message of 8 MiB.

    Args:
        container: the image.
        launcher: what starts them.
        seconds: seconds in which they have to end.
    """
    from hpc_train.launch.containers import PYTHON
    from hpc_train.launch.lines import LaunchedJob

    line = launcher.make(LaunchedJob([PYTHON, "-c", PAIR], 2, container=container))
    code, out, err = _output(line.words, line.environ, seconds)
    topic, lines = "two ranks", [*out.splitlines(), *err.splitlines()]
    if out.count("started 1") and not out.count("started 2"):
        text = "each rank is alone: they do not find each other"
        remedy = "take an image whose MPI is of the launcher's kind, and that knows its PMI or PMIx"
        return Finding(topic, ERROR, text, remedy)
    if code is None and "started" in out:
        text = f"a message of 8 MiB between two ranks did not arrive within {seconds:.0f} s"
        remedy = "docs/how-to/containers.md says how MPI is told not to copy between containers"
        return Finding(topic, ERROR, text, remedy)
    if code is None:
        text = f"two ranks did not start within {seconds:.0f} s"
        return Finding(
            topic, ERROR, text, f"try `hpc-train launch -np 2 --image {container.image}`"
        )
    if code or out.count("received") < 2:
        text = f"two ranks failed: {why_it_failed(code, lines)}"
        return Finding(topic, ERROR, text, "docs/how-to/errors.md has known errors by their text")
    return Finding(topic, OK, "they found each other, and a message of 8 MiB passed each way")
