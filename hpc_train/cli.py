"""The command line: verbs to functions. What a verb needs is imported when it runs."""

from __future__ import annotations

import os
import signal
import sys
from argparse import ArgumentError
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from jsonargparse import Namespace

from hpc_train import config_file, verb_options
from hpc_train.errors import EXIT_FAILURE, EXIT_USER, HpcTrainError, UserError, print_error

if TYPE_CHECKING:
    from hpc_train.mpi.runtime import Runtime


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `hpc-train`; returns the exit code."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    try:
        if arguments[:1] == ["train"] and (code := _forked(arguments)) is not None:
            return code
        if arguments and arguments[0] in CONFIGURED:
            return CONFIGURED[arguments[0]](arguments[1:])
        parsed = verb_options.parser().parse_args(arguments)
        return VERBS[parsed.verb](parsed[parsed.verb])
    except ArgumentError as error:
        print_error(UserError(str(error), "`hpc-train --help` lists the verbs"))
        return EXIT_USER
    except HpcTrainError as error:
        print_error(error)
        return error.exit_code


def _forked(arguments: list[str]) -> int | None:
    """Have the fork server of this node run the program; its exit code, or None to run it here."""
    from hpc_train.mpi import environment
    from hpc_train.warm import stand_in

    cold = "--cold" in arguments
    if cold:
        arguments.remove("--cold")
    launch = None if cold or stand_in.forked else environment.read(os.environ)
    beside = launch is not None and (launch.local_size or 1) > 1
    if cold or not (beside or stand_in.WARM in os.environ):
        return None
    return stand_in.start(["-m", "hpc_train", *arguments], sys.path[0])


def doctor(options: Namespace) -> int:
    """`hpc-train doctor [--json]`."""
    from hpc_train import doctor as doctors
    from hpc_train.mpi import environment

    launch = environment.read(os.environ)
    findings, ranks = doctors.examine()
    if launch is None or launch.rank == 0:
        print(doctors.report(findings, ranks, as_json=options.json))
    return 0 if doctors.runs(findings) else EXIT_FAILURE


def prepare(options: Namespace) -> int:
    """`hpc-train prepare text PATH... --out DIR`."""
    from hpc_train import log
    from hpc_train.data.prepare import prepare_text

    text = options.text
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


def train(arguments: Sequence[str]) -> int:
    """`hpc-train train CONFIG.yaml [--section.key VALUE ...]`, on every rank of the job."""
    path, options = config_file.split(arguments)
    if not arguments or {"-h", "--help"} & set(arguments):
        config_file.parser().print_help()
        return 0 if arguments else EXIT_USER
    if any(option.startswith("--print_config") for option in options):
        config_file.load(path, options)  # the parser prints it and leaves
    from hpc_train.training.preemption import hold_signals

    hold_signals()  # loading MPI and torch takes seconds, in which a scheduler may want to stop us
    from hpc_train.training.program import run

    return run(lambda runtime: _train(path, options, runtime))


def _train(path: str | None, options: Sequence[str], runtime: Runtime) -> None:
    from hpc_train.mpi.agreement import agreed

    with agreed(runtime.world):
        settings = config_file.load(path, options)
        from hpc_train.training.gpt import train_gpt  # torch is loaded once all else is right
    train_gpt(settings, runtime)


def plan(arguments: Sequence[str]) -> int:
    """`hpc-train plan CONFIG.yaml [--nodes N --ranks_per_node R] [--section.key VALUE ...]`."""
    made = verb_options.plan()
    if not arguments or {"-h", "--help"} & set(arguments):
        made.print_help()
        return 0 if arguments else EXIT_USER
    own, options = config_file.separate(arguments)
    try:
        given = made.parse_args(own)
    except ArgumentError as error:
        raise UserError(str(error), "`hpc-train plan --help` lists the options") from None
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
    from hpc_train.launch.command import Request
    from hpc_train.launch.command import launch as start

    try:
        given = made.parse_args(arguments[:cut])
    except ArgumentError as error:
        remedy = "`hpc-train launch --help` lists the options"
        if cut == len(arguments):
            remedy = "write the command behind --: hpc-train launch -np 4 -- train my.yaml"
        raise UserError(str(error), remedy) from None
    return start(
        Request(
            arguments[cut + 1 :],
            given.np,
            given.H,
            Path(given.hostfile) if given.hostfile else None,
            given.ranks_per_node,
            given["with"],
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
    from hpc_train.launch.submit import Request
    from hpc_train.launch.submit import submit as queue

    own, options = config_file.separate(arguments)
    try:
        given = made.parse_args(own)
    except ArgumentError as error:
        raise UserError(str(error), "`hpc-train submit --help` lists the options") from None
    for job in queue(Request(**given.as_dict(), options=options)):
        print(job)
    return 0


def cancel(options: Namespace) -> int:
    """`hpc-train cancel RUN`."""
    from hpc_train.launch.submit import cancel as stop

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

    try:
        options = verb_options.topology().parse_args(arguments)
    except ArgumentError as error:
        raise UserError(str(error), "`hpc-train topology --help` lists the options") from None
    show(runtime, dp=options.dp, tp=options.tp, pp=options.pp, as_json=options.json)


def generate(options: Namespace) -> int:
    """`hpc-train generate CHECKPOINT --prompt TEXT`."""
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


def checkpoint(options: Namespace) -> int:
    """`hpc-train checkpoint list | verify | diff | export`."""
    from hpc_train import checkpoint_verbs as verbs

    given = options[options.action]
    if options.action == "list":
        return verbs.show_list(given.run)
    if options.action == "verify":
        return verbs.verify(given.checkpoint, every=given.all)
    if options.action == "diff":
        return verbs.diff(given.first, given.second, every=given.all)
    patterns = given.include, given.exclude
    return verbs.export(given.checkpoint, given.out, *patterns, given.dtype, gpt2=bool(given.to))


# Verbs whose options come from the configuration's dataclasses, or are read on all ranks together.
CONFIGURED: dict[str, Callable[[Sequence[str]], int]] = {
    "train": train,
    "launch": launch,
    "submit": submit,
    "plan": plan,
    "topology": topology,
}
VERBS: dict[str, Callable[[Namespace], int]] = {
    "doctor": doctor,
    "prepare": prepare,
    "cancel": cancel,
    "generate": generate,
    "checkpoint": checkpoint,
}
