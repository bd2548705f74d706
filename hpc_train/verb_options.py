"""The options of each verb."""

from __future__ import annotations

from typing import Any, get_args

from jsonargparse import ArgumentParser
from jsonargparse.typing import NonNegativeInt, PositiveInt

from hpc_train import __version__
from hpc_train.launch.batch import Scheduler
from hpc_train.launch.launchers import PROGRAMS

EXIT_CODES = (
    "exit codes: 0 finished; 75 stopped early with a checkpoint, run it again; "
    "2 the user's mistake; 1 anything else"
)


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
        "launch",
        ArgumentParser(),
        help="start a job's ranks by the launcher that is here, and again when they fail",
    )
    verbs.add_subcommand(
        "submit", ArgumentParser(), help="submit CONFIG.yaml: write a batch script, and queue it"
    )
    cancel_parser = ArgumentParser(description="Have a run stop for good, with a checkpoint.")
    cancel_parser.add_argument("run", metavar="RUN", help="a run directory")
    verbs.add_subcommand("cancel", cancel_parser, help="have a run stop for good")
    verbs.add_subcommand(
        "plan", ArgumentParser(), help="plan CONFIG.yaml: layouts that fit, and how fast they are"
    )
    verbs.add_subcommand(
        "topology",
        topology(),
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


def topology() -> ArgumentParser:
    """The options of `hpc-train topology`."""
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


def launch() -> ArgumentParser:
    """The options of `hpc-train launch`."""
    made = ArgumentParser(
        prog="hpc-train launch",
        usage="hpc-train launch [-np N] [-H node1:4,node2:4] [options] -- train CONFIG.yaml ...",
        description="Start a job's ranks by the launcher that is here; behind -- what each runs: "
        "train CONFIG.yaml with its options, or any program.",
        epilog=EXIT_CODES,
        exit_on_error=False,
    )
    made.add_argument("-np", type=PositiveInt, metavar="N", help="ranks; by default all slots")
    made.add_argument("-H", metavar="HOSTS", help="hosts with their slots: node1:4,node2:4")
    made.add_argument("--hostfile", metavar="FILE", help="hosts, one per line: node1 slots=4")
    made.add_argument(
        "--ranks_per_node",
        type=PositiveInt,
        metavar="N",
        help="of each host, in place of its slots",
    )
    made.add_argument(
        "--with", choices=PROGRAMS, metavar="PROGRAM", help=f"one of {', '.join(PROGRAMS)}"
    )
    made.add_argument(
        "--max_restarts",
        type=NonNegativeInt,
        default=0,
        metavar="K",
        help="how often a job that fails is started again; hosts that do not answer are left out, "
        "and those beyond -np taken in",
    )
    made.add_argument(
        "--cores", type=PositiveInt, metavar="N", help="of a host; by default as many as here"
    )
    made.add_argument("--dry_run", action="store_true", help="print the line, and start nothing")
    made.add_argument(
        "--cold",
        action="store_true",
        help="every rank imports its libraries itself, in place of one process per node for all",
    )
    return made


def submit() -> ArgumentParser:
    """The options of `hpc-train submit`."""
    made = ArgumentParser(
        prog="hpc-train submit",
        usage="hpc-train submit CONFIG.yaml [--section.key VALUE ...] [options]",
        description="Write the batch script of a training, and queue it. The job stops with a "
        "checkpoint before its time is over, and is queued again until it is done.",
        exit_on_error=False,
    )
    count: dict[str, Any] = {"type": PositiveInt, "metavar": "N"}
    made.add_argument("config", metavar="CONFIG.yaml")
    made.add_argument("--scheduler", choices=get_args(Scheduler), help="by default what is here")
    made.add_argument("--site", help="a machine's profile: its name, or a .yaml file")
    made.add_argument("--nodes", default=1, **count)
    made.add_argument("--ranks_per_node", help="by default the site's, or 1", **count)
    made.add_argument("--threads", help="cores of each rank", **count)
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
        type=NonNegativeInt,
        metavar="K",
        help="within a job, after failures; by default 3",
    )
    made.add_argument(
        "--again", choices=("requeue", "submit", "never"), help="how it is queued again"
    )
    made.add_argument("--most", type=NonNegativeInt, help="times that it may be; by default 50")
    made.add_argument("--chain", default=1, help="jobs at once, one after the other", **count)
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


def plan() -> ArgumentParser:
    """The options of `hpc-train plan`."""
    made = ArgumentParser(
        prog="hpc-train plan",
        usage="hpc-train plan [CONFIG.yaml] [--section.key VALUE ...] [options]",
        description="Tell bubble and memory of each pipeline schedule, without training; with "
        "--nodes or --ranks_per_node instead the layouts of such a job that fit in memory, the "
        "fastest first, predicted from a machine description.",
        exit_on_error=False,
    )
    count: dict[str, Any] = {"type": PositiveInt, "metavar": "N"}
    made.add_argument("config", nargs="?", metavar="CONFIG.yaml")
    made.add_argument("--nodes", help="of the job", **count)
    made.add_argument("--ranks_per_node", help="by default 1", **count)
    made.add_argument("--machine", default="machine.yaml", metavar="FILE", help="the description")
    made.add_argument(
        "--measure",
        action="store_true",
        help="write the description: run it under a launcher, on the ranks of a job",
    )
    made.add_argument("--top", default=10, help="layouts that are shown", **count)
    made.add_argument(
        "--all",
        action="store_true",
        help="all schedules, micro-batches and options of each dp x tp x pp, not only the fastest",
    )
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
