"""The configurations of runs, and in what they differ."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import compress
from pathlib import Path
from reprlib import Repr
from typing import Any

import yaml

MOST_VALUES = 2000  # of a configuration; it cannot have more, unless its file is not ours
MOST_CHARACTERS = 200_000  # of its text


class _Short(Repr):
    """Writes lists and mappings without what is long or deep; aliases of YAML can multiply it."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxlist, self.maxdict = 4, 20, 20
        self.maxstring = self.maxother = 200


def read_config(run: Path) -> tuple[str, dict[str, str]]:
    """The text of a run's configuration, and its values by dotted key; both empty if there is none.

    A value is a text, as YAML writes it. The elements of a long list have keys of their own, by
    their numbers: data.path.22.weight.
    """
    try:
        text = (run / "config.yaml").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "", {}
    text = text[:MOST_CHARACTERS]
    try:
        tree = yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, RecursionError):
        return text, {}
    values: dict[str, str] = {}
    for key, value in _flat(tree, ""):
        if len(values) >= MOST_VALUES:
            break
        values[key] = value
    return text, values


def _flat(tree: Any, prefix: str, depth: int = 0) -> Iterator[tuple[str, str]]:
    if isinstance(tree, dict) and tree and depth < 20:
        for key, value in tree.items():
            yield from _flat(value, f"{prefix}.{key}" if prefix else str(key), depth + 1)
    elif isinstance(tree, list) and depth < 20 and "..." in _word(tree):  # else two would be alike
        for number, value in enumerate(tree):
            yield from _flat(value, f"{prefix}.{number}" if prefix else str(number), depth + 1)
    elif prefix:
        yield prefix, _word(tree)


def _word(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return value if isinstance(value, str) else _Short().repr(value)


def config_differences(configs: Sequence[dict[str, str]]) -> dict[str, list[str]]:
    """The keys whose values are not the same in all configurations, with the value of each.

    Keys that say where a run writes are left out. A key that a configuration lacks has "". An empty
    configuration is that of a run without one: it has "" everywhere, and makes no difference.
    """
    keys = dict.fromkeys(key for config in configs for key in config if key != "run.dir")
    rows = {key: [config.get(key, "") for config in configs] for key in keys}
    there = [bool(config) for config in configs]
    return {key: row for key, row in rows.items() if len(set(compress(row, there))) > 1}


def words_as_options(words: Sequence[str]) -> dict[str, str]:
    """The options of a task by their key, from words such as --optimizer.lr=1e-3."""
    options: dict[str, str] = {}
    key = ""
    for word in map(str, words):
        if word.startswith("--"):
            key, equals, value = word[2:].partition("=")
            options[key] = value if equals else ""
        elif key:
            options[key] = f"{options[key]} {word}".strip()
    return options
