"""What all verbs share: a parser whose mistakes are one line, types of numbers, the help."""

from __future__ import annotations

import re
import sys
from argparse import ArgumentParser, ArgumentTypeError, HelpFormatter, Namespace
from typing import TYPE_CHECKING, Any, NoReturn

from hpc_train.errors import UserError
from hpc_train.launch import IMAGE_TOOLS

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from rich.console import Console
    from rich.table import Table

EXIT_CODES = (
    "exit codes: 0 finished; 75 stopped early with a checkpoint, run it again to resume; "
    "2 the user's mistake; 130 interrupted by Ctrl-C; 1 any other error"
)


class Parser(ArgumentParser):
    """The options of one verb. A mistake in them is raised as an error that names the help.

    An option may be written with dashes in place of its underscores: --ranks-per-node.
    """

    lists = "options"
    """What its help lists."""

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Namespace | None = None
    ) -> tuple[Namespace, list[str]]:
        """Parse the arguments, whose options may have dashes."""
        words = sys.argv[1:] if args is None else args
        return super().parse_known_args([self._with_underscores(word) for word in words], namespace)

    def _with_underscores(self, word: str) -> str:
        name, equals, value = word.partition("=")
        option = f"--{name[2:].replace('-', '_')}"
        known = name.startswith("--") and option in self._option_string_actions
        return f"{option}{equals}{value}" if known else word

    def error(self, message: str) -> NoReturn:
        """Refuse the arguments.

        Raises:
            UserError: always.
        """
        raise UserError(message, f"`{self.prog} --help` lists the {self.lists}")


class WithExamples(HelpFormatter):
    """Keeps the lines of a text that has several, such as examples of commands."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return text if "\n" in text else super()._fill_text(text, width, indent)


def positive(text: str) -> int:
    """The value of an option that takes a whole number of 1 or more."""
    return _at_least(1, text)


def not_negative(text: str) -> int:
    """The value of an option that takes a whole number of 0 or more."""
    return _at_least(0, text)


def gigabytes(text: str) -> int:
    """The value of an option that takes an amount of memory: 64, 64G, 64GB or 2TB."""
    found = re.fullmatch(r"([1-9]\d*)(g|t)?b?", text, re.ASCII | re.IGNORECASE)
    if not found:
        raise ArgumentTypeError(f"{text!r} is not an amount of memory, such as 64GB")
    return int(found[1]) * (1000 if (found[2] or "").lower() == "t" else 1)


def _at_least(least: int, text: str) -> int:
    if not text.isdecimal() or int(text) < least:
        raise ArgumentTypeError(f"{text!r} is not a whole number of {least} or more")
    return int(text)


COUNT: dict[str, Any] = {"type": positive, "metavar": "N"}


def add_image_options(parser: Parser) -> None:
    """Add the options of verbs that run an image."""
    parser.add_argument(
        "--image_tool",
        choices=IMAGE_TOOLS,
        help="the program that runs the image (default: the first that is here)",
    )
    parser.add_argument(
        "--image_options",
        action="append",
        default=[],
        metavar="TEXT",
        help="further words for that program, such as '--bind /scratch'",
    )


def join_values(arguments: Sequence[str], options: Sequence[str]) -> list[str]:
    """Join each value of some options to its option, as in --directive=--qos=debug.

    The word after such an option is its value, whatever it begins with. Further values follow up to
    the next word that begins with a dash.
    """
    words: list[str] = []
    option = ""
    for word in arguments:
        if option and (words[-1] == option or not word.startswith("-")):
            if words[-1] == option:
                words.pop()
            words.append(f"{option}={word}")
        else:
            words.append(word)
            option = word if word.replace("-", "_").replace("__", "--", 1) in options else ""
    return words


def wants_help(arguments: Sequence[str]) -> bool:
    """Whether the user asks for help."""
    return bool({"-h", "--help"} & set(arguments))


def show_help(parser: ArgumentParser) -> int:
    """Print a verb's help; returns the exit code."""
    parser.print_help()
    return 0


def make_console(width: int | None = None) -> Console:
    """A console of rich on standard output that leaves numbers and paths uncoloured.

    If nobody reads the output any more, printing raises BrokenPipeError, as Python's `print` does.

    Args:
        width: columns of the output; None takes the terminal's.
    """
    from rich.console import Console

    class Piped(Console):
        def on_broken_pipe(self) -> None:
            raise

    return Piped(highlight=False, width=width)


def plain_table(
    heads: Sequence[str], rows: Iterable[Sequence[str]], *, figures: bool = False
) -> Table:
    """A table without styles: under Open MPI ranks see a terminal where a batch log is written.

    Args:
        heads: the heads of the columns.
        rows: the texts of each row.
        figures: whether no text is wrapped, and columns with a head are aligned right.
    """
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="")
    for head in heads:
        table.add_column(head, justify="right" if figures and head else "left", no_wrap=figures)
    for row in rows:
        table.add_row(*row)
    return table
