"""The options of each verb, those of the configuration apart: `config_file.py` makes these."""

from __future__ import annotations

from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Mapping
from typing import Any, NoReturn, get_args

from hpc_train import __version__
from hpc_train.errors import UserError
from hpc_train.launch import PROGRAMS, Scheduler

EXIT_CODES = (
    "exit codes: 0 finished; 75 stopped early with a checkpoint, run it again; "
    "2 the user's mistake; 1 anything else"
)


class Parser(ArgumentParser):
    """The options of one verb; a mistake in them is raised, with where to look them up."""

    lists = "options"  # what its help is read for

    def error(self, message: str) -> NoReturn:
        """Refuse the arguments.

        Raises:
            UserError: always.
        """
        raise UserError(message, f"`{self.prog} --help` lists the {self.lists}")


def positive(text: str) -> int:
    """The value of an option that takes a number above 0."""
    return _at_least(1, text)


def not_negative(text: str) -> int:
    """The value of an option that takes 0, or a number above it."""
    return _at_least(0, text)


def _at_least(least: int, text: str) -> int:
    if not text.isdecimal() or int(text) < least:
        raise ArgumentTypeError(f"{text!r} is no whole number of {least} or more")
    return int(text)


COUNT: dict[str, Any] = {"type": positive, "metavar": "N"}


def parser(texts: Mapping[str, str]) -> Parser:
    """The options of the program itself, and the list of its verbs.

    Args:
        texts: what the list says of each verb.
    """
    made = Parser(
        prog="hpc-train",
        description="Train PyTorch models on HPC clusters over MPI and Horovod.",
        epilog=EXIT_CODES,
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
    for name, text in texts.items():
        verbs.add_parser(name, help=text)
    return made


def doctor() -> Parser:
    """The options of `hpc-train doctor`."""
    made = Parser("hpc-train doctor", description="Tell what works here and what mends the rest.")
    made.add_argument("--json", action="store_true", help="machine-readable")
    return made


def prepare() -> Parser:
    """The options of `hpc-train prepare`."""
    made = Parser("hpc-train prepare", description="Turn files into HDF5 shards with a manifest.")
    made.lists = "kinds"
    kinds = made.add_subparsers(title="kinds", dest="kind", metavar="KIND", required=True)
    text = kinds.add_parser(
        "text",
        help="files or folders of text",
        description="Turn files or folders of UTF-8 text into token shards.",
    )
    text.add_argument("paths", nargs="+", metavar="PATH", help="files, or folders to search")
    text.add_argument("--out", required=True, metavar="DIR", help="the data folder to make")
    text.add_argument(
        "--tokenizer",
        default="bytes",
        help="bytes, or a file of the tokenizers library (default: %(default)s)",
    )
    text.add_argument(
        "--shard_mb", type=float, default=256.0, help="MiB per shard, about (default: %(default)s)"
    )
    text.add_argument(
        "--validation",
        type=float,
        default=0.01,
        help="share of text held out (default: %(default)s)",
    )
    return made


def data() -> Parser:
    """The options of `hpc-train data`."""
    made = Parser("hpc-train data", description="Look after a folder of `hpc-train prepare`.")
    made.lists = "actions"
    actions = made.add_subparsers(title="actions", dest="action", metavar="ACTION", required=True)
    verify = actions.add_parser(
        "verify",
        help="whether the shards are what was prepared",
        description="Read every shard and compare its hash, alone or under a launcher, whose ranks "
        "share the shards out; exit code 2 if any is damaged.",
    )
    verify.add_argument("folder", metavar="DIR", help="the data folder")
    verify.add_argument(
        "--each_node",
        action="store_true",
        help="every node reads all shards: its disk has a copy of its own",
    )
    verify.add_argument("--json", action="store_true", help="machine-readable")
    return made


def launch() -> Parser:
    """The options of `hpc-train launch`."""
    made = Parser(
        prog="hpc-train launch",
        usage="hpc-train launch [-np N] [-H node1:4,node2:4] [options] -- train CONFIG.yaml ...",
        description="Start a job's ranks by the launcher that is here; behind -- what each runs: "
        "train CONFIG.yaml with its options, or any program.",
        epilog=EXIT_CODES,
    )
    made.add_argument("-np", **COUNT, help="ranks; by default all slots")
    made.add_argument("-H", metavar="HOSTS", help="hosts with their slots: node1:4,node2:4")
    made.add_argument("--hostfile", metavar="FILE", help="hosts, one per line: node1 slots=4")
    made.add_argument(
        "--ranks_per_node",
        **COUNT,
        help="of each host, in place of its slots",
    )
    made.add_argument(
        "--with",
        dest="program",
        choices=PROGRAMS,
        metavar="PROGRAM",
        help=f"one of {', '.join(PROGRAMS)}",
    )
    made.add_argument(
        "--max_restarts",
        type=not_negative,
        default=0,
        metavar="K",
        help="how often a job that fails is started again (default: %(default)s); hosts that do "
        "not answer are left out, and those beyond -np taken in",
    )
    made.add_argument("--cores", **COUNT, help="of a host; by default as many as here")
    made.add_argument("--dry_run", action="store_true", help="print the line, and start nothing")
    made.add_argument(
        "--cold",
        action="store_true",
        help="every rank imports its libraries itself, in place of one process per node for all",
    )
    return made


def submit() -> Parser:
    """The options of `hpc-train submit`."""
    made = Parser(
        prog="hpc-train submit",
        usage="hpc-train submit CONFIG.yaml [--section.key VALUE ...] [options]",
        description="Write the batch script of a training, and queue it. The job stops with a "
        "checkpoint before its time is over, and is queued again until it is done.",
    )
    made.add_argument("config", metavar="CONFIG.yaml", help="of the training")
    made.add_argument("--scheduler", choices=get_args(Scheduler), help="by default what is here")
    made.add_argument("--site", help="a machine's profile: its name, or a .yaml file")
    made.add_argument("--nodes", default=1, help="of the job (default: %(default)s)", **COUNT)
    made.add_argument("--ranks_per_node", help="by default the site's, or 1", **COUNT)
    made.add_argument("--threads", help="cores of each rank", **COUNT)
    made.add_argument("--time", metavar="HH:MM:SS", help="limit of the job; by default an hour")
    made.add_argument("--name", help="of the job; by default of the run directory")
    made.add_argument("--account", help="who pays")
    made.add_argument("--queue", help="queue or partition")
    made.add_argument(
        "--directive", nargs="+", default=(), metavar="TEXT", help="more lines: '--qos=debug'"
    )
    made.add_argument(
        "--setup",
        nargs="+",
        default=(),
        metavar="LINE",
        help="shell lines before the start: 'module load python'; by default this environment's "
        "activation",
    )
    made.add_argument(
        "--start",
        choices=("srun", "mpirun", "horovodrun"),
        help="in place of `hpc-train launch`, which chooses",
    )
    made.add_argument(
        "--max_restarts",
        type=not_negative,
        metavar="K",
        help="within a job, after failures; by default 3",
    )
    made.add_argument(
        "--again", choices=("requeue", "submit", "never"), help="how it is queued again"
    )
    made.add_argument("--most", type=not_negative, help="times that it may be; by default 50")
    made.add_argument(
        "--chain",
        default=1,
        help="jobs at once, one after the other (default: %(default)s)",
        **COUNT,
    )
    made.add_argument(
        "--sweep",
        nargs="+",
        default=(),
        metavar="KEY=V,V",
        help="an array with a task for each combination of values, such as optimizer.lr=1e-3,1e-4",
    )
    made.add_argument("--image", default="", help="of containers, for mpijob")
    made.add_argument("--dry_run", action="store_true", help="print the script, and queue nothing")
    return made


def cancel() -> Parser:
    """The options of `hpc-train cancel`."""
    made = Parser("hpc-train cancel", description="Have a run stop for good, with a checkpoint.")
    made.add_argument("run", metavar="RUN", help="a run directory")
    return made


def plan() -> Parser:
    """The options of `hpc-train plan`."""
    made = Parser(
        prog="hpc-train plan",
        usage="hpc-train plan [CONFIG.yaml] [--section.key VALUE ...] [options]",
        description="Tell bubble and memory of each pipeline schedule, without training; with "
        "--nodes or --ranks_per_node instead the layouts of such a job that fit in memory, the "
        "fastest first, predicted from a machine description.",
    )
    made.add_argument("config", nargs="?", metavar="CONFIG.yaml", help="by default no file")
    made.add_argument("--nodes", help="of the job", **COUNT)
    made.add_argument("--ranks_per_node", help="by default 1", **COUNT)
    made.add_argument(
        "--machine",
        default="machine.yaml",
        metavar="FILE",
        help="the description (default: %(default)s)",
    )
    made.add_argument(
        "--measure",
        action="store_true",
        help="write the description: run it under a launcher, on the ranks of a job",
    )
    made.add_argument(
        "--top", default=10, help="layouts that are shown (default: %(default)s)", **COUNT
    )
    made.add_argument(
        "--all",
        action="store_true",
        help="all schedules, micro-batches and options of each dp x tp x pp, not only the fastest",
    )
    made.add_argument("--json", action="store_true", help="machine-readable")
    return made


def topology() -> Parser:
    """The options of `hpc-train topology`."""
    made = Parser(
        prog="hpc-train topology",
        description="Draw nodes, sockets, and where each rank of the job and each group lies.",
    )
    made.add_argument("--dp", type=int, help="data-parallel size; by default what tp and pp leave")
    made.add_argument(
        "--tp", type=int, default=1, help="tensor-parallel size (default: %(default)s)"
    )
    made.add_argument(
        "--pp", type=int, default=1, help="pipeline-parallel size (default: %(default)s)"
    )
    made.add_argument("--json", action="store_true", help="machine-readable")
    return made


def generate() -> Parser:
    """The options of `hpc-train generate`."""
    made = Parser("hpc-train generate", description="Write text from a checkpoint of a GPT.")
    made.add_argument("checkpoint", help="a checkpoint file, or a run directory for its newest")
    made.add_argument(
        "--prompt", default="\n", help="the text to go on from; by default an empty line"
    )
    made.add_argument(
        "--tokens", type=int, default=256, help="how many tokens to write (default: %(default)s)"
    )
    made.add_argument(
        "--temperature",
        type=float,
        default=0.8,
        help="0 takes the likeliest token (default: %(default)s)",
    )
    made.add_argument(
        "--seed", type=int, default=0, help="of the random choice (default: %(default)s)"
    )
    return made


def checkpoint() -> Parser:
    """The options of `hpc-train checkpoint`."""
    made = Parser("hpc-train checkpoint", description="Look into checkpoints, in one process.")
    made.lists = "actions"
    actions = made.add_subparsers(title="actions", dest="action", metavar="ACTION", required=True)
    source = "a file, or a run directory for its newest"
    several = actions.add_parser(
        "list",
        help="the checkpoints of a run",
        description="List the checkpoints of a run.",
    )
    several.add_argument("run", metavar="RUN", help="a run directory")
    verify = actions.add_parser(
        "verify",
        help="whether a checkpoint is what was saved",
        description="Read every byte; exit code 1 if any is damaged.",
    )
    verify.add_argument("checkpoint", help=source)
    verify.add_argument("--all", action="store_true", help="every checkpoint of a run directory")
    diff = actions.add_parser(
        "diff",
        help="in what two checkpoints differ",
        description="Compare two checkpoints; exit code 1 if they differ.",
    )
    diff.add_argument("first", help=source)
    diff.add_argument("second", help=source)
    diff.add_argument("--all", action="store_true", help="show all differences")
    export = actions.add_parser(
        "export",
        help="to safetensors or a torch state dict",
        description="Write the model's tensors alone.",
    )
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
    return made
