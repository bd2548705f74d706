"""The help of the configuration's keys, in plain words.

Loaded only where the help is shown or a value is refused, because it loads jsonargparse.
"""

from __future__ import annotations

import types
from argparse import Action
from typing import Literal, Union, get_args, get_origin

from jsonargparse import DefaultHelpFormatter

from hpc_train.config.file import KEYS, PARTS, PATH_KEYS, SECTIONS, type_of
from hpc_train.config.mixture import FORM
from hpc_train.errors import kind_in_words

PLACES = {"a whole number": "N", "a number": "NUMBER"}
PRINTS = "Print the configuration that the file and all options make together, and exit."


class KeyHelp(DefaultHelpFormatter):
    """Says of each key what kind of value it takes, and its default if that is a value.

    Where no value is the default, the text of the key says what happens.
    """

    def _get_help_string(self, action: Action) -> str:
        key = action.dest
        if key not in KEYS:
            return PRINTS if key == "print_config" else super()._get_help_string(action)
        kind, default = taken(key), in_words(action.default)
        listed = action.metavar is not None and kind != "a list"  # the choices stand beside the key
        said = "; ".join([kind] * (not listed) + [f"default: {default}"] * bool(default))
        return f"{action.help} ({said})" if said else str(action.help)

    def add_argument(self, action: Action) -> None:
        """Add a key. The choices of one that may have no value are named without null."""
        if action.dest in SECTIONS or action.dest in PARTS:
            return  # its keys are given one by one
        if action.dest in KEYS and (choices := choices_of(action.dest)):
            action.metavar = choices
        super().add_argument(action)

    def _get_default_metavar_for_optional(self, action: Action) -> str:
        if action.dest in KEYS:
            return "PATH" if action.dest in PATH_KEYS else PLACES.get(taken(action.dest), "TEXT")
        return "FILE"


def taken(key: str) -> str:
    """The kind of value that a key takes, in words."""
    if key in PATH_KEYS:
        return f"a path, or a list of {FORM}" if key == "data.path" else "a path"
    return kind_in_words(type_of(key))


def choices_of(key: str) -> str:
    """The values of a key that takes one of a few, as argparse writes them; "" for other keys."""
    kinds = type_of(key)
    several = get_origin(kinds) in (Union, types.UnionType)
    real = [kind for kind in get_args(kinds) if kind is not types.NoneType] if several else [kinds]
    if real == [bool]:
        return "{true,false}"
    if len(real) == 1 and get_origin(real[0]) is Literal:
        return "{" + ",".join(map(str, get_args(real[0]))) + "}"
    return ""


def in_words(default: object) -> str:
    """A default value as it is written in a file; "" if there is no value."""
    if default is None or default in ("", [], ()):
        return ""
    if isinstance(default, bool):
        return str(default).lower()
    return f"{default:g}" if isinstance(default, float) else str(default)
