"""What ranks of one fork server have in common; a rank of another key starts cold.

This and its neighbours `meeting.py` and `stand_in.py` run in every stand-in. So they import the
standard library alone, and little of it.
"""

from __future__ import annotations

import marshal
import os
import sys
from collections.abc import Mapping
from typing import Any

# Variables are of three kinds. These are read by libraries while they are loaded, so they are part
# of the server's key: a rank with another value starts cold.
READ_AT_LOAD = (
    *("ATEN_", "CUDA_", "CUBLAS_", "CUDNN_", "DNNL_", "GLIBC_TUNABLES", "GOMP_", "HDF5_", "KMP_"),
    *("LANG", "LC_", "LD_", "MALLOC_", "MKL_", "NPY_", "NUMEXPR_", "OMP_", "ONEDNN_", "OPENBLAS_"),
    *("PYTHON", "PYTORCH_", "TORCH_", "VECLIB_"),
)
# Of those, drivers read these when they are first used, which is after the fork.
READ_LATER = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER")
# These bind threads to the processors that a process may use when it loads OpenMP; in a fork, that
# would be the server's.
BINDING = ("GOMP_CPU_AFFINITY", "KMP_AFFINITY", "OMP_PLACES", "OMP_PROC_BIND")
# These are for the server alone.
# All others, the launcher's and the user's own, are set in the fork.
WARM = "HPC_TRAIN_WARM"  # one of OFF, or the name of the server that several starts share
LINGER = "HPC_TRAIN_WARM_LINGER"  # seconds that a server waits for another start
LOAD = "HPC_TRAIN_WARM_LOAD"  # "program", or "libraries" alone
WHY = "HPC_TRAIN_WARM_WHY"  # set: a rank that starts cold prints the reason

OFF = ("off", "0", "no", "false")
SPACES = ("cgroup", "ipc", "mnt", "net", "pid", "user", "uts")


def packed(value: Any) -> bytes:
    """A value as bytes: equal values give equal ones, which newer formats do not promise."""
    return marshal.dumps(value, 2)


def is_off(environ: Mapping[str, str]) -> bool:
    """Whether every rank starts cold."""
    return environ.get(WARM, "").lower() in OFF


def binding_variable(environ: Mapping[str, str]) -> str:
    """A variable that binds threads; "" if there is none."""
    found = [name for name in BINDING if environ.get(name, "false").lower() not in ("", "false")]
    return found[0] if found else ""


def key_of(environ: Mapping[str, str]) -> dict[str, Any]:
    """What ranks of one server have in common."""
    prefix = os.path.dirname(os.path.dirname(sys.executable))
    packages = [f"{prefix}/lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"]
    packages += _folders(os.path.dirname(os.path.dirname(os.path.realpath(__file__))))
    variables = {
        name: value
        for name, value in sorted(environ.items())
        if name.startswith(READ_AT_LOAD) and name not in READ_LATER
    }
    return {
        "variables": variables,
        "interpreter": (prefix, sys.version),
        "packages": [
            (name, os.stat(name).st_mtime_ns) for name in packages if os.path.exists(name)
        ],
        "user": (*os.getresuid(), *os.getresgid(), *sorted(os.getgroups())),
        "spaces": [os.readlink(f"/proc/self/ns/{name}") for name in SPACES],
        "cgroup": text_of("/proc/self/cgroup"),
        "scheduling": os.sched_getscheduler(0),
        "memory policy": _memory_policy(),
        "load": environ.get(LOAD, ""),
    }


def _folders(folder: str) -> list[str]:
    """The folders of this package, whose times change with the files that are put into them."""
    with os.scandir(folder) as entries:
        inside = [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]
    return sorted([folder, *(path for path in inside if not path.endswith("__pycache__"))])


def _memory_policy() -> str:
    """On which memory nodes pages are put, as numactl and `srun --mem-bind` set it."""
    try:
        with open("/proc/self/numa_maps") as file:
            return file.readline().split()[1]
    except OSError:
        return ""  # the kernel knows no memory nodes


def text_of(path: str) -> str:
    """What a small file says."""
    with open(path) as file:
        return file.read()


def difference(theirs: bytes, key: bytes) -> str:
    """In what two keys differ."""
    one, other = marshal.loads(theirs), marshal.loads(key)
    return ", ".join(name for name in other if one.get(name) != other[name])
