"""The help of `hpc-train train`: every key in plain words."""

from __future__ import annotations

import re
from typing import Literal

import pytest
from jsonargparse.typing import PositiveInt

from hpc_train.config.file import KEYS
from hpc_train.config.help import kind_in_words
from tests.programs import hpc_train as command
from tests.programs import run

OF_PYTHON = re.compile(
    r"\b(type:|null|None|True|False|Literal|int|str|float|bool|tuple|PositiveInt)\b|list\[|\[\]|\(\)"
)


@pytest.fixture(scope="module")
def texts():
    """The help of each key, as one line."""
    words = " ".join(run(*command("train", "--help")).stdout.split())
    parts = re.split(r"(?:^| )--([a-z]+(?:\.\w+)+)(?=[ ,])(?!\+)", words.partition("options:")[2])
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_no_key_is_explained_by_python(texts):
    assert texts.keys() == KEYS.keys()
    assert not {key: text for key, text in texts.items() if OF_PYTHON.search(text)}


def test_every_key_says_its_default_or_what_happens_without_one(texts):
    silent = {
        key
        for key, text in texts.items()
        if not re.search("default: [^ )]|By default|Every training needs", text)
    }
    assert not silent


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("run.log_every", "N Number of steps between two records of metrics.jsonl. "
         "(a whole number; default: 10)"),
        ("run.hang_timeout", "(a number; default: 1800)"),
        ("run.dir", "(a path; default: runs/run)"),
        ("gradients.compression", "TEXT How gradients are compressed between nodes: none, fp16, "
         "bf16, topk:RATIO or powersgd:RANK. (text; default: none)"),
        ("run.deterministic", "{true,false} Make repeated runs of one layout give the same bits. "
         "(default: false)"),
        ("parallel.schedule", "micro-batches. (default: 1f1b)"),
        ("data.micro_batch", "found by trial. (a whole number or auto)"),
        ("checkpoint.include", "By default all are. (a list)"),
    ],
)  # fmt: skip
def test_kinds_and_defaults_are_told_in_words(texts, key, said):
    assert said in texts[key]


def test_kinds_of_keys_to_come_have_words_too():
    assert kind_in_words(PositiveInt) == "a whole number"
    assert kind_in_words(tuple[float, ...]) == "a list"
    assert kind_in_words(Literal["auto"] | int | None) == "a whole number or auto"
