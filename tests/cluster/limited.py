"""Run hpc-train with a limit of memory that all ranks of a host share.

    python -m tests.cluster.limited TOKEN LIMIT_MB ARGUMENT ...

The limit is that of a cgroup (version 1), which has the token and the host's name in its name.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from socket import gethostname

MEMORY = Path("/sys/fs/cgroup/memory")


def why_not() -> str:
    """The reason why no limit can be set here; "" if it can."""
    if not (MEMORY / "memory.limit_in_bytes").exists():
        return "needs cgroups of version 1 with the controller memory"
    return "" if os.access(MEMORY, os.W_OK) else "needs root to limit memory"


def group_of(token: str, host: str) -> Path:
    return MEMORY / f"hpc_train-{token}-{host}"


def main() -> int:
    token, limit_mb, *words = sys.argv[1:]
    group = group_of(token, gethostname())
    group.mkdir(exist_ok=True)
    (group / "memory.limit_in_bytes").write_text(str(int(limit_mb) * 10**6))
    (group / "cgroup.procs").write_text("0")  # this process
    sys.argv = ["hpc-train", *words]
    from hpc_train.cli import main as program

    return program()


if __name__ == "__main__":
    sys.exit(main())
