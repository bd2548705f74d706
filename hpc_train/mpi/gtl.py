"""Notice before MPI_Init that Cray's MPI would abort there for lack of its library for GPU memory.

With MPICH_GPU_SUPPORT_ENABLED=1, MPI_Init of Cray MPICH ends a program that has not loaded one of
the libraries libmpi_gtl_*. A program has it if it was linked by Cray's compiler wrapper while the
module of the accelerator was loaded. Sources: the user guides of Polaris, Frontier and LUMI.
"""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Mapping
from pathlib import Path

from hpc_train.errors import SetupError

SWITCH = "MPICH_GPU_SUPPORT_ENABLED"
LONGEST_TEXT = 8192  # MPI_MAX_LIBRARY_VERSION_STRING of MPICH


def check_gtl(environ: Mapping[str, str]) -> None:
    """Check that Cray's MPI finds its library for GPU memory, if it is told to use it.

    Call it before mpi4py.MPI is imported. Nothing is loaded unless the variable is set.

    Raises:
        SetupError: MPI_Init would abort.
    """
    if environ.get(SWITCH) != "1" or not would_abort(loaded_mpi(), memory_map()):
        return
    raise SetupError(
        f"MPI_Init would abort: {SWITCH} is 1, but mpi4py is not linked with Cray's library for "
        "GPU memory (libmpi_gtl)",
        f"unset {SWITCH}, or build mpi4py again with the accelerator's module loaded, such as "
        "craype-accel-amd-gfx90a: docs/how-to/errors.md has the line",
    )


def would_abort(version: str, maps: str) -> bool:
    """Whether MPI_Init of a library aborts if it is to support GPU memory.

    Args:
        version: what MPI_Get_library_version says.
        maps: the memory map of the process, as in /proc/self/maps.
    """
    return "CRAY MPICH" in version.upper() and "libmpi_gtl" not in maps


def loaded_mpi() -> str:
    """Load mpi4py's MPI library without starting MPI; returns its version, "" if there is none."""
    try:
        extension = importlib.util.find_spec("mpi4py.MPI")
        if extension is None or extension.origin is None:
            return ""
        library = ctypes.CDLL(extension.origin)
        text, length = ctypes.create_string_buffer(LONGEST_TEXT), ctypes.c_int()
        library.MPI_Get_library_version(text, ctypes.byref(length))  # allowed before MPI_Init
    except (ImportError, OSError, RuntimeError, AttributeError):  # the import of mpi4py tells why
        return ""
    return text.value.decode(errors="replace")


def memory_map() -> str:
    """The libraries that this process has loaded, among all that it has in memory."""
    return Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
