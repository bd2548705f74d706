"""Prints what is in a container image, as JSON.

The image's Python runs this text, which therefore needs nothing but the standard library. MPI is
loaded and not started, because it may end a process that no launcher started.
"""

from __future__ import annotations

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from importlib import metadata, util
from pathlib import Path


def _package() -> str:
    try:
        import hpc_train
    except ImportError:
        return ""
    return hpc_train.__version__


def _mpi() -> dict[str, str]:
    try:
        import mpi4py

        mpi4py.rc.initialize = False
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        return {"error": " ".join(str(error).split())}
    return {"version": MPI.Get_library_version().strip("\0 \n"), "mpi4py": mpi4py.__version__}


def _torch() -> dict[str, str]:
    """Version and build of torch, which need not be loaded for that."""
    found = util.find_spec("torch")
    if found is None or not found.submodule_search_locations:
        return {}
    written = runpy.run_path(str(Path(found.submodule_search_locations[0], "version.py")))
    names = {"CUDA": "cuda", "ROCm": "hip", "XPU": "xpu"}
    built = [(build, written[name]) for build, name in names.items() if written.get(name)]
    build, version = built[0] if built else ("CPU", "")
    return {"version": metadata.version("torch"), "build": build, "for": str(version)}


def _loaded() -> list[str]:
    """The libraries of MPI and networks that MPI has loaded."""
    maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    return sorted({*re.findall(r"/(lib(?:mpi|mpi_abi|pmi|pmi2|pmix|fabric|ucp)\.so[.\d]*)", maps)})


def _providers() -> list[str] | None:
    """The networks of libfabric; None if the image has no program that tells them."""
    if not shutil.which("fi_info"):
        return None
    done = subprocess.run(
        ["fi_info", "-l"], capture_output=True, text=True, errors="replace", check=False
    )
    return re.findall(r"^(\w+):", done.stdout, re.MULTILINE)


if __name__ == "__main__":
    facts = {
        "python": f"{sys.version.split()[0]} ({sys.executable})",
        "hpc_train": _package(),
        "mpi": _mpi(),
        "loaded": _loaded(),
        "torch": _torch(),
        "glibc": (os.confstr("CS_GNU_LIBC_VERSION") or "").split()[-1:],
        "providers": _providers(),
    }
    print(json.dumps(facts))
