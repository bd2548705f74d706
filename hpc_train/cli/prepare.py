"""`hpc-train prepare KIND PATH... --out DIR`: turn files into shards, on every rank."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

from hpc_train.cli.prepare_table import add_table, run_table
from hpc_train.cli.shared_portions import run_on_files, share_portions
from hpc_train.cli.verb import Parser, positive
from hpc_train.errors import plural

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Callable, Sequence

    from hpc_train.data.manifest import Manifest
    from hpc_train.data.prepare.request import PrepareRequest
    from hpc_train.mpi.group import Group
    from hpc_train.mpi.runtime import Runtime


def options() -> Parser:
    """The options of the verb."""
    made = Parser(
        "hpc-train prepare",
        description="Turn files into HDF5 shards with a manifest. Under a launcher the ranks share "
        "the work, and any number of them makes the same shards. The same command continues a "
        "preparation that was stopped.",
    )
    made.lists = "kinds"
    kinds = made.add_subparsers(title="kinds", dest="kind", metavar="KIND", required=True)
    text = kinds.add_parser(
        "text",
        help="files or folders of text",
        description="Turn files or folders of UTF-8 text into token shards. A file is one text, "
        "and so is each line of a JSON lines file (.jsonl). Files may be compressed (.gz, .zst). "
        "Shards keep where each text begins.",
    )
    text.add_argument("paths", nargs="+", metavar="PATH", help="files, or folders to search")
    text.add_argument(
        "--tokenizer",
        default="bytes",
        help="bytes, or a file of the tokenizers library (default: %(default)s)",
    )
    text.add_argument(
        "--validation",
        type=float,
        default=0.01,
        help="share of the text that is held out for validation (default: %(default)s)",
    )
    text.add_argument(
        "--text_key",
        default="text",
        metavar="KEY",
        help="the key of the text in JSON lines (default: %(default)s)",
    )
    tokens = kinds.add_parser(
        "tokens",
        help="token files of other programs",
        description="Make shards of token files of other programs: raw tokens (nanoGPT's .bin), "
        "Megatron's pairs of .bin and .idx, folders that Hugging Face's save_to_disk has written, "
        "and HDF5 files. Where the files allow it, tokens stay in them, and shards refer to them.",
    )
    tokens.add_argument("paths", nargs="+", metavar="PATH", help="token files to train on")
    tokens.add_argument(
        "--held_out",
        nargs="+",
        action="extend",
        default=[],
        metavar="PATH",
        help="token files for validation",
    )
    tokens.add_argument(
        "--vocab", type=positive, default=0, metavar="N", help="vocabulary size of the tokens"
    )
    tokens.add_argument(
        "--tokenizer",
        default="",
        help="the tokens' tokenizer, a file of the tokenizers library or bytes; it is copied "
        "(default: none, so `generate` cannot write text)",
    )
    tokens.add_argument(
        "--stored",
        choices=("uint8", "uint16", "uint32", "int32", "int64"),
        default="uint16",
        help="type of the tokens in raw files (default: %(default)s)",
    )
    tokens.add_argument(
        "--column",
        default="input_ids",
        help="the column of the tokens in a Hugging Face dataset, or their dataset in an HDF5 "
        "file (default: %(default)s)",
    )
    tokens.add_argument(
        "--copy",
        action="store_true",
        help="copy the tokens into the shards in any case, so that the files can be removed",
    )
    for kind in (text, tokens):
        kind.add_argument("--out", required=True, metavar="DIR", help="the data folder to write")
        kind.add_argument(
            "--shard_mb",
            type=float,
            default=256.0,
            help="approximate size of a shard in MiB (default: %(default)s)",
        )
    add_table(kinds)
    return made


def run(arguments: Sequence[str]) -> int:
    """Run the verb; returns the exit code."""
    return run_on_files(options, _run, arguments)


def _run(arguments: Sequence[str], runtime: Runtime) -> None:
    given = options().parse_args(arguments)
    if given.kind == "table":
        run_table(given, runtime)
        return
    manifest = prepare_together(runtime.world, lambda: _request(given))
    runtime.print(
        f"{given.out}: {plural(manifest.documents, 'text')}, vocabulary of {manifest.vocab}, "
        f"{plural(manifest.tokens('train'), 'token')} to train on, "
        f"{manifest.tokens('validation')} held out"
    )


def _request(given: Namespace) -> PrepareRequest:
    from hpc_train.data.prepare.foreign import TokenLayout
    from hpc_train.data.prepare.request import text_request, tokens_request

    values = {**vars(given)}
    kind, paths, out = (values.pop(name) for name in ("kind", "paths", "out"))
    if kind == "text":
        return text_request(paths, out, **values)
    layout = TokenLayout(*(values.pop(name) for name in TokenLayout._fields))
    return tokens_request(paths, out, layout=layout, **values)


def prepare_together(world: Group, make: Callable[[], PrepareRequest]) -> Manifest:
    """Prepare a data folder on all ranks. Collective.

    Args:
        world: the ranks, which all see the data folder and the input.
        make: makes the request. Only rank 0 calls it.

    Returns:
        The manifest of the new folder, on all ranks.

    Raises:
        DataError: as `prepare_text` of data/prepare/work.py; on all ranks.
        SetupError: a library is needed and missing; on all ranks.
    """
    from hpc_train.data.prepare.work import begun, finish, work
    from hpc_train.mpi.agreement import from_first

    with ExitStack() as held:  # rank 0 holds the partial folder until all ranks are ready
        preparation = from_first(world, lambda: held.enter_context(begun(make())))
        share_portions(world, preparation, work)
        return from_first(world, lambda: finish(preparation))
