"""Checks that the fields of a dataclass have values of their types: programs may give anything."""

from __future__ import annotations

import types
from numbers import Integral, Real
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from hpc_train.errors import ConfigError

KINDS = ((bool, "true or false"), (int, "a whole number"), (float, "a number"), (str, "text"))
NUMBERS: dict[Any, type] = {int: Integral, float: Real}


def check_kinds(given: Any, name: str) -> None:
    """Check the fields that are numbers, texts, true or false, or one of a few values.

    Args:
        given: the dataclass.
        name: what it is called in the message.

    Raises:
        ConfigError: a field has another value.
    """
    for key, kind in get_type_hints(type(given)).items():
        value = getattr(given, key)
        if not _fits(value, kind):
            raise ConfigError(f"{name}.{key} is {value!r}", f"give {kind_in_words(kind)}")


def _fits(value: Any, kind: Any) -> bool:
    if get_origin(kind) is Literal:
        return any(value == one and type(value) is type(one) for one in get_args(kind))
    if get_origin(kind) in (Union, types.UnionType):
        return any(_fits(value, one) for one in get_args(kind))
    if kind in NUMBERS:
        return isinstance(value, NUMBERS[kind]) and not isinstance(value, bool)
    return not isinstance(kind, type) or isinstance(value, kind)


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
    return next((words for known, words in KINDS if issubclass(base, known)), base.__name__)
