"""The command line: verbs to functions. What a verb needs is imported when it runs."""

from __future__ import annotations

import os
import sys
from argparse import ArgumentError
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from jsonargparse import ArgumentParser, Namespace

from hpc_train import __version__, config_file
from hpc_train.errors import EXIT_FAILURE, EXIT_USER, HpcTrainError, UserError, print_error

if TYPE_CHECKING:
    from hpc_train.mpi.runtime import Runtime

EXIT_CODES = (
    "exit codes: 0 finished; 75 stopped early with a checkpoint, run it again; "
    "2 the user's mistake; 1 anything else"
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `hpc-train`; returns the exit code."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    try:
        if arguments and arguments[0] in CONFIGURED:
            return CONFIGURED[arguments[0]](arguments[1:])
        parsed = parser().parse_args(arguments)
        return VERBS[parsed.verb](parsed[parsed.verb])
    except ArgumentError as error:
        print_error(UserError(str(error), "`hpc-train --help` lists the verbs"))
        return EXIT_USER
    except HpcTrainError as error:
        print_error(error)
        return error.exit_code


def parser() -> ArgumentParser:
    """The parser of all verbs; those of CONFIGURED are in it for the list only."""
    made = ArgumentParser(
        prog="hpc-train",
        description="Train PyTorch models on HPC clusters over MPI and Horovod.",
        epilog=EXIT_CODES,
        version=__version__,
        exit_on_error=False,
    )
    verbs = made.add_subcommands(title="verbs", dest="verb", metavar="VERB")
    doctor_parser = ArgumentParser(description="Tell what works here and what mends the rest.")
    doctor_parser.add_argument("--json", action="store_true", help="machine-readable")
    verbs.add_subcommand("doctor", doctor_parser, help="what works here, and what mends the rest")
    prepare_parser = ArgumentParser(description="Turn files into HDF5 shards with a manifest.")
    verbs.add_subcommand("prepare", prepare_parser, help="turn files into shards to train on")
    verbs.add_subcommand(
        "train",
        ArgumentParser(),
        help="train CONFIG.yaml: alone, or under horovodrun, mpirun, srun or mpiexec",
    )
    verbs.add_subcommand(
        "plan", ArgumentParser(), help="plan CONFIG.yaml: bubble and memory per pipeline schedule"
    )
    verbs.add_subcommand(
        "topology",
        _topology_parser(),
        help="draw nodes, sockets, and where each rank and group of a layout lies",
    )
    verbs.add_subcommand("generate", _generate_parser(), help="write text from a checkpoint")
    checkpoint_parser = ArgumentParser(description="Look into checkpoints, in one process.")
    verbs.add_subcommand(
        "checkpoint", checkpoint_parser, help="list, verify, compare or export checkpoints"
    )
    kinds = prepare_parser.add_subcommands(title="kinds", dest="kind", metavar="KIND")
    kinds.add_subcommand("text", _prepare_text_parser(), help="files or folders of text")
    _add_checkpoint_actions(checkpoint_parser)
    return made


def _prepare_text_parser() -> ArgumentParser:
    made = ArgumentParser(description="Turn files or folders of UTF-8 text into token shards.")
    made.add_argument("paths", nargs="+", metavar="PATH", help="files, or folders to search")
    made.add_argument("--out", required=True, metavar="DIR", help="the data folder to make")
    made.add_argument(
        "--tokenizer", default="bytes", help="bytes, or a file of the tokenizers library"
    )
    made.add_argument("--shard_mb", type=float, default=256.0, help="MiB per shard, about")
    made.add_argument("--validation", type=float, default=0.01, help="share of text held out")
    return made


def _topology_parser() -> ArgumentParser:
    made = ArgumentParser(
        prog="hpc-train topology",
        description="Draw nodes, sockets, and where each rank of the job and each group lies.",
        exit_on_error=False,
    )
    made.add_argument("--dp", type=int, help="data-parallel size; by default what tp and pp leave")
    made.add_argument("--tp", type=int, default=1, help="tensor-parallel size")
    made.add_argument("--pp", type=int, default=1, help="pipeline-parallel size")
    made.add_argument("--json", action="store_true", help="machine-readable")
    return made


def _generate_parser() -> ArgumentParser:
    made = ArgumentParser(description="Write text from a checkpoint of a GPT.")
    made.add_argument("checkpoint", help="a checkpoint file, or a run directory for its newest")
    made.add_argument("--prompt", default="\n", help="the text to go on from")
    made.add_argument("--tokens", type=int, default=256, help="how many tokens to write")
    made.add_argument("--temperature", type=float, default=0.8, help="0 takes the likeliest token")
    made.add_argument("--seed", type=int, default=0, help="of the random choice")
    return made


def _add_checkpoint_actions(made: ArgumentParser) -> None:
    kinds = made.add_subcommands(title="actions", dest="action", metavar="ACTION")
    source = "a file, or a run directory for its newest"
    several = ArgumentParser(description="List the checkpoints of a run.")
    several.add_argument("run", metavar="RUN", help="a run directory")
    kinds.add_subcommand("list", several, help="the checkpoints of a run")
    verify = ArgumentParser(description="Read every byte; exit code 1 if any is damaged.")
    verify.add_argument("checkpoint", help=source)
    verify.add_argument("--all", action="store_true", help="every checkpoint of a run directory")
    kinds.add_subcommand("verify", verify, help="whether a checkpoint is what was saved")
    diff = ArgumentParser(description="Compare two checkpoints; exit code 1 if they differ.")
    diff.add_argument("first", help=source)
    diff.add_argument("second", help=source)
    diff.add_argument("--all", action="store_true", help="show all differences")
    kinds.add_subcommand("diff", diff, help="in what two checkpoints differ")
    export = ArgumentParser(description="Write the model's tensors alone.")
    export.add_argument("checkpoint", help=source)
    export.add_argument(
        "--out", required=True, metavar="FILE", help=".safetensors or .pt; DIR with --to"
    )
    export.add_argument("--include", nargs="+", default=[], metavar="PATTERN", help="of names")
    export.add_argument("--exclude", nargs="+", default=[], metavar="PATTERN", help="of names")
    export.add_argument(
        "--dtype",
        choices=("float64", "float32", "float16", "bfloat16"),
        help="what floating-point numbers are turned into",
    )
    export.add_argument(
        "--to", choices=("gpt2",), help="a folder that transformers opens as a GPT-2"
    )
    kinds.add_subcommand("export", export, help="to safetensors or a torch state dict")


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


def _configuration(arguments: Sequence[str]) -> tuple[str | None, Sequence[str]]:
    """The path of CONFIG.yaml, if it is given, and the options behind it."""
    given = bool(arguments) and not arguments[0].startswith("-")
    return (arguments[0], arguments[1:]) if given else (None, arguments)


def train(arguments: Sequence[str]) -> int:
    """`hpc-train train CONFIG.yaml [--section.key VALUE ...]`, on every rank of the job."""
    path, options = _configuration(arguments)
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
    """`hpc-train plan CONFIG.yaml [--section.key VALUE ...] [--json]`."""
    if not arguments or {"-h", "--help"} & set(arguments):
        made = config_file.parser()
        made.prog = "hpc-train plan"
        made.description = "Tell bubble and memory of each pipeline schedule, without training."
        made.add_argument("--json", action="store_true", help="machine-readable")
        made.print_help()
        return 0 if arguments else EXIT_USER
    from hpc_train import plan as plans

    path, options = _configuration([word for word in arguments if word != "--json"])
    plans.show(plans.plan(config_file.load(path, options)), as_json="--json" in arguments)
    return 0


def topology(arguments: Sequence[str]) -> int:
    """`hpc-train topology [--dp N] [--tp N] [--pp N] [--json]`, on every rank of the job."""
    if {"-h", "--help"} & set(arguments):
        _topology_parser().print_help()
        return 0
    from hpc_train.training.program import run

    return run(lambda runtime: _topology(arguments, runtime))


def _topology(arguments: Sequence[str], runtime: Runtime) -> None:
    from hpc_train.topology import show

    try:
        options = _topology_parser().parse_args(arguments)
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
    "plan": plan,
    "topology": topology,
}
VERBS: dict[str, Callable[[Namespace], int]] = {
    "doctor": doctor,
    "prepare": prepare,
    "generate": generate,
    "checkpoint": checkpoint,
}
