"""Reads the values of `gradients.compression`, without torch."""

from __future__ import annotations

import re
from typing import NamedTuple

from hpc_train.errors import ConfigError

TAKES = (
    "it takes none, fp16, bf16, topk:RATIO (above 0, at most 1) or powersgd:RANK (1 or more); "
    "with :STEPS at the end, topk and powersgd compress fully after STEPS steps"
)
FORMS = {
    "topk": re.compile(r"topk(?::(\d*\.?\d+(?:e-?\d+)?)(?::(\d+))?)?", re.ASCII),
    "powersgd": re.compile(r"powersgd(?::(\d+)(?::(\d+))?)?", re.ASCII),
}
DEFAULTS = {"topk": "0.01", "powersgd": "4"}


class Scheme(NamedTuple):
    """A value of `gradients.compression`, taken apart.

    Args:
        kind: "none", "fp16", "bf16", "topk" or "powersgd".
        number: topk's ratio or powersgd's rank.
        steps: number of steps before the compression is full.
    """

    kind: str
    number: float = 0.0
    steps: int = 0


def depends_on_buckets(text: str) -> bool:
    """Whether a compression chooses what it sends by bucket, so that their size changes results."""
    return parse_scheme(text).kind in FORMS


def parse_scheme(text: str) -> Scheme:
    """Read a value such as "none", "fp16", "bf16", "topk", "topk:0.01" or "powersgd:4:100".

    Raises:
        ConfigError: the text names no compression.
    """
    if text in ("none", "fp16", "bf16"):
        return Scheme(text)
    for kind, form in FORMS.items():
        if found := form.fullmatch(text):
            number = float(found[1] or DEFAULTS[kind])
            if number > 0 and (number <= 1 or kind == "powersgd"):
                return Scheme(kind, number, int(found[2] or 0))
    raise ConfigError(f"gradients.compression is {text!r}", TAKES)
