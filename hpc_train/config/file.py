"""Make a configuration from a YAML file and dotted options. An error names the wrong key."""

from __future__ import annotations

import functools
import os
import re
from argparse import SUPPRESS, ArgumentError
from collections.abc import Collection, Sequence
from dataclasses import fields
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

from hpc_train.config import ProfileSection, RunConfig, keys
from hpc_train.errors import ConfigError, fits, item_kinds

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser

DESCRIPTION = (
    "Train the model of a configuration file. --section.key options override the file. By default "
    "one process per node imports the libraries for all its ranks; with --cold each rank does."
)

SECTIONS: dict[str, Any] = {section.name: section.default_factory for section in fields(RunConfig)}
PATH_KEYS = (
    "run.dir", "data.path", "data.cache", "memory.offload", "checkpoint.resume",
    "checkpoint.weights",
)  # fmt: skip
"""Keys whose values are paths: ~ and variables of the environment are expanded in them."""
NEVER_EMPTY = ("run.dir", "data.cache", "checkpoint.resume")
"""Those of them in which an empty path would be the current folder."""
PARTS: dict[str, Any] = {"run.profile": ProfileSection}
"""Mappings inside of sections, which have keys of their own."""
KEYS = {
    f"{name}.{key.name}": key
    for name, section in {**SECTIONS, **PARTS}.items()
    for key in fields(section)
    if f"{name}.{key.name}" not in PARTS
}

PRINT = "--print_config"
HELP = "`hpc-train train --help` lists the options"


def _expected(key: str) -> str:
    from hpc_train.config.help import taken

    kind = taken(key)
    return f"{kind}; --{key}+ ITEM adds one to it" if kind == "a list" else kind


def check_file(path: Path) -> dict[str, Any]:
    """Read a file and check that it has known keys. `load` checks their values.

    Returns:
        The value of each key, such as "run.steps"; a file of comments has none.

    Raises:
        ConfigError: the file cannot be read, is no configuration, or has an unknown key.
    """
    if path.is_fifo():
        raise ConfigError(f"{path} is a pipe, which cannot be read twice", "write it to a file")
    tree, written = keys.read_with_texts(path, "configuration", keys.GIVE_PATH)
    found, texts = _flat(tree), _flat(written)
    for key, value in found.items():
        if kind := SECTIONS.get(key) or PARTS.get(key):
            raise ConfigError(
                f"{path}: {key} is {'empty' if value is None else repr(value)}",
                f"write its keys below it, such as {fields(kind)[0].name}:",
            )
        keys.check_key(key, KEYS, path)
        found[key] = _as_taken(value, texts[key], type_of(key))
    return found


def type_of(key: str) -> Any:
    """The type of a key's value."""
    section, _, name = key.rpartition(".")
    return get_type_hints({**SECTIONS, **PARTS}[section])[name]


def _as_taken(value: Any, text: Any, kind: Any) -> Any:
    """A value of a file, or its text where the key takes no such number, and no true or false.

    YAML reads a folder named 2024 as a number, and off as false.
    """
    if isinstance(value, dict):  # of a list of {path, weight}
        return value | {name: text[name] for name in value if name == "path"}
    for item_kind in item_kinds(kind) if isinstance(value, list) else ():
        return [_as_taken(*one, item_kind) for one in zip(value, text, strict=True)]
    return value if fits(value, kind) else text


def _flat(tree: dict[str, Any], section: str = "") -> dict[str, Any]:
    """The value of each key by its path: a file may have optimizer.lr beside optimizer."""
    found: dict[str, Any] = {}
    for name, value in tree.items():
        key = f"{section}.{name}" if section else str(name)
        # The keys of an unknown section tell which section was meant.
        inner = key in PARTS or (not section and key not in KEYS)
        if inner and isinstance(value, dict) and (value or key in SECTIONS or key in PARTS):
            found |= _flat(value, key)
        else:
            found[key] = value
    return found


def check_options(options: Sequence[str]) -> None:
    """Check the names of command-line options, --section.key VALUE or --section.key=VALUE.

    --section.key+ VALUE adds to a list.

    Raises:
        ConfigError: an unknown key, or a number that YAML reads as another one.
    """
    for option, following in zip(options, [*options, ""][1:], strict=True):
        name, equals, value = option.partition("=")
        if not name.startswith("--") or name in ("--help", PRINT):
            continue
        key = name[2:].removesuffix("+")
        if kind := SECTIONS.get(key) or PARTS.get(key):
            raise ConfigError(
                f"--{key} is a section", f"give its keys, such as --{key}.{fields(kind)[0].name}"
            )
        if key == "config":
            raise ConfigError("there is no option --config", "give CONFIG.yaml before all options")
        if key not in KEYS:
            remedy = keys.suggestion(key, KEYS, "--") or HELP
            raise ConfigError(f"unknown option --{key}", remedy)
        _check_number(key, value if equals else following)


def _check_number(key: str, value: Any) -> None:
    """Refuse texts that jsonargparse turns into other numbers."""
    expected = _expected(key) if isinstance(value, str) else ""
    if "number" in expected and keys.is_octal(value):
        raise keys.octal_error(key, value)
    if "number" in expected and "text" not in expected and keys.is_sexagesimal(value):
        raise ConfigError(f"{key} is {value}", f"it takes {expected}")


@functools.cache
def config_parser(*, documented: bool) -> ArgumentParser:
    """The command-line parser of a run's configuration, made from the dataclasses.

    Args:
        documented: whether the help has the text of every key. Reading these texts takes most of
            the time that the parser takes.
    """
    # Loaded here, because users' own loops load this module and need no parser.
    from jsonargparse import ArgumentParser, set_dumper, set_loader, set_parsing_settings

    from hpc_train.config.help import KeyHelp

    set_parsing_settings(docstring_parse_attribute_docstrings=documented)
    # Its own loader would read 1:30 in a list as 90, and 010 as 8.
    set_loader("hpc_train", keys.from_yaml, exceptions=keys.NOT_YAML)
    set_dumper("hpc_train", keys.to_yaml)
    made = ArgumentParser(
        prog="hpc-train train",
        usage="hpc-train train [CONFIG.yaml] [--section.key VALUE ...] [--cold]",
        description=DESCRIPTION,
        exit_on_error=False,
        formatter_class=KeyHelp,
        parser_mode="hpc_train",
    )
    made.add_argument("--config", action="config", help=SUPPRESS)  # for `load`
    for name, section in SECTIONS.items():
        made.add_argument(f"--{name}", type=section)
    return made


def split(arguments: Sequence[str]) -> tuple[str | None, Sequence[str]]:
    """Split arguments into the path of CONFIG.yaml, or None, and the options after it."""
    given = bool(arguments) and not arguments[0].startswith("-")
    return (arguments[0], arguments[1:]) if given else (None, arguments)


def separate(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split a verb's arguments into its own and the dotted options of the configuration."""
    own: list[str] = []
    options: list[str] = []
    target = own
    for word in arguments:
        if word.startswith("--"):
            name, equals, _ = word.partition("=")
            target = options if "." in name else own
            target.append(word)
            if equals:
                target = own
        else:
            target.append(word)
            if target is options:
                target = own  # an option has one value
    return own, options


def load(
    path: str | Path | None = None, options: Sequence[str] = (), later: Collection[str] = ()
) -> RunConfig:
    """Make a configuration from a YAML file and dotted options, which override the file.

    Args:
        path: the file; None takes the defaults.
        options: as on the command line: ["--run.steps", "100", "--model.layers=2"].
        later: keys of PATH_KEYS that stay as they are if they cannot be expanded here. The job that
            reads them may have their variables.

    Raises:
        ConfigError: a key or value is wrong; the message names it.
    """
    found = {} if path is None else check_file(Path(path))
    for key, value in found.items():
        _check_number(key, value)
    check_options(options)
    # Not as a path, which jsonargparse would read in the locale's encoding.
    given = [f"--config={keys.to_yaml(found)}"] if found else []
    try:
        printed = any(option.startswith(PRINT) for option in options)
        parsed = config_parser(documented=printed).parse_args([*given, *options])
    except ArgumentError as error:
        raise _explained(str(error)) from None
    tree = parsed.as_dict()
    for part, kind in PARTS.items():
        section, _, name = part.partition(".")
        tree[section][name] = kind(**tree[section][name])
    for key in PATH_KEYS:
        section, _, name = key.partition(".")
        if tree[section][name] is not None:
            tree[section][name] = expanded(key, tree[section][name], later)
        if tree[section][name] == "" and key in NEVER_EMPTY:
            raise ConfigError(f"{key} is empty", "give a path; . is the current folder")
    return RunConfig(**{name: make(**tree[name]) for name, make in SECTIONS.items()})


def paths_of(config: RunConfig) -> list[str]:
    """The values of PATH_KEYS that are set. Some may be other words, such as auto."""
    found = {key: [attrgetter(key)(config)] for key in PATH_KEYS}
    found["data.path"] = [*config.data.folders]
    return [path for paths in found.values() for path in paths if path]


def expanded(key: str, value: Any, later: Collection[str] = ()) -> Any:
    """A path with the home directory in place of ~, and the values of its variables.

    In a list, the path of each item. Items that have none stay as they are, and are refused later.

    Args:
        key: the key that has the path, for the message.
        value: the path.
        later: keys whose paths stay as they are if they cannot be expanded here.

    Raises:
        ConfigError: it cannot be expanded.
    """
    if isinstance(value, list):
        return [expanded(key, part, later) for part in value]
    if isinstance(value, dict):
        return value | {k: expanded(key, path, later) for k, path in value.items() if k == "path"}
    if not isinstance(value, str):
        return value
    if "\0" in value:
        raise ConfigError(f"{key} has the character NUL", "give a path")
    made = os.path.expandvars(value)
    unset = re.search(r"\$(?:\{(\w*)\}|(\w*))", made)
    why = f"the variable {unset[1] or unset[2]} is not set" if unset and unset[0] != "$" else ""
    if unset and not why:
        why = "$ begins the name of a variable, and none follows"
    if not why and made.startswith("~"):
        try:
            made = str(Path(made).expanduser())
        except RuntimeError:
            why = f"there is no user {Path(made).parts[0][1:]}"
    if not why:
        return made
    if key in later:
        return value
    raise ConfigError(f"{key} is {value!r}, but {why}", "correct it, or write it without ~ and $")


def _explained(message: str) -> ConfigError:
    """Turn the parser's message into one line that names the key, its value and what it takes."""
    line = " ".join(message.split())
    found = re.match(r'Parser key "([\w.]+)":.* (?:Got|Given) value: ?(.*)', line)
    if found and found[1] in KEYS:
        given = repr(found[2]) if found[2] else "empty"
        return ConfigError(f"{found[1]} is {given}", f"it takes {_expected(found[1])}")
    if found := re.match(r"unrecognized arguments: (\S+\.ya?ml)( |$)", line, re.IGNORECASE):
        return ConfigError(
            f"{found[1]} comes after other words", "give one file, before all options"
        )
    return ConfigError(line, HELP)
