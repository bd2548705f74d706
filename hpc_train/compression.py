"""What `gradients.compression` may say: text alone, for the configuration and for own loops."""

from __future__ import annotations

import re
from typing import NamedTuple

from hpc_train.errors import ConfigError

TAKES = "it takes none, fp16, bf16, topk:RATIO (above 0, 1 at most) or powersgd:RANK (1 or more)"
NUMBER = r"[0-9]*\.?[0-9]+(?:e-?[0-9]+)?"


class Scheme(NamedTuple):
    """A kind of compression, and the ratio of topk or the rank of powersgd."""

    kind: str
    number: float | None = None


def parse(text: str) -> Scheme:
    """Read "none", "fp16", "bf16", "topk" or "topk:0.01", "powersgd" or "powersgd:4".

    Raises:
        ConfigError: it says something else.
    """
    kind, colon, number = text.partition(":")
    if not colon and kind in ("none", "fp16", "bf16"):
        return Scheme(kind)
    if kind == "topk" and (not colon or re.fullmatch(NUMBER, number)):
        ratio = float(number or 0.01)
        if 0 < ratio <= 1:
            return Scheme(kind, ratio)
    if kind == "powersgd" and (not colon or re.fullmatch("0*[1-9][0-9]*", number, re.ASCII)):
        return Scheme(kind, int(number or 4))
    raise ConfigError(f"gradients.compression is {text!r}", TAKES)
