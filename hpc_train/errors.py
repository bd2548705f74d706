"""The exception tree: every error that this package raises on purpose.

    HpcTrainError               exit code 1
    ├── UserError               exit code 2: something the user can mend
    │   ├── ConfigError         a key, a value, or values that do not fit together
    │   ├── DataError           shards, manifests, input files
    │   │   └── StorageError    a file system that is full, or fails, or forbids
    │   ├── CheckpointMismatch  a sound checkpoint that belongs to another model or run
    │   ├── ClaimError          a run directory that another job writes to
    │   ├── NotFiniteError      a training whose loss, gradients or state became infinite or NaN
    │   └── SetupError          a program, a library or a build that is missing or unfit
    ├── CheckpointError         a checkpoint that could not be written or read
    │   └── CheckpointUnreadable    the file system fails to read it; it need not be damaged
    ├── DivergenceError         ranks that should hold the same bits do not
    └── RankError               an unexpected exception on one rank, raised on all of them

`Stopped` is not an error: the run ended early with a checkpoint (exit code 75, EX_TEMPFAIL of
BSD's sysexits.h). The same command resumes it.
"""

from __future__ import annotations

import errno
import os
import sys
import types
from collections.abc import Sequence
from contextlib import suppress
from io import FileIO
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Literal, TextIO, Union, get_args, get_origin, get_type_hints

EXIT_FAILURE = 1
EXIT_USER = 2
EXIT_INTERRUPTED = 128 + 2  # as a shell reports a program that SIGINT has ended
EXIT_STOPPED = os.EX_TEMPFAIL  # 75
FINAL_CODES = (0, EXIT_USER, EXIT_STOPPED)  # a job that ends with one of these is not restarted

_FULL = (errno.ENOSPC, errno.EDQUOT)
_REMEDIES = {
    **dict.fromkeys(_FULL, "free some space, or give another path"),
    **dict.fromkeys(
        (errno.EACCES, errno.EPERM, errno.EROFS), "get permission for it, or give another path"
    ),
    **dict.fromkeys(
        (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ELOOP), "give another path"
    ),
    errno.ENAMETOOLONG: "give a shorter name",
}
_KINDS = ((bool, "true or false"), (int, "a whole number"), (float, "a number"), (str, "text"))
_NUMBERS: dict[Any, type] = {int: Integral, float: Real}
_UNITS = (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))
_NO_USERS_CODE = {"hpc_train", "rich", *sys.stdlib_module_names}


def plural(count: int, one: str, several: str = "") -> str:
    """A count with its noun, for a message: "1 row", "2 rows".

    Args:
        count: the count.
        one: the noun for one thing.
        several: the noun for several things; by default with an s, or es.
    """
    regular = f"{one}es" if one.endswith("ch") else f"{one}s"
    return f"{count} {one if count == 1 else several or regular}"


def size_text(nbytes: float) -> str:
    """A number of bytes for a message, with at most four digits: "1.5 GiB", "64 MiB", "8 B"."""
    for name, unit in _UNITS:
        if nbytes >= unit:
            return f"{nbytes / unit:.4g} {name}"
    return f"{nbytes:.0f} B"


def some_of(names: Sequence[str], most: int = 3) -> str:
    """The first of some names for a message: "a, b and 3 more".

    Args:
        names: the names.
        most: number of names that are shown at most.
    """
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def first_line(error: BaseException) -> str:
    """The first line of an error's text; the name of its class if it has no text."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


class HpcTrainError(Exception):
    """An error with a cause and, if there is one, a remedy.

    Args:
        cause: says what is wrong, with the values concerned.
        remedy: says what the user can do about it; "" if nothing.

    Attributes:
        agreed: whether ranks raise the error together (see `mpi/agreement.py`).
        agreed_ranks: number of these ranks; 0 if they are all ranks of the job.
        exit_code: the exit code of a program that ends with the error.
    """

    exit_code = EXIT_FAILURE
    agreed = False
    agreed_ranks = 0

    def __init__(self, cause: str, remedy: str = "") -> None:
        super().__init__(cause, remedy)
        self.cause = cause
        self.remedy = remedy

    def agreed_by(self, ranks: int) -> bool:
        """Whether this number of ranks, which is that of the job, raise the error together."""
        return self.agreed and self.agreed_ranks in (0, ranks)

    def __str__(self) -> str:
        return f"{self.cause}: {self.remedy}" if self.remedy else self.cause


class UserError(HpcTrainError):
    """An error that the user can mend."""

    exit_code = EXIT_USER


class ConfigError(UserError):
    """A configuration key or value is wrong, or two of them do not fit together."""


class DataError(UserError):
    """Input files, shards or manifests are missing, damaged or do not match."""


class StorageError(DataError):
    """A file system is full, or fails, or forbids it: the same command may work later."""


class CheckpointMismatch(UserError):
    """A sound checkpoint belongs to another model, data set or run."""


class ClaimError(UserError):
    """Another job writes to the run directory."""


class NotFiniteError(UserError):
    """A loss, a gradient's norm or the state is infinite or not a number."""


class SetupError(UserError):
    """A program, a library or a build is missing or does not fit."""


class CheckpointError(HpcTrainError):
    """A checkpoint could not be written or read."""


class CheckpointUnreadable(CheckpointError):
    """The file system fails to read a checkpoint, which need not be damaged."""


class DivergenceError(HpcTrainError):
    """Ranks that should hold the same bits do not: one has computed or stored wrong ones."""


class RankError(HpcTrainError):
    """An unexpected exception on one rank; its traceback is in that rank's log."""


OF_DATA = (DataError, RankError)
"""Errors of the user's data and functions. They are no sign that the state of training is wrong."""


class ReadNote(str):
    """A note on an error: what was being read, such as "sample 3 of step 2"."""


def cause_in_words(error: BaseException) -> str:
    """An error for a record: the cause of one of ours, or the error as Python shows it."""
    return error.cause if isinstance(error, HpcTrainError) else repr(error)


def error_in_words(error: BaseException) -> str:
    """An error for a message: what was being read, the error's class and its text."""
    places = [note for note in getattr(error, "__notes__", ()) if isinstance(note, ReadNote)]
    return ": ".join([*places[-1:], type(error).__name__, error_text(error)])


def error_text(of: object) -> str:
    """The text of an error, or of a part of one."""
    try:
        return str(of)
    except Exception as error:  # noqa: BLE001  # a user's own __str__ may fail
        return f"({type(error).__name__} in its message)"


def unwritable(directory: str | os.PathLike[str], error: OSError) -> ConfigError:
    """The error for a run directory in which something cannot be written."""
    if isinstance(error, FileExistsError) and (path := Path(error.filename)).is_symlink():
        return ConfigError(
            f"{path} is a link to {path.readlink()}, where no folder is",
            "restore that folder, or remove the link",
        )
    named = "" if error.filename is None else f": {error.filename}"
    return ConfigError(
        f"{directory} cannot be written ({error.strerror}{named})",
        remedy_for(error, "give a folder that you may write to, or free space"),
    )


def remedy_for(error: OSError, otherwise: str) -> str:
    """What to do about an error of the file system.

    Args:
        error: the error.
        otherwise: what to do if the error's number does not tell.
    """
    return _REMEDIES.get(error.errno or 0, otherwise)


def file_error(error: BaseException) -> HpcTrainError | None:
    """The line for a file that the system refuses to this package; None for any other error.

    What the user can mend is a StorageError. A file system that fails for a while gives an error
    after which a job is restarted. An error in the user's own code needs its traceback.
    """
    if not isinstance(error, OSError) or not _raised_here(error):
        return None
    path = error.filename if error.filename2 is None else error.filename2
    if path is None and error.errno in _FULL:  # writing through a descriptor names no file
        what = "a file" if _takes_output(sys.stdout) else "standard output"
        return StorageError(f"{what} cannot be written ({error.strerror})", _REMEDIES[error.errno])
    if not isinstance(path, str | bytes | os.PathLike) or error.errno is None:
        return None
    cause = f"{os.fsdecode(path)} cannot be used ({error.strerror})"
    if error.errno in _REMEDIES:
        return StorageError(cause, _REMEDIES[error.errno])
    return HpcTrainError(cause, "look whether its file system works, and try it again")


def _takes_output(stream: TextIO) -> bool:
    """Whether a stream has taken what was written to it, and takes what its buffer still holds."""
    try:
        stream.flush()
    except OSError:
        return False
    raw = getattr(getattr(stream, "buffer", None), "raw", None)
    return not isinstance(raw, Output) or raw.failed is None


def _raised_here(error: BaseException) -> bool:
    """Whether all code between an error and where it was caught is this package's or Python's."""
    trace = error.__traceback__
    while trace:
        module = str(trace.tb_frame.f_globals.get("__name__"))
        if module.partition(".")[0] not in _NO_USERS_CODE:
            return False
        trace = trace.tb_next
    return True


class Stopped(Exception):
    """The run stopped early, on a signal or before its time limit, with a checkpoint.

    Args:
        step: the last finished step, which the checkpoint has; 0 before the first step.
        reason: name of the cause of the stop, such as "SIGTERM" or "the file DIRECTORY/STOP".
        saved: whether a checkpoint of that step was written.
    """

    exit_code = EXIT_STOPPED

    def __init__(self, step: int, reason: str, *, saved: bool = True) -> None:
        super().__init__(step, reason)
        self.step = step
        self.reason = reason
        self.saved = saved

    def __str__(self) -> str:
        if not self.step:
            return f"stopped by {self.reason} before the first step"
        written = ", checkpoint written" if self.saved else ""
        return f"stopped by {self.reason} after step {self.step}{written}"

    def remedy(self, again: str) -> str:
        """How the run goes on: by `again`, once what keeps it from that is gone."""
        first = "remove the file, and " if self.reason.startswith("the file ") else ""
        return f"{first}{again} resumes from there"


class Output(FileIO):
    """A standard stream that remembers the error of its last write, if it has failed.

    `print_line` and argparse let such an error pass, and a long text is then in no buffer any more.
    """

    failed: OSError | None = None

    def write(self, data: Any) -> int | None:  # type: ignore[override]
        """Write bytes; returns their number."""
        try:
            written = super().write(data)
        except OSError as error:
            self.failed = error
            raise
        self.failed = None
        return written


def print_line(text: str, stream: TextIO | None = None) -> None:
    """Print a line on a stream, standard output by default, at once and by one write.

    `print` writes the end of a line by itself, and what another rank prints may come before it.
    A stream that cannot be written, such as a file on a full disk, ends no job. What finds no room
    comes with a later line, as far as the stream's buffer keeps it.
    """
    stream = sys.stdout if stream is None else stream
    with suppress(OSError):
        try:
            print(f"{text}\n", end="", file=stream, flush=True)
        except UnicodeEncodeError:  # a character that the stream's encoding lacks
            shown = text.encode(stream.encoding, "backslashreplace").decode(stream.encoding)
            print(f"{shown}\n", end="", file=stream, flush=True)


def print_error(error: HpcTrainError | str) -> None:
    """Print an error as one line on standard error."""
    print_line(f"hpc-train: error: {' '.join(str(error).split())}", sys.stderr)


def told_interrupted() -> int:
    """Say that Ctrl-C has ended the program; returns the exit code."""
    print_line("hpc-train: interrupted", sys.stderr)
    return EXIT_INTERRUPTED


def check_kinds(given: Any, name: str) -> None:
    """Check the fields that are numbers, texts, true or false, lists, or one of a few values.

    Args:
        given: the dataclass.
        name: the name of the dataclass in the message.

    Raises:
        ConfigError: a field has another value.
    """
    for key, kind in get_type_hints(type(given)).items():
        value = getattr(given, key)
        if fits(value, kind):
            if isinstance(value, Integral) and abs(int(value)) >= 1 << 63:
                raise ConfigError(f"{name}.{key} is {value}", "give a number below 2**63")
            continue
        for item_kind in item_kinds(kind) if isinstance(value, list | tuple) else ():
            wrong = next(item for item in value if not fits(item, item_kind))
            raise ConfigError(
                f"{name}.{key} has {wrong!r} in its list", f"give {kind_in_words(item_kind)}"
            )
        what = "empty" if value is None else repr(value)
        raise ConfigError(f"{name}.{key} is {what}", f"give {kind_in_words(kind)}")


def item_kinds(kind: Any) -> list[Any]:
    """The types of the items of the lists that a type allows."""
    lists = [one for one in (kind, *get_args(kind)) if get_origin(one) is list]
    return [item for one in lists for item in get_args(one)]


def fits(value: Any, kind: Any) -> bool:
    """Whether a value has a type, as `check_kinds` compares them."""
    if kind is Any:
        return True
    if get_origin(kind) is Literal:
        return any(value == one and type(value) is type(one) for one in get_args(kind))
    if get_origin(kind) in (Union, types.UnionType):
        return any(fits(value, one) for one in get_args(kind))
    if kind in _NUMBERS:
        return isinstance(value, _NUMBERS[kind]) and not isinstance(value, bool)
    base = get_origin(kind) or kind
    if base is list:
        listed = isinstance(value, list | tuple)
        return listed and all(fits(item, one) for one in get_args(kind) for item in value)
    return not isinstance(base, type) or isinstance(value, base)


def kind_in_words(kind: Any) -> str:
    """A type in words: "a whole number" for int, and for int | None."""
    choices = get_args(kind)
    if get_origin(kind) is Literal:
        return f"one of {', '.join(map(str, choices))}" if choices[1:] else str(choices[0])
    if get_origin(kind) in (Union, types.UnionType):
        words = {kind_in_words(choice) for choice in choices if choice is not types.NoneType}
        return " or ".join(sorted(words))
    base = get_origin(kind) or kind
    if issubclass(base, list | tuple):
        return "a list"
    return next((words for known, words in _KINDS if issubclass(base, known)), base.__name__)
