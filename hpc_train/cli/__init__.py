"""The command line: one module per verb, with the verb's options and actions.

A verb's module is imported when the verb runs. It imports what it needs when it needs it, so that
`--help` loads no library.
"""

from __future__ import annotations

import importlib
import os
import select
import sys
from io import BufferedWriter, TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING

from hpc_train import __version__
from hpc_train.cli.verb import EXIT_CODES, Parser, wants_help
from hpc_train.errors import (
    HpcTrainError,
    Output,
    UserError,
    file_error,
    print_error,
    told_interrupted,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

EXIT_READER_GONE = 128 + 13  # as a shell reports a program that SIGPIPE has ended
# The text of each verb in `hpc-train --help`. The module of the same name has `run(arguments)`.
VERBS = {
    "doctor": "check what works here, and say how to repair the rest",
    "info": "info collectives: measure how fast the ranks of a job communicate",
    "prepare": "turn texts, tokens or tables into shards to train on, alone or on many ranks",
    "data": "data verify DIR: compare every shard with its hash; data index FILE: index HDF5 files",
    "train": "train CONFIG.yaml: train a model, alone or under horovodrun, mpirun, srun or mpiexec",
    "launch": "start a job's ranks with the launcher found here, and restart them when they fail",
    "submit": "submit CONFIG.yaml: write a batch script, and queue it",
    "status": "status [RUN]: show the jobs of runs in the queue, and how far they are",
    "logs": "logs RUN: print what the jobs of a run print",
    "log": "log export RUN... --to TRACKER: write records for TensorBoard, MLflow, W&B or as CSV",
    "profile": "profile RUN: record what the ranks of a running job do in its next steps",
    "cancel": "stop a run for good, with a checkpoint",
    "report": "report RUN [RUN ...]: write one HTML file that shows what runs have done",
    "plan": "plan CONFIG.yaml: predict which layouts fit in memory, and how fast they are",
    "scale": "scale CONFIG.yaml --nodes 1,2,4: a scaling study, with a page for a proposal",
    "stage": "copy the Python environment and data sets to a disk of each node",
    "topology": "draw nodes and sockets, and show where each rank and group of a layout runs",
    "generate": "write text from a checkpoint",
    "predict": "predict RUN TABLE --out FILE: predict the rows of a table, alone or on many ranks",
    "checkpoint": "list, verify, compare or export checkpoints",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `hpc-train`; returns the exit code."""
    output = _open_streams()
    code = 0
    try:
        try:
            code = _run(sys.argv[1:] if arguments is None else list(arguments))
        finally:
            sys.stdout.flush()  # here, where a reader that has gone is no error
            if output is not None and output.failed is not None:
                raise output.failed.with_traceback(None)  # whichever library was printing
    except KeyboardInterrupt:
        return told_interrupted()
    except OSError as error:
        gone = isinstance(error, BrokenPipeError) and _reader_gone()
        told = file_error(error)
        if not gone and told is None:
            raise
        if error.filename is None:  # it may be standard output, to which Python writes at its end
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        if told is None:
            return code or EXIT_READER_GONE  # an error, or a stop that wants another start
        if code == 0:  # otherwise an error is told already
            print_error(told)
        return code or told.exit_code
    finally:
        _give_up_errors()
    return code


def _give_up_errors() -> None:
    """Drop what standard error has no room for. Python would make the exit code 120 of it."""
    try:
        sys.stderr.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def _open_streams() -> Output | None:
    """Prepare the standard streams; returns what standard output writes to, if it is a file.

    Streams that are closed, as by `>&-`, lead to nowhere, not to a later file.
    """
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            stream = open(os.open(os.devnull, os.O_RDWR), "r" if name == "stdin" else "w")  # noqa: PTH123, SIM115
            os.set_inheritable(stream.fileno(), True)
            setattr(sys, name, stream)
    given = sys.stdout
    if not isinstance(given, TextIOWrapper):
        return None
    given.reconfigure(errors="replace")  # what a console of few characters lacks is no error
    if given is not sys.__stdout__:
        return None
    # With PYTHONUNBUFFERED, Python's own stream loses what the system does not take at once.
    output = Output(given.fileno(), "w", closefd=False)
    sys.stdout = TextIOWrapper(
        BufferedWriter(output),
        given.encoding,
        given.errors,
        line_buffering=given.line_buffering or given.write_through,
    )
    return output


def _run(arguments: list[str]) -> int:
    try:
        _check_folder()
        if _asks(arguments) and not _first_rank():
            return 0  # rank 0 prints it, once for all
        if arguments[:1] == ["train"] and (code := _started_warm(arguments)) is not None:
            return code
        if arguments and arguments[0] in VERBS:
            code = importlib.import_module(f"hpc_train.cli.{arguments[0]}").run(arguments[1:])
            return int(code)
        parser().parse_args(arguments)  # prints the help or the version, or finds the mistake
        raise UserError("the first argument is no verb", "`hpc-train --help` lists the verbs")
    except HpcTrainError as error:
        print_error(error)
        return error.exit_code


def _asks(arguments: Sequence[str]) -> bool:
    """Whether the program is only asked for its help, its version or a configuration."""
    own = arguments[: arguments.index("--")] if "--" in arguments else arguments
    printed = own[:1] == ["train"] and any(word.startswith("--print_config") for word in own)
    return printed or wants_help(own) or own[:1] == ["--version"]


def _first_rank() -> bool:
    from hpc_train.mpi import environment

    return environment.launched_rank(os.environ) == 0


def _check_folder() -> None:
    """Check that the working folder is there: libraries look for it when they are loaded."""
    try:
        Path.cwd()
    except FileNotFoundError:
        raise UserError(
            "the working folder has been removed", "cd to a folder that is there"
        ) from None


def _reader_gone() -> bool:
    """Whether standard output is a pipe that nobody reads any more, as after `| head`."""
    poll = select.poll()
    poll.register(1, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def parser() -> Parser:
    """The options of the program itself, and the list of its verbs."""
    made = Parser(
        prog="hpc-train",
        description="Train PyTorch models on HPC clusters over MPI and Horovod.",
        epilog=f"{EXIT_CODES}. documentation: {documentation() or 'not installed here'}",
    )
    made.lists = "verbs"
    made.add_argument("--version", action="version", version=f"hpc-train {__version__}")
    verbs = made.add_subparsers(
        title="verbs",
        description="`hpc-train VERB --help` lists the options of each.",
        dest="verb",
        metavar="VERB",
        required=True,
    )
    for name, text in VERBS.items():
        verbs.add_parser(name, help=text)
    return made


def documentation() -> Path | None:
    """The folder of the pages that messages name as docs/...; None if it is not here."""
    import sysconfig

    schemes = sysconfig.get_default_scheme(), "posix_user"  # the second is that of `pip --user`
    roots = (Path(sysconfig.get_path("data", scheme)) for scheme in schemes)
    checkout = Path(__file__).parents[2] / "docs"
    folders = [checkout, *(root / "share/doc/hpc_train/docs" for root in roots)]
    return next((folder for folder in folders if (folder / "how-to").is_dir()), None)


def _started_warm(arguments: list[str]) -> int | None:
    """Let this node's fork server run the program; its exit code, or None to run it here."""
    from hpc_train.mpi import environment
    from hpc_train.warm import key, stand_in

    cold = "--cold" in arguments
    if cold:
        arguments.remove("--cold")
    launch = None if cold or stand_in.forked_by else environment.read_launch(os.environ)
    beside = launch is not None and (launch.local_size or 1) > 1
    if cold or not (beside or key.WARM in os.environ):
        return None
    return stand_in.start_stand_in(["-m", "hpc_train", *arguments], sys.path[0])
