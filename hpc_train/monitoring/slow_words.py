"""The sentences about slow ranks, without their subject."""

from __future__ import annotations

import math

from hpc_train.errors import plural
from hpc_train.times import time_text


def say_data(mine: float, others: float) -> str:
    """A rank whose data takes long."""
    return f"its data takes {time_text(mine)} of each step, that of others {time_text(others)}"


def _computing(mine: float, others: float) -> str:
    return f"it computes {time_text(mine)} in each step, others {time_text(others)}"


def say_load(computing: float, processor: float, stolen: float, switches: float) -> str:
    """A rank whose processor others use."""
    by = "other programs use its processor"
    if stolen > (computing - processor) / 2:
        by = "the hypervisor gives its processor to other machines"
    often = f", which it loses {switches:.0f} times" if switches >= 1 else ""
    return (
        f"it computes {time_text(computing)} in each step but has a processor only for "
        f"{time_text(processor)} of that, because {by}{often}"
    )


def say_stands_still(mine: float, others: float, lost: float) -> str:
    """A rank that waits for something that is no rank."""
    return (
        f"{_computing(mine, others)}, and it stands still for {time_text(lost)} of that, "
        "although a processor is free"
    )


def say_pages(mine: float, others: float, pages: float, *, read: bool) -> str:
    """A rank that gets many new pages of memory."""
    what = "it reads back from a disk" if read else "the system has to give it"
    more = plural(round(pages), "more page", "more pages")
    return f"{_computing(mine, others)}, and {what} {more} of memory in each step"


def say_memory(mine: float, others: float, ratio: float) -> str:
    """A rank whose memory is slow."""
    return (
        f"{_computing(mine, others)}, and a copy in its memory takes {ratio:.1f} times as long, "
        "while arithmetic does not"
    )


def say_compute(
    mine: float,
    others: float,
    slower: float,
    clock: tuple[float, float],
    heat: float,
    *,
    tried: bool,
) -> str:
    """A rank that needs longer to compute.

    Args:
        mine: seconds of computing.
        others: seconds of computing of the others.
        slower: how much longer a trial of arithmetic takes there; 0: it does not.
        clock: the frequencies of its processor and of the others' in Hz, or NaN.
        heat: the temperature of its processor, or NaN.
        tried: whether there was a trial.
    """
    text = _computing(mine, others)
    if slower:
        text += f", and a product of matrices takes {slower:.1f} times as long there"
        if not math.isnan(clock[0]) and not math.isnan(clock[1]):
            text += f", at {clock[0] / 1e9:.1f} GHz beside {clock[1] / 1e9:.1f} GHz"
        if not math.isnan(heat):
            text += f" and {heat:.0f} degrees Celsius"
    elif tried:
        text += ", although its processor is as fast as others: it has more work"
    return text


def say_link(host: str, mine: float, others: float) -> str:
    """A host whose link is slow."""
    return (
        f"a message of 1 MiB between {host} and its neighbours takes {time_text(mine)}, between "
        f"other hosts {time_text(others)}"
    )
