"""Fill in the templates of jobscripts/templates, so that no value can run a command.

Settings are quoted by `shlex`. Directives, which schedulers read by rules of their own, may have a
few kinds of characters only. Setup lines are the user's own commands, and are not quoted.
"""

from __future__ import annotations

import functools
import os
import re
import shlex
import subprocess
from collections.abc import Sequence
from typing import TYPE_CHECKING

import jinja2

from hpc_train.errors import UserError
from hpc_train.launch import TEMPLATES

if TYPE_CHECKING:
    from hpc_train.launch.batch import BatchJob
    from hpc_train.launch.schedulers.base import Scheduler


def script(scheduler: Scheduler, directives: Sequence[str], batch: BatchJob) -> str:
    """The script of a job.

    Args:
        scheduler: the scheduler that reads it.
        directives: its directives, with their sign.
        batch: the job.

    Raises:
        UserError: a setting cannot be written in a script.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES / "templates"),
        block_start_string="#%",
        block_end_string="%#",
        trim_blocks=True,
        variable_start_string="#=",
        variable_end_string="=#",
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
        autoescape=False,  # a shell script: values have been quoted for it
    )
    return environment.get_template(scheduler.template).render(
        directives="\n".join(directives),
        settings="\n".join(_settings(scheduler, batch)),
        commands=list(scheduler.commands),
        staging=batch.staging is not None,
        early=list(scheduler.early),
        late=list(scheduler.late),
        id_line=scheduler.id_line,
    )


def _settings(scheduler: Scheduler, batch: BatchJob) -> list[str]:
    requeue = "requeue, submit" if scheduler.requeues else "submit"
    lines = [
        "# The run directory of the configuration. A file STOP in it ends the job for good.",
        f"run_dir={shlex.quote(batch.run_dir)}",
        "all=$run_dir",
        "# What runs on each rank, and the launcher's words before it.",
        *(["# shellcheck disable=SC2016"] if any("$" in word for word in batch.command) else []),
        f"command=({_array(batch.command)})",
        f"launcher=({_array(batch.launcher)})",
        *_staging(batch),
        f"# How the job is queued again when it has stopped early: {requeue} or never.",
        f"requeue_by={batch.requeue_by}",
        "# The maximum number of requeues.",
        f"max_requeues={batch.max_requeues}",
        "# This file.",
        f"script={shlex.quote(batch.script)}",
    ]
    if scheduler.commands:
        lines.append("# The scheduler's commands; a job's PATH may lack them.")
    for name in scheduler.commands:
        path = shlex.quote(batch.commands.get(name, name))
        lines.append(f"{name}={path}" if "'" in path else f"{name}='{path}'")
    if notice := scheduler.notice(batch):
        lines.append(
            "# Seconds before the end at which USR1 comes; nothing if it is to stop the job."
        )
        lines.append(f"notice={notice if batch.stops_itself else ''}")
    else:
        lines.append("notice=")
    lines += scheduler.settings(batch)
    lines += [f"export {_name(key)}={shlex.quote(value)}" for key, value in batch.environ.items()]
    if "OMP_NUM_THREADS" not in batch.environ and scheduler.name != "slurm":
        lines.append(f"export OMP_NUM_THREADS={batch.resources.threads}")
    lines += ["setup() {", *_checked_setup(tuple(batch.setup)), "}"]
    lines += _tasks(scheduler, batch) if batch.sweep else ["task="]
    return lines


def _staging(batch: BatchJob) -> list[str]:
    if batch.staging is None:
        return []
    return [
        "# What copies the environment to the nodes' disks, and the launcher's words before it.",
        *(
            ["# shellcheck disable=SC2016"]
            if any("$" in word for word in batch.staging.command)
            else []
        ),
        f"stage=({_array(batch.staging.command)})",
        f"stage_launcher=({_array(batch.staging.launcher)})",
        f"environment={shlex.quote(batch.staging.environment)}",
    ]


def _is_comment(line: str) -> bool:
    return not line.strip() or line.lstrip().startswith("#")


@functools.cache
def _checked_setup(setup: tuple[str, ...]) -> list[str]:
    """The lines of the function `setup`, which returns when one of its commands fails.

    Args:
        setup: texts, each with one command or several in lines of their own.

    Raises:
        UserError: a text ends within a command.
    """
    lines, commands = [], 0
    for text in setup:
        begun: list[str] = []  # lines of a command that goes on, such as `if` without its `fi`
        for line in text.split("\n"):
            if not begun and _is_comment(line):
                lines += [f"    {line}"] if line.strip() else []
                continue
            begun.append(line)
            if form := _command("\n".join(begun)):
                lines.append(form)
                commands += 1
                begun = []
        if begun:
            raise UserError(
                f"the setup line {begun[0]!r} is no command by itself",
                "write a command of several lines as one, such as `if a; then b; fi`",
            )
    return lines if commands else [*lines, "    :"]


def _command(text: str) -> str:
    """The lines that run a command and return if it fails; "" if the text is no whole command."""
    # A comment would hide `|| return`, which cannot stand behind & or ;, or the end of a text.
    braces = re.search(r"#|\n|[&;\\]\s*$", text)
    form = f"    {{\n        {text}\n    }} || return" if braces else f"    {text} || return"
    parsed = subprocess.run(
        ["/bin/bash", "-n", "-c", form],
        env={**os.environ, "LC_ALL": "C"},  # its warnings are in English
        capture_output=True,
        check=False,
    )
    # bash only warns of a here-document without an end; the loader may warn of anything else.
    return "" if parsed.returncode or b"here-document" in parsed.stderr else form


def _array(words: Sequence[str]) -> str:
    """The words of a bash array, quoted. shellcheck takes an unquoted comma for a mistake."""
    quoted = [shlex.quote(word) for word in words]
    return " ".join(f"'{word}'" if "," in word and word[0] != "'" else word for word in quoted)


def _name(variable: str) -> str:
    if not re.fullmatch(r"[A-Za-z_]\w*", variable, re.ASCII):
        raise UserError(f"{variable!r} cannot be a variable", "use letters, digits and _ only")
    return variable


def _tasks(scheduler: Scheduler, batch: BatchJob) -> list[str]:
    """Shell lines that give each task of a sweep its arguments and its run directory."""
    number = f":-${scheduler.arrays}" if scheduler.arrays else ""
    lines = [f"task=${{HPC_TRAIN_TASK{number}}}", 'case "$task" in']
    for task, words in enumerate(batch.sweep, scheduler.first_task):
        lines.append(f"    {task}) command+=({_array(words)}) ;;")
    return [*lines, "esac", 'run_dir+="/task-$task"', 'command+=(--run.dir "$run_dir")']
