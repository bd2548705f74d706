"""Runs a job's script with stand-ins for the scheduler's commands."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path

from hpc_train.launch.batch import BatchJob, text
from hpc_train.launch.resources import Resources
from tests.waiting import PATIENCE

PLAIN = BatchJob(
    scheduler="slurm",
    name="my",
    resources=Resources(4, 2, 3, 7200, account="project1", queue="long"),
    command=["hpc-train", "train", "my.yaml", "--run.steps", "100"],
    run_dir="runs/my",
    launcher=["hpc-train", "launch", "--max_restarts", "3", "--"],
    script="/home/me/runs/my/job.sh",
    setup=["module load python openmpi"],
)
# Questions are answered with a file, as a job's state changes. A word in the file `how` says how
# commands behave: well, or as those of a scheduler in trouble do.
COMMAND = """#!/bin/bash
cd {folder}
case "{name} $*" in
    "scontrol show hostnames"* | squeue* | *getattr* | *timeleft*) exit ;;
    *"job id"*) echo "${{@: -1}}"; exit ;;
    "scontrol show"* | qstat* | bjobs* | *eventlog*) kind=ask ;;
    qdel*) echo "{name} $*" >> told; rmdir new; exit ;;
    *) kind=queue ;;
esac
[ $kind = ask ] || echo "{name} $* queued=$HPC_TRAIN_QUEUED" >> told
[ $kind = queue ] || echo "{name} $*" >> asked
case "$kind $(cat how 2>/dev/null)" in
    *" hanging") exec sleep 60 ;;
    "queue slow") touch queueing; sleep 0.5 ;;
    "queue unanswered") sed -i s/Restarts=0/Restarts=1/ answer; exit 1 ;;
    *" failing") echo 'unable to contact the controller' | tee /dev/stderr; exit 1 ;;
    "ask late") sleep 3 ;;
esac
if [ $kind = ask ]; then cat answer; exit; fi
if [ {name} = scontrol ]; then mkdir pending; exit; fi
for last; do :; done
[ {name} != qsub ] || cp "$last" again.sh
[ {name} != bsub ] || cat >again.sh
mkdir new || exit
case {name} in
    bsub) echo "Job <8> is submitted to queue <q>." ;;
    *) cat banner 2>/dev/null; echo 8; cat banner 2>/dev/null; true ;;
esac
"""
RUNNING = "JobId=7 JobName=my JobState=RUNNING Reason=None Requeue=1 Restarts=0 PreemptTime=None"
ANSWER = {
    "slurm": RUNNING,
    "pbs": "Job Id: 7.x\n    Job_Name = my\n    job_state = R\n    substate = 42",
    "lsf": "RUN",
    "flux": "[Mar16 08:09] submit userid=1001\n[  +0.1] start",
}
NAMES = {
    "slurm": ("sbatch", "scontrol", "squeue"),
    "pbs": ("qsub", "qstat", "qdel"),
    "lsf": ("bsub", "bjobs"),
    "flux": ("flux",),
}
ARRAYS = {"slurm": "SLURM_ARRAY_TASK_ID", "pbs": "PBS_ARRAY_INDEX", "lsf": "LSB_JOBINDEX"}
# What a training does: it takes the signal, saves, and stops.
SAVES = (
    "trap 'sleep {seconds}; mkdir -p run/checkpoints; touch run/checkpoints/step-1.safetensors;"
    " echo saved; exit 75' USR1; trap '' TERM; echo ready; while :; do sleep 0.02; done"
)


class Shell:
    """Runs a script with a scheduler's commands that write down how they are called."""

    def __init__(self, folder: Path, scheduler: str) -> None:
        self.folder, self.scheduler = folder, scheduler
        (folder / "bin").mkdir()
        self.names = NAMES[scheduler]
        for name in self.names:
            path = folder / "bin" / name
            path.write_text(COMMAND.format(folder=folder, name=name))
            path.chmod(0o755)
        self.answer(ANSWER[scheduler])
        (folder / "nodes").write_text("node1\nnode1\nnode2\nnode2\n")
        self.environ = {
            "PATH": f"{folder}/bin:{os.environ['PATH']}",
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NUM_NODES": "2",
            "SLURM_JOB_NODELIST": "node[1-2]",
            "PBS_JOBID": "7.x",
            "PBS_NODEFILE": f"{folder}/nodes",
            "LSB_JOBID": "7",
            "LSB_MCPU_HOSTS": "node1 2 node2 2",
            "FLUX_ENCLOSING_ID": "7",
        }

    def answer(self, text: str) -> None:
        """What the scheduler says of the job from now on."""
        (self.folder / "new-answer").write_text(text + "\n")
        (self.folder / "new-answer").replace(self.folder / "answer")

    def how(self, word: str) -> None:
        """How the scheduler's commands behave: well, failing, hanging, late, absent."""
        (self.folder / "how").write_text(word)
        if word == "absent":
            for name in self.names:
                (self.folder / "bin" / name).unlink()

    def walltime(self) -> None:
        """Write into the job's output what PBS writes there when it ends the job."""
        with (self.folder / "errors").open("a") as errors:
            errors.write("=>> PBS: job killed: walltime 61 exceeded limit 60\n")

    def script(self, start: str, patience: str = "5", **fields) -> Path:
        """The script of a job whose launcher is a line of bash."""
        asked = PLAIN.resources
        if "seconds" in fields:
            asked = replace(asked, seconds=fields.pop("seconds"))
        values = {
            "run_dir": "run",
            "setup": [],
            "command": ["it"],
            "requeue_by": "submit",
            "resources": asked,
            **fields,
        }
        path = self.folder / "job.sh"
        batch = replace(PLAIN, scheduler=self.scheduler, script=str(path), **values)
        made = text(replace(batch, launcher=["bash", "-c", start]))
        made = made.replace("undisturbed 60 ", "undisturbed 1 ").replace("_copies 10", "_copies 1")
        path.write_text(made.replace("undisturbed 5 ", f"undisturbed {patience} "))
        return path

    def run(self, start: str, environ=None, **fields):
        """Run a script to its end."""
        path = self.script(start, **fields)
        return subprocess.run(
            ["bash", str(path)],
            cwd=self.folder,
            env=self.environ | (environ or {}),
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )

    def start(self, program: str, environ=None, **fields) -> subprocess.Popen[str]:
        """Start a script and wait until its program is ready."""
        script = str(self.script(program, **fields))
        with (self.folder / "errors").open("a") as errors:
            process = subprocess.Popen(
                ["bash", script],
                cwd=self.folder,
                env=self.environ | (environ or {}),
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                process_group=0,
            )
        for line in process.stdout:
            if line == "ready\n":
                return process
        raise AssertionError("the program has not started")

    @property
    def calls(self) -> list[str]:
        """The commands that were to queue something."""
        told = self.folder / "told"
        return told.read_text().splitlines() if told.exists() else []

    @property
    def records(self) -> list[dict]:
        """The lines of jobs.jsonl."""
        path = self.folder / "run/jobs.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
