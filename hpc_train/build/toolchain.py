"""Check that a machine can compile. Each error is one line with a remedy.

It uses only the standard library, because set-up runs it before it installs the first package.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

from hpc_train.errors import SetupError

# Compilers and linkers put a place or their name in front of "error: ", pip and setuptools do not.
_OF_A_COMPILER = re.compile(r"\S.*\berror: |CMake Error|undefined reference to|cannot find -l")
# With these lines pip ends after any failure.
_OF_PIP = re.compile(
    r"error: subprocess-exited|ERROR: Fail|note: |ERROR: Could not build wheels|.*pip subprocess "
)


def check_compiler() -> None:
    """Compile and link a line of C++17.

    Raises:
        SetupError: there is no C++ compiler, or it cannot compile C++17.
    """
    compiler = shlex.split(os.environ.get("CXX", "")) or ["c++"]
    if shutil.which(compiler[0]) is None:
        raise SetupError(
            f"no C++ compiler ({compiler[0]})",
            "install g++ (Debian: apt install g++) or load a compiler module, then run this again",
        )
    with tempfile.TemporaryDirectory() as scratch:
        program = [*compiler, "-std=c++17", "-x", "c++", "-", "-o", f"{scratch}/a.out"]
        tried = run_program(
            program, "#include <optional>\nint main() { return *std::optional<int>(0); }\n"
        )
    if tried.returncode:
        raise SetupError(
            f"{compiler[0]} does not compile C++17: {cause_in(tried.stderr)}",
            "use g++ 9 or newer with its standard library (set CXX), then run this again",
        )


def check_headers() -> None:
    """Check that C++ programs can include Python.h.

    Raises:
        SetupError: they cannot.
    """
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        python = f"python{sys.version_info.major}.{sys.version_info.minor}-dev"
        raise SetupError(
            f"the headers of {sys.executable} are missing (no Python.h)",
            f"install them (Debian: apt install {python}) or load a Python module, then retry",
        )


def check_disk(directory: Path, need: int) -> None:
    """Check that a directory's file system has `need` bytes free.

    Raises:
        SetupError: fewer bytes are free.
    """
    free = shutil.disk_usage(directory).free
    if free < need:
        raise SetupError(
            f"{directory} has {free >> 20} MiB free, {need >> 20} MiB are needed",
            "free some space, or set TMPDIR and XDG_CACHE_HOME to a larger disk",
        )


def run_program(
    command: list[str],
    stdin: str = "",
    *,
    cwd: Path | None = None,
    env: dict[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end and capture what it prints. One that cannot start has failed."""
    try:
        return subprocess.run(
            command,
            input=stdin,
            cwd=cwd,
            env=env,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
        )
    except OSError as error:
        return subprocess.CompletedProcess(command, 127, "", f"{command[0]}: {error.strerror}")


def cause_in(text: str) -> str:
    """The line of a failed program's output that is nearest to the cause.

    It is the first error of a compiler, of CMake or of a linker. Without one it is the last line
    that has the word "error", or else the last line; lines with which pip always ends do not count.
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    for at, line in enumerate(lines):
        if _OF_A_COMPILER.search(line):  # CMake tells the place, and then the error
            return " ".join(lines[at : at + 1 + line.startswith("CMake Error at")])
    telling = [line for line in lines if not _OF_PIP.match(line)]
    errors = [line for line in telling if "error" in line.lower()]
    return (errors or telling or lines or ["no output"])[-1]
