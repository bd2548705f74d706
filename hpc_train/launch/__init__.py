"""From a job (nodes, ranks, time, command) to launcher lines and batch scripts, on login nodes.

hosts.py      which hosts and slots there are: -H, host files, SLURM, PBS, LSF
launchers.py  mpirun, mpiexec, srun or horovodrun, with the ranks bound to cores

The names that options take stand here, so that the help of a verb loads none of these modules.
"""

from __future__ import annotations

from typing import Literal

PROGRAMS = ("srun", "mpiexec", "mpirun", "horovodrun")
Scheduler = Literal["slurm", "pbs", "torque", "mpijob"]
