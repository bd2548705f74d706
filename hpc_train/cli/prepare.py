"""`hpc-train prepare text PATH... --out DIR`: turn text files into HDF5 shards."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpc_train.cli.verb import Parser

if TYPE_CHECKING:
    from collections.abc import Sequence


def options() -> Parser:
    """The options of the verb."""
    made = Parser("hpc-train prepare", description="Turn files into HDF5 shards with a manifest.")
    made.lists = "kinds"
    kinds = made.add_subparsers(title="kinds", dest="kind", metavar="KIND", required=True)
    text = kinds.add_parser(
        "text",
        help="files or folders of text",
        description="Turn files or folders of UTF-8 text into token shards.",
    )
    text.add_argument("paths", nargs="+", metavar="PATH", help="files, or folders to search")
    text.add_argument("--out", required=True, metavar="DIR", help="the data folder to write")
    text.add_argument(
        "--tokenizer",
        default="bytes",
        help="bytes, or a file of the tokenizers library (default: %(default)s)",
    )
    text.add_argument(
        "--shard_mb",
        type=float,
        default=256.0,
        help="approximate size of a shard in MiB (default: %(default)s)",
    )
    text.add_argument(
        "--validation",
        type=float,
        default=0.01,
        help="share of the text that is held out for validation (default: %(default)s)",
    )
    return made


def run(arguments: Sequence[str]) -> int:
    """Run the verb; returns the exit code."""
    text = options().parse_args(arguments)
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
