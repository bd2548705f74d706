"""Starts jobs: makes launcher lines and batch scripts on login nodes, and supervises running jobs.

command.py    `hpc-train launch`: from its options to a launcher line, or a supervised job
hosts.py      the hosts of a job and their slots: -H, host files, SLURM, PBS, LSF
lines.py      the line of each launcher, with the ranks bound to cores; launchers.py finds one
site_line.py  lines that a site gives, with the numbers and hosts of each attempt
supervise.py  restarts a job when it fails; attempt.py, cause.py, contact.py, left_behind.py and
              warm_start.py serve it
submit.py     `hpc-train submit`: request.py checks its options, sites.py reads the site's profile,
              compose.py makes a batch job of both (batch.py, resources.py), templates.py writes
              its script; staged.py has the job copy its environment to its nodes first
containers.py the words that run each rank's command in an image; image.py makes a batch job of it
schedulers/   what differs between schedulers, a module for each
queued.py     the jobs of a run: records them, asks the scheduler about them, removes them;
              status.py shows them and their logs, with recent.py and alive.py; status_tree.py
              does it for programs; cancel.py stops a run for good, and profile_request.py asks
              its job for a profile
protocol.py   the files and variables by which launcher, script and job talk

The values of options are defined here, so that a verb's help loads none of these modules.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal, get_args

PROGRAMS = ("srun", "mpiexec", "mpirun", "flux", "jsrun", "horovodrun")
ImageTool = Literal["apptainer", "singularity", "podman-hpc", "shifter", "enroot"]
IMAGE_TOOLS: tuple[ImageTool, ...] = get_args(ImageTool)
SchedulerName = Literal["slurm", "pbs", "torque", "lsf", "flux", "mpijob", "local"]
TEMPLATES = Path(__file__).parents[1] / "jobscripts"
