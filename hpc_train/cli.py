"""The command line: verbs to functions. What a verb needs is imported when it runs."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from hpc_train import verb_options
from hpc_train.errors import EXIT_FAILURE, EXIT_USER, HpcTrainError, UserError, print_error

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Callable, Sequence

    from hpc_train.config import RunConfig
    from hpc_train.mpi.runtime import Runtime


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `hpc-train`; returns the exit code."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    try:
        if arguments[:1] == ["train"] and (code := _forked(arguments)) is not None:
            return code
        if arguments and arguments[0] in VERBS:
            run, _ = VERBS[arguments[0]]
            return run(arguments[1:])
        made = verb_options.parser({name: text for name, (_, text) in VERBS.items()})
        made.parse_args(arguments)  # prints the help or the version, or finds the mistake
        raise UserError("the verb does not come first", "`hpc-train --help` lists the verbs")
    except HpcTrainError as error:
        print_error(error)
        return error.exit_code


def _forked(arguments: list[str]) -> int | None:
    """Have the fork server of this node run the program; its exit code, or None to run it here."""
    from hpc_train.mpi import environment
    from hpc_train.warm import key, stand_in

    cold = "--cold" in arguments
    if cold:
        arguments.remove("--cold")
    launch = None if cold or stand_in.forked_by else environment.read(os.environ)
    beside = launch is not None and (launch.local_size or 1) > 1
    if cold or not (beside or key.WARM in os.environ):
        return None
    return stand_in.start(["-m", "hpc_train", *arguments], sys.path[0])


def doctor(arguments: Sequence[str]) -> int:
    """`hpc-train doctor [--json]`."""
    options = verb_options.doctor().parse_args(arguments)
    from hpc_train import doctor as doctors
    from hpc_train.mpi import environment

    launch = environment.read(os.environ)
    findings, ranks = doctors.examine()
    if launch is None or launch.rank == 0:
        print(doctors.report(findings, ranks, as_json=options.json))
    return 0 if doctors.runs(findings) else EXIT_FAILURE


def prepare(arguments: Sequence[str]) -> int:
    """`hpc-train prepare text PATH... --out DIR`."""
    text = verb_options.prepare().parse_args(arguments)
    from hpc_train import log
    from hpc_train.data.prepare import prepare_text

    log.to_console(rank=0)
    manifest = prepare_text(
        text.paths,
        text.out,
        tokenizer=text.tokenizer,
        shard_mb=text.shard_mb,
        validation=text.validation,
    )
    print(
        f"{text.out}: {manifest.documents} texts, vocabulary of {manifest.vocab}, "
        f"{manifest.tokens('train')} tokens to train on, {manifest.tokens('validation')} held out"
    )
    return 0


def data(arguments: Sequence[str]) -> int:
    """`hpc-train data verify DIR [--each_node] [--json]`, on every rank of the job."""
    if {"-h", "--help"} & set(arguments):
        verb_options.data().parse_args(arguments)
    from hpc_train.training.program import run

    return run(lambda runtime: _verify(arguments, runtime))


def _verify(arguments: Sequence[str], runtime: Runtime) -> None:
    from hpc_train.data_verbs import verify

    given = verb_options.data().parse_args(arguments)
    verify(runtime, given.folder, each_node=given.each_node, as_json=given.json)


def train(arguments: Sequence[str]) -> int:
    """`hpc-train train CONFIG.yaml [--section.key VALUE ...]`, on every rank of the job."""
    from hpc_train import config_file

    path, options = config_file.split(arguments)
    if not arguments or {"-h", "--help"} & set(arguments):
        config_file.parser(documented=True).print_help()
        return 0 if arguments else EXIT_USER
    if any(option.startswith("--print_config") for option in options):
        config_file.load(path, options)  # the parser prints it and leaves
    from hpc_train.training.preemption import hold_signals

    hold_signals()  # loading MPI and torch takes seconds, in which a scheduler may want to stop us
    settings: RunConfig | Exception
    try:  # before MPI, after which no process may be started
        settings = config_file.load(path, options)
        if settings.data.workers:
            from hpc_train.data.fork_server import start_workers

            start_workers()
    except Exception as error:  # noqa: BLE001  # raised where the other ranks hear of it
        settings = error
    from hpc_train.training.program import run

    return run(lambda runtime: _train(settings, runtime))


def _train(settings: RunConfig | Exception, runtime: Runtime) -> None:
    from hpc_train.mpi.agreement import agreed

    with agreed(runtime.world):
        if isinstance(settings, Exception):
            raise settings
        from hpc_train.training.gpt import train_gpt  # torch is loaded once all else is right
    train_gpt(settings, runtime)


def plan(arguments: Sequence[str]) -> int:
    """`hpc-train plan CONFIG.yaml [--nodes N --ranks_per_node R] [--section.key VALUE ...]`."""
    made = verb_options.plan()
    if not arguments or {"-h", "--help"} & set(arguments):
        made.print_help()
        return 0 if arguments else EXIT_USER
    from hpc_train import config_file

    own, options = config_file.separate(arguments)
    given = made.parse_args(own)
    if given.measure:
        from hpc_train.training.program import run

        return run(lambda runtime: _measure(given, options, runtime))
    settings = config_file.load(given.config, options)
    if given.nodes or given.ranks_per_node:
        from hpc_train.planning import choose, machine

        found = choose.choose(
            settings,
            machine.load(Path(given.machine)),
            given.nodes or 1,
            given.ranks_per_node or 1,
            top=given.top,
            every=given.all,
        )
        choose.show(found, as_json=given.json)
        return 0
    from hpc_train.planning import schedules as plans

    plans.show(plans.plan(settings), as_json=given.json)
    return 0


def _measure(given: Namespace, options: Sequence[str], runtime: Runtime) -> None:
    from hpc_train import config_file
    from hpc_train.mpi.agreement import agreed

    with agreed(runtime.world):
        settings = config_file.load(given.config, options)
        from hpc_train.training import measure
    made, path = measure.measure(settings, runtime), Path(given.machine)
    with agreed(runtime.world):
        if runtime.world.rank == 0:
            measure.write(made, path, runtime.world.size)
    runtime.print(path.read_text().rstrip() if runtime.world.rank == 0 else "")


def launch(arguments: Sequence[str]) -> int:
    """`hpc-train launch -np N [-H h1:4,h2:4] [options] -- COMMAND`."""
    made = verb_options.launch()
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    if not arguments or {"-h", "--help"} & set(arguments[:cut]):
        made.print_help()
        return 0 if arguments else EXIT_USER
    from hpc_train.launch.protocol import STOP_SIGNALS

    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)  # until there is somebody to hear them
    try:
        given = made.parse_args(arguments[:cut])
    except UserError as error:
        if cut < len(arguments):
            raise
        remedy = "write the command behind --: hpc-train launch -np 4 -- train my.yaml"
        raise UserError(error.cause, remedy) from None
    from hpc_train.launch.command import Request
    from hpc_train.launch.command import launch as start

    return start(
        Request(
            arguments[cut + 1 :],
            given.np,
            given.H,
            Path(given.hostfile) if given.hostfile else None,
            given.ranks_per_node,
            given.program,
            given.max_restarts,
            given.cores,
            given.dry_run,
            given.cold,
        )
    )


def submit(arguments: Sequence[str]) -> int:
    """`hpc-train submit CONFIG.yaml --scheduler slurm --nodes N ... [--section.key VALUE ...]`."""
    made = verb_options.submit()
    if not arguments or {"-h", "--help"} & set(arguments):
        made.print_help()
        return 0 if arguments else EXIT_USER
    from hpc_train import config_file

    own, options = config_file.separate(arguments)
    given = made.parse_args(own)
    from hpc_train.launch.submit import Request
    from hpc_train.launch.submit import submit as queue

    for job in queue(Request(**vars(given), options=options)):
        print(job)
    return 0


def cancel(arguments: Sequence[str]) -> int:
    """`hpc-train cancel RUN`."""
    options = verb_options.cancel().parse_args(arguments)
    from hpc_train.launch.cancel import cancel as stop

    print(stop(Path(options.run)))
    return 0


def topology(arguments: Sequence[str]) -> int:
    """`hpc-train topology [--dp N] [--tp N] [--pp N] [--json]`, on every rank of the job."""
    if {"-h", "--help"} & set(arguments):
        verb_options.topology().print_help()
        return 0
    from hpc_train.training.program import run

    return run(lambda runtime: _topology(arguments, runtime))


def _topology(arguments: Sequence[str], runtime: Runtime) -> None:
    from hpc_train.topology import show

    options = verb_options.topology().parse_args(arguments)
    show(runtime, dp=options.dp, tp=options.tp, pp=options.pp, as_json=options.json)


def generate(arguments: Sequence[str]) -> int:
    """`hpc-train generate CHECKPOINT --prompt TEXT`."""
    options = verb_options.generate().parse_args(arguments)
    from hpc_train.training.generate import generate as write

    for piece in write(
        options.checkpoint,
        options.prompt,
        tokens=options.tokens,
        temperature=options.temperature,
        seed=options.seed,
    ):
        print(piece, end="", flush=True)
    print()
    return 0


def checkpoint(arguments: Sequence[str]) -> int:
    """`hpc-train checkpoint list | verify | diff | export`."""
    given = verb_options.checkpoint().parse_args(arguments)
    from hpc_train import checkpoint_verbs as verbs

    if given.action == "list":
        return verbs.show_list(given.run)
    if given.action == "verify":
        return verbs.verify(given.checkpoint, every=given.all)
    if given.action == "diff":
        return verbs.diff(given.first, given.second, every=given.all)
    patterns = given.include, given.exclude
    return verbs.export(given.checkpoint, given.out, *patterns, given.dtype, gpt2=bool(given.to))


# Of each verb the function, and what `hpc-train --help` says.
VERBS: dict[str, tuple[Callable[[Sequence[str]], int], str]] = {
    "doctor": (doctor, "what works here, and what mends the rest"),
    "prepare": (prepare, "turn files into shards to train on"),
    "data": (data, "data verify DIR: check every shard of a data folder against its hash"),
    "train": (train, "train CONFIG.yaml: alone, or under horovodrun, mpirun, srun or mpiexec"),
    "launch": (
        launch,
        "start a job's ranks by the launcher that is here, and again when they fail",
    ),
    "submit": (submit, "submit CONFIG.yaml: write a batch script, and queue it"),
    "cancel": (cancel, "have a run stop for good"),
    "plan": (plan, "plan CONFIG.yaml: layouts that fit, and how fast they are"),
    "topology": (topology, "draw nodes, sockets, and where each rank and group of a layout lies"),
    "generate": (generate, "write text from a checkpoint"),
    "checkpoint": (checkpoint, "list, verify, compare or export checkpoints"),
}
