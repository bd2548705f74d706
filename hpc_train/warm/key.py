"""The key of a fork server: settings that all of its ranks share. Other ranks start cold.

This module, `meeting.py` and `stand_in.py` run in every stand-in. So they import only the standard
library, and little of it.
"""

from __future__ import annotations

import marshal
import os
import sys
import zlib
from collections.abc import Mapping
from typing import Any

# There are three kinds of variables. Libraries read these ones while they are loaded, so the
# variables are part of the server's key: a rank with another value starts cold.
READ_AT_LOAD = (
    *("ATEN_", "CUDA_", "CUBLAS_", "CUDNN_", "DNNL_", "GLIBC_TUNABLES", "GOMP_", "HDF5_", "KMP_"),
    *("LANG", "LC_", "LD_", "MALLOC_", "MKL_", "NPY_", "NUMEXPR_", "OMP_", "ONEDNN_", "OPENBLAS_"),
    *("PYTHON", "PYTORCH_", "TORCH_", "VECLIB_"),
)
# These begin like the ones above, but drivers read them when they are first used, after the fork.
READ_LATER = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER")
# These bind threads to processors when a process loads OpenMP. In a fork, that would be the
# server's processors.
BINDING = ("GOMP_CPU_AFFINITY", "KMP_AFFINITY", "OMP_PLACES", "OMP_PROC_BIND")
# Only the server reads these. All other variables, the launcher's and the user's, are set in the
# fork.
WARM = "HPC_TRAIN_WARM"  # one of OFF, or the name of a server that several starts share
LINGER = "HPC_TRAIN_WARM_LINGER"  # seconds that a server waits for another start
LOAD = "HPC_TRAIN_WARM_LOAD"  # "program", or "libraries" alone
WHY = "HPC_TRAIN_WARM_WHY"  # set: a rank that starts cold prints the reason

OFF = ("off", "0", "no", "false")
SPACES = ("cgroup", "ipc", "mnt", "net", "pid", "user", "uts")


def packed(value: Any) -> bytes:
    """Convert a value to bytes. Equal values give equal bytes, unlike with newer formats."""
    return marshal.dumps(value, 2)


def is_off(environ: Mapping[str, str]) -> bool:
    """Whether every rank starts cold."""
    return environ.get(WARM, "").lower() in OFF


def binding_variable(environ: Mapping[str, str]) -> str:
    """The name of a set variable that binds threads; "" if there is none."""
    found = [name for name in BINDING if environ.get(name, "false").lower() not in ("", "false")]
    return found[0] if found else ""


def key_of(environ: Mapping[str, str]) -> dict[str, Any]:
    """The settings of this process that must be equal in all ranks of one server."""
    prefix = os.path.dirname(os.path.dirname(sys.executable))
    packages = f"{prefix}/lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"
    program = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
    variables = {
        name: value
        for name, value in sorted(environ.items())
        if name.startswith(READ_AT_LOAD) and name not in READ_LATER
    }
    return {
        "variables": variables,
        "interpreter": (prefix, sys.version),
        "packages": os.stat(packages).st_mtime_ns if os.path.exists(packages) else 0,
        "program": zlib.crc32(packed(inodes_of(program))),
        "user": (*os.getresuid(), *os.getresgid(), *sorted(os.getgroups())),
        "spaces": [os.readlink(f"/proc/self/ns/{name}") for name in SPACES],
        "cgroup": text_of("/proc/self/cgroup"),
        "scheduling": os.sched_getscheduler(0),
        "memory policy": _memory_policy(),
        "load": environ.get(LOAD, ""),
    }


def inodes_of(folder: str) -> list[tuple[str, int]]:
    """The files in a folder and below it, with their inodes. A file that is replaced has a new one.

    The times of folders would change when Python first puts its own `__pycache__` there. Times of
    files would take a call for each file.
    """
    found = []
    with os.scandir(folder) as entries:
        for entry in entries:
            if not entry.is_dir(follow_symlinks=False):
                found.append((entry.path, entry.inode()))
            elif entry.name != "__pycache__":
                found += inodes_of(entry.path)
    return sorted(found)


def _memory_policy() -> str:
    """The memory nodes for new pages, which numactl and `srun --mem-bind` set."""
    try:
        with open("/proc/self/numa_maps", encoding="utf-8") as file:
            return file.readline().split()[1]
    except OSError:
        return ""  # the kernel is built without memory nodes


def text_of(path: str) -> str:
    """The text of a small file."""
    with open(path, encoding="utf-8") as file:
        return file.read()


def difference(theirs: bytes, key: bytes) -> str:
    """The names of the settings in which two keys differ."""
    one, other = marshal.loads(theirs), marshal.loads(key)
    return ", ".join(name for name in other if one.get(name) != other[name])
