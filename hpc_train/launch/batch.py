"""Write batch scripts: the values of a job are put into the templates of jobscripts/.

The templates are scripts that can also be used by hand. Between `#% if by_hand` and `#% endif` they
have the values of an example. This module replaces these parts by a job's directives and settings.
No value can run a command: settings are quoted by `shlex`. Directives, which schedulers read by
rules of their own, may have a few kinds of characters only.

Sources: sbatch(1) of Slurm 22.05, qsub(1B) of OpenPBS 23, Torque's manual, mpi-operator v2beta1.
"""

from __future__ import annotations

import functools
import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import jinja2
import yaml

from hpc_train.config.durations import format_duration
from hpc_train.errors import UserError
from hpc_train.launch import Scheduler

TEMPLATES = Path(__file__).parents[1] / "jobscripts"
USED = {  # the scheduler's commands that the scripts call
    "slurm": ("sbatch", "scontrol", "squeue"),
    "pbs": ("qsub", "qstat"),
    "torque": ("qsub", "qstat"),
}
SHORT = 600  # seconds; SLURM sends a signal up to 60 s early, in shorter jobs perhaps at the start


@dataclass(frozen=True)
class BatchJob:
    """A batch job.

    Args:
        scheduler: the scheduler that reads the script.
        name: job name.
        nodes: number of nodes.
        ranks_per_node: ranks on each node.
        threads: cores of each rank.
        seconds: time limit in seconds; an MPIJob has none.
        command: the command of each rank.
        run_dir: run directory; a file STOP in it ends the run.
        launcher: the launcher's line, which stands before the command.
        script: absolute path that the script will have.
        requeue_by: how the job is queued again when it has stopped early.
        max_requeues: maximum number of requeues.
        account: account that pays; "" is the site's default.
        account_option: the option by which PBS is given the account.
        queue: queue or partition; "" is the site's default.
        queue_option: the option by which SLURM is given the queue.
        resources: resources for PBS, instead of the usual nodes and ranks.
        of_each_node: what the usual resources of PBS also have for each node, such as ":ngpus=4".
        directives: further directives, as the scheduler spells them.
        environ: variables for the job.
        setup: shell lines that load modules, each a command by itself. They are not quoted, because
            the user wrote them. The job ends if one of them fails.
        sweep: for each task of an array, the arguments that it adds to the command. Each task has a
            run directory of its own.
        image: container image, for mpijob.
        commands: paths of the scheduler's commands, by name, as `find_commands` gives them.
    """

    scheduler: Scheduler
    name: str
    nodes: int
    ranks_per_node: int
    threads: int
    seconds: int
    command: Sequence[str]
    run_dir: str
    launcher: Sequence[str]
    script: str
    requeue_by: Literal["requeue", "submit", "never"] = "requeue"
    max_requeues: int = 50
    account: str = ""
    account_option: str = "-A"
    queue: str = ""
    queue_option: str = "--partition"
    resources: str = ""
    of_each_node: str = ""
    directives: Sequence[str] = ()
    environ: Mapping[str, str] = field(default_factory=dict)
    setup: Sequence[str] = ()
    sweep: Sequence[Sequence[str]] = ()
    image: str = ""
    commands: Mapping[str, str] = field(default_factory=dict)

    @property
    def ranks(self) -> int:
        """Ranks of all nodes."""
        return self.nodes * self.ranks_per_node

    @property
    def survives(self) -> bool:
        """Whether the job goes on without a node that fails: `hpc-train launch` starts it."""
        words = {Path(word).name for word in self.launcher}
        return "launch" in words and not words.isdisjoint(("hpc-train", "hpc_train"))


def find_commands(scheduler: Scheduler) -> dict[str, str]:
    """Paths here of the commands that a job's script calls. A job's PATH may lack them."""
    found = {name: shutil.which(name) for name in USED.get(scheduler, ())}
    return {name: path for name, path in found.items() if path}


def text(batch: BatchJob) -> str:
    """The script, or the manifest, of a batch job.

    Raises:
        UserError: a value has characters that a directive cannot have.
    """
    if batch.scheduler == "mpijob":
        return _mpijob(batch)
    lines = _slurm(batch) if batch.scheduler == "slurm" else _pbs(batch)
    sign = "#SBATCH" if batch.scheduler == "slurm" else "#PBS"
    return _filled(
        "slurm.sh" if batch.scheduler == "slurm" else "pbs.sh",
        "\n".join(f"{sign} {_checked(line)}" for line in [*lines, *batch.directives]),
        _settings(batch),
    )


def _filled(name: str, directives: str, settings: str) -> str:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        line_statement_prefix="#%",
        variable_start_string="#=",
        variable_end_string="=#",
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
        autoescape=False,  # a shell script: values have been quoted for it
    )
    values = {"by_hand": False, "directives": directives, "settings": settings}
    return environment.get_template(name).render(values)


def _checked(line: str) -> str:
    """Return a directive whose characters mean nothing to a shell or a scheduler; refuse others.

    % stands for numbers in names of output files, @ for a time, [ ] in arrays and node lists.
    """
    if not re.fullmatch(r"[\w .,:;=@%+/~^&|*\[\]()-]+", line, re.ASCII):
        raise UserError(
            f"{line!r} cannot be a directive of a batch script",
            "use letters, digits and . , : = @ % + / - _ only",
        )
    return line


def _word(what: str, value: str) -> str:
    """Return a value of a directive if it is a single word; refuse others."""
    if not re.fullmatch(r"[\w.,:=@%+/~^|*\[\]-]+", value, re.ASCII):
        raise UserError(
            f"{what} {value!r} cannot be used in a batch script",
            "use letters, digits and . , : = @ % + / - _ only, without spaces",
        )
    return value


def _slurm(batch: BatchJob) -> list[str]:
    output = f"{batch.run_dir}/%x-%j.out" if not batch.sweep else f"{batch.run_dir}/%x-%A_%a.out"
    lines = [
        f"--job-name={_word('the name', batch.name)}",
        f"--nodes={batch.nodes}",
        f"--ntasks-per-node={batch.ranks_per_node}",
        f"--cpus-per-task={batch.threads}",
        f"--time={format_duration(batch.seconds)}",
        f"--output={_word('run.dir', output)}",
        "--open-mode=append",
        "--requeue",
    ]
    if batch.survives:
        lines.append("--no-kill")
    if batch.seconds >= SHORT:
        lines.append(f"--signal=B:USR1@{min(300, batch.seconds // 10)}")
    if batch.account:
        lines.append(f"--account={_word('--account', batch.account)}")
    if batch.queue:
        lines.append(f"{batch.queue_option}={_word('--queue', batch.queue)}")
    if batch.sweep:
        lines.append(f"--array=0-{len(batch.sweep) - 1}")
    return lines


def _pbs(batch: BatchJob) -> list[str]:
    cores, ranks = batch.ranks_per_node * batch.threads, batch.ranks_per_node
    if batch.scheduler == "pbs":
        usual = f"select={batch.nodes}:ncpus={cores}:mpiprocs={ranks}:ompthreads={batch.threads}"
    else:
        usual = f"nodes={batch.nodes}:ppn={cores}"
    lines = [
        f"-N {_word('the name', batch.name)}",
        f"-l {batch.resources or usual + batch.of_each_node}",
        f"-l walltime={format_duration(batch.seconds)}",
        f"-o {_word('run.dir', batch.run_dir)}/",
        "-j oe",
        "-r y",
    ]
    if batch.account:
        lines.append(f"{batch.account_option} {_word('--account', batch.account)}")
    if batch.queue:
        lines.append(f"-q {_word('--queue', batch.queue)}")
    if batch.sweep:
        array = "-J" if batch.scheduler == "pbs" else "-t"
        lines.append(f"{array} 0-{len(batch.sweep) - 1}")
    return lines


def _settings(batch: BatchJob) -> str:
    lines = [
        f"run_dir={shlex.quote(batch.run_dir)}",
        "all=$run_dir",
        f"command=({_array(batch.command)})",
        f"launcher=({_array(batch.launcher)})",
        f"requeue_by={batch.requeue_by}",
        f"max_requeues={batch.max_requeues}",
        f"script={shlex.quote(batch.script)}",
    ]
    for name in USED[batch.scheduler]:
        path = shlex.quote(batch.commands.get(name, name))
        lines.append(f"{name}={path}" if "'" in path else f"{name}='{path}'")
    if batch.scheduler == "slurm":
        lines.append(f"no_kill={'yes' if batch.survives else ''}")
    else:
        lines.append(f"walltime={batch.seconds}")
    lines += [f"export {_name(key)}={shlex.quote(value)}" for key, value in batch.environ.items()]
    if "OMP_NUM_THREADS" not in batch.environ and batch.scheduler != "slurm":
        lines.append(f"export OMP_NUM_THREADS={batch.threads}")
    lines += ["setup() {", *_checked_setup(tuple(batch.setup)), "}"]
    lines += _tasks(batch) if batch.sweep else ["task="]
    return "\n".join(lines)


def _is_comment(line: str) -> bool:
    return not line.strip() or line.lstrip().startswith("#")


@functools.cache
def _checked_setup(setup: tuple[str, ...]) -> list[str]:
    """The lines of the function `setup`, which returns when one of them fails.

    Raises:
        UserError: a line is no command by itself.
    """
    lines = []
    for line in setup:
        if _is_comment(line):
            lines.append(f"    {line}")
            continue
        plain = f"    {line} || return"
        # A comment would hide `|| return`, and & or ; cannot stand before it.
        braces = f"    {{\n        {line}\n    }} || return"
        form = braces if re.search(r"#|[&;]\s*$", line) else plain
        if subprocess.run(
            ["/bin/bash", "-n", "-c", form], capture_output=True, check=False
        ).returncode:
            raise UserError(
                f"the setup line {line!r} is no command by itself",
                "write a command of several lines as one, such as `if a; then b; fi`",
            )
        lines.append(form)
    return [*lines, "    :"] if all(map(_is_comment, setup)) else lines


def _array(words: Sequence[str]) -> str:
    """The words of a bash array, quoted. shellcheck takes an unquoted comma for a mistake."""
    quoted = [shlex.quote(word) for word in words]
    return " ".join(f"'{word}'" if "," in word and word[0] != "'" else word for word in quoted)


def _name(variable: str) -> str:
    if not re.fullmatch(r"[A-Za-z_]\w*", variable, re.ASCII):
        raise UserError(f"{variable!r} cannot be a variable", "use letters, digits and _ only")
    return variable


def _tasks(batch: BatchJob) -> list[str]:
    """Shell lines that give each task of an array its arguments and its run directory."""
    variable = "SLURM_ARRAY_TASK_ID" if batch.scheduler == "slurm" else "PBS_ARRAY_INDEX"
    if batch.scheduler == "torque":
        variable = "PBS_ARRAYID"
    lines = [f"task=${{HPC_TRAIN_TASK:-${variable}}}", 'case "$task" in']
    for number, words in enumerate(batch.sweep):
        lines.append(f"    {number}) command+=({_array(words)}) ;;")
    return [*lines, "esac", 'run_dir+="/task-$task"', 'command+=(--run.dir "$run_dir")']


def _mpijob(batch: BatchJob) -> str:
    if not re.fullmatch("[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", batch.name):
        raise UserError(
            f"the name {batch.name!r} is not allowed by Kubernetes",
            "give --name with lower-case letters, digits and - only",
        )
    tree: dict[str, Any] = yaml.safe_load((TEMPLATES / "mpijob.yaml").read_text())
    tree["metadata"]["name"] = batch.name
    spec = tree["spec"]
    spec["slotsPerWorker"] = int(batch.ranks_per_node)
    spec["runPolicy"]["backoffLimit"] = int(batch.max_requeues)
    launcher, worker = (spec["mpiReplicaSpecs"][role] for role in ("Launcher", "Worker"))
    worker["replicas"] = int(batch.nodes)
    variables = [{"name": name, "value": value} for name, value in batch.environ.items()]
    for role in (launcher, worker):
        container = role["template"]["spec"]["containers"][0]
        container["image"] = batch.image
        container |= {"env": variables} if variables else {}
    container = launcher["template"]["spec"]["containers"][0]
    container["command"], container["args"] = list(batch.launcher), list(batch.command)
    limits = worker["template"]["spec"]["containers"][0]["resources"]["limits"]
    limits["cpu"] = int(batch.ranks_per_node * batch.threads)
    return yaml.safe_dump(tree, sort_keys=False)
