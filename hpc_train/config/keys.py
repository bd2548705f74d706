"""Mappings in YAML files, for every kind of file: how one is read, and how its keys are checked."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import yaml

from hpc_train.errors import ConfigError

NOT_YAML = (yaml.YAMLError, ValueError, LookupError, AttributeError, RecursionError)
"""What PyYAML raises for a text that is no YAML, for instance for !!int x."""
GIVE_PATH = "give the path of a YAML file"


class _Loader(yaml.SafeLoader):
    """Reads as texts what YAML 1.1 turns into other things: 1:30 (90), 010 (8), and dates."""

    def construct_yaml_int(self, node: yaml.ScalarNode) -> Any:
        """The whole number of a text, or else the text."""
        other = ":" in node.value or is_octal(node.value)
        return node.value if other else super().construct_yaml_int(node)

    def construct_yaml_float(self, node: yaml.ScalarNode) -> Any:
        """The number of a text, or else the text."""
        return node.value if ":" in node.value else super().construct_yaml_float(node)

    def construct_text(self, node: yaml.ScalarNode) -> Any:
        """The text as it stands in the file."""
        return node.value


class _TextLoader(_Loader):
    """Reads each number, and on, off, true and false, as the text that stands in the file."""


class _Dumper(yaml.SafeDumper):
    """Writes texts so that `_Loader` reads them as texts again."""


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)
_Loader.add_constructor("tag:yaml.org,2002:float", _Loader.construct_yaml_float)
_Loader.add_constructor("tag:yaml.org,2002:timestamp", _Loader.construct_text)
for _name in ("bool", "int", "float"):
    _TextLoader.add_constructor(f"tag:yaml.org,2002:{_name}", _TextLoader.construct_text)
for _kind in (_Loader, _TextLoader, _Dumper):
    # YAML 1.1 takes 1e-3 for a text.
    _kind.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(r"[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"),
        list("-+0123456789"),
    )


def from_yaml(text: str) -> Any:
    """What a text of YAML says. 1:30, 010 and dates are texts in it, and 1e-3 is a number."""
    return yaml.load(text, _Loader)


def to_yaml(tree: Any) -> str:
    """A text of YAML that `from_yaml` reads back."""
    return yaml.dump(tree, Dumper=_Dumper, sort_keys=False)


def read_mapping(path: Path, what: str, missing: str = GIVE_PATH) -> dict[str, Any]:
    """Read the mapping that a YAML file holds; an empty file holds an empty one.

    Args:
        path: the file.
        what: what the file should be, such as "machine description".
        missing: what the user can do if there is no such file.

    Raises:
        ConfigError: the file cannot be read, has a key twice, or does not hold a mapping.
    """
    return read_with_texts(path, what, missing)[0]


def read_with_texts(path: Path, what: str, missing: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read the mapping that a YAML file holds, as `read_mapping` does.

    Returns:
        The mapping; and the same one with the text of each number, and of on, off, true and false.

    Raises:
        ConfigError: the file cannot be read, has a key twice, or does not hold a mapping.
    """
    try:
        text = path.read_text(encoding="utf-8")
        tree, texts = from_yaml(text), yaml.load(text, _TextLoader)
    except FileNotFoundError:
        raise ConfigError(f"there is no {what} {path}", missing) from None
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}", f"give the path of a {what}") from None
    except NOT_YAML as error:
        raise ConfigError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    _check_text(text, path)
    if tree is not None and not isinstance(tree, dict):
        raise ConfigError(f"{path} is not a {what}", "write it as key: value")
    return tree or {}, texts or {}


def is_octal(text: str) -> bool:
    """Whether YAML reads a text as an octal number, such as 010 as 8."""
    return bool(re.fullmatch("[-+]?0[0-7_]+", text))


def is_sexagesimal(text: str) -> bool:
    """Whether YAML 1.1 reads a text as a number of base 60, such as 1:30 as 90."""
    return bool(re.fullmatch(r"[-+]?[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?", text))


def octal_error(name: str, text: str, where: str = "") -> ConfigError:
    """The error of a key whose value is an octal number."""
    return ConfigError(
        f"{where}{name} is {text}, which YAML reads as an octal number",
        "write it without the zero in front",
    )


def _check_text(text: str, path: Path) -> None:
    """Refuse what YAML takes without a word: the last one of two equal keys, and 010 as 8."""
    names: set[str] = set()
    seen: set[int] = set()
    left: list[tuple[str, Any]] = [("", yaml.compose(text, yaml.SafeLoader))]
    while left:
        name, node = left.pop()
        if id(node) in seen:  # an alias, perhaps within what it stands for
            continue
        seen.add(id(node))
        if node is not None and node.tag.endswith(":int") and is_octal(node.value):
            raise octal_error(name, node.value, f"{path}: ")
        if isinstance(node, yaml.SequenceNode):
            left += [(f"{name}[{place}]", one) for place, one in enumerate(node.value)]
        elif isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                own = f"{name}.{key.value}" if name else str(key.value)
                if own in names:
                    raise ConfigError(
                        f"{path} has the key {own} twice, again in line {key.start_mark.line + 1}",
                        "keep one, with all that belongs to it",
                    )
                names.add(own)
                left.append((own, value))


def check_key(key: str, known: Collection[str], file: Path | None = None) -> None:
    """Refuse a key that does not exist.

    Args:
        key: its path, such as "run.steps".
        known: the paths of all keys that exist.
        file: the file that has the key; None on a command line.

    Raises:
        ConfigError: the key is unknown; the message names the nearest known one.
    """
    if key not in known:
        raise ConfigError(
            _in_file(file, f"unknown key {key}"),
            suggestion(key, known) or f"the file's top has {', '.join(_tops(known))}",
        )


def check_fields(
    tree: object,
    kind: type,
    file: Path,
    section: str = "",
) -> dict[str, Any]:
    """Check that a value is a mapping whose keys are the fields of a dataclass.

    Args:
        tree: the value.
        kind: the dataclass. A field without a default must be in the mapping.
        file: the file that has the mapping.
        section: the path of the mapping in the file; "" is the whole file.

    Returns:
        A copy of the mapping.

    Raises:
        ConfigError: it is no mapping, or a key is unknown or missing.
    """
    before = f"{section}." if section else ""
    names = [field.name for field in fields(kind)]
    if not isinstance(tree, dict):
        raise ConfigError(
            _in_file(file, f"{section} is {tree!r}"),
            f"write its keys below it, such as {names[0]}:",
        )
    for key in tree:
        check_key(f"{before}{key}", [before + name for name in names], file)
    for field in fields(kind):
        required = field.default is MISSING and field.default_factory is MISSING
        if required and field.name not in tree:
            raise ConfigError(_in_file(file, f"the key {before}{field.name} is missing"))
    return dict(tree)


def _in_file(file: Path | None, text: str) -> str:
    return text if file is None else f"{file}: {text}"


def suggestion(key: str, known: Collection[str], before: str = "") -> str:
    """Say which key may have been meant by an unknown one; "" if none is like it.

    Args:
        key: its path. Without a section it may be the last part of one.
        known: the paths of all keys that exist.
        before: stands before each key that is named, such as the dashes of an option.
    """
    section, _, name = key.rpartition(".")
    beside = {
        _last(other): other
        for other in reversed([*known])
        if not section or other.rpartition(".")[0] == section
    }
    near = [other for other in beside.values() if _last(other) == name]
    near += [beside[match] for match in difflib.get_close_matches(name, beside, n=1)]
    near += [other for other in known if _last(other) == name]  # the right key, another section
    near += difflib.get_close_matches(key, known, n=1, cutoff=0.8)
    if near:
        return f"did you mean {before}{near[0]}?"
    return f"{section} has {', '.join(reversed(beside))}" if section and beside else ""


def _tops(known: Collection[str]) -> Collection[str]:
    return dict.fromkeys(other.partition(".")[0] for other in known)


def _last(key: str) -> str:
    return key.rpartition(".")[2]
