"""`hpc-train generate CHECKPOINT --prompt TEXT`: write text with a trained language model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpc_train.cli.verb import Parser, not_negative

if TYPE_CHECKING:
    from collections.abc import Sequence


def options() -> Parser:
    """The options of the verb."""
    made = Parser(
        "hpc-train generate", description="Write text with the language model of a checkpoint."
    )
    made.add_argument(
        "checkpoint", help="a checkpoint file, or a run directory for its newest checkpoint"
    )
    made.add_argument(
        "--prompt", default="\n", help="the text to continue (default: an empty line)"
    )
    made.add_argument(
        "--tokens",
        type=not_negative,
        default=256,
        metavar="N",
        help="number of tokens to write (default: %(default)s)",
    )
    made.add_argument(
        "--temperature",
        type=float,
        default=0.8,
        help="temperature of the random choice; 0 takes the likeliest token (default: %(default)s)",
    )
    made.add_argument(
        "--seed", type=int, default=0, help="seed of the random choice (default: %(default)s)"
    )
    made.add_argument(
        "--record",
        action="store_true",
        help="add the text to samples.jsonl of the run, which `hpc-train report` shows",
    )
    return made


def run(arguments: Sequence[str]) -> int:
    """Run the verb; returns the exit code."""
    given = options().parse_args(arguments)
    from hpc_train.training.generate import SampleRecords, generate

    records = SampleRecords(given.checkpoint) if given.record else None
    written = []
    for piece in generate(
        given.checkpoint,
        given.prompt,
        tokens=given.tokens,
        temperature=given.temperature,
        seed=given.seed,
    ):
        print(piece, end="", flush=True)
        written.append(piece)
    print()
    if records is not None:
        records.add(given.prompt, "".join(written[1:]))
    return 0
