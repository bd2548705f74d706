"""The text of a study for a proposal, in plain sentences with numbers."""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal

from hpc_train.errors import plural
from hpc_train.scaling.summary import Figures, ScaleRow

NOT_MEASURED = "Prediction, not measured:"
SHARED = (
    "Caution: {shared}. So these figures say little about a machine whose nodes have cores of "
    "their own."
)


def paragraph(figures: Figures, name: str, steps: int, warmup: int, total_steps: int | None) -> str:
    """The text for a proposal.

    Args:
        figures: the figures of the study.
        name: what the training is called.
        steps: number of steps of each run, with the warm-up.
        warmup: number of steps that do not count.
        total_steps: steps of the whole training; None: not known.
    """
    rows = figures.measured
    first, last = rows[0], rows[-1]
    sentences = [_what(figures, name, steps - warmup, warmup)]
    if first is last:
        sentences.append(
            f"The median step took {in_digits(first.seconds)} s on {in_nodes(first.nodes)}."
        )
    else:
        sentences += _measured(figures, first, last)
    sentences.append(_cost(figures, first, last, total_steps))
    sentences += _energy(first, last)
    sentences += _predicted(figures, last)
    if figures.shared:
        sentences.append(SHARED.format(shared=figures.shared))
    return " ".join(sentences)


def _what(figures: Figures, name: str, counted: int, warmup: int) -> str:
    rows = figures.measured
    sizes = enumerated([str(row.nodes) for row in rows])
    noun = "nodes" if rows[-1].nodes > 1 else "node"
    per_node = rows[0].ranks // rows[0].nodes
    ranks = f"{plural(per_node, 'rank')} on each node"
    steps = plural(counted, "step of each run counts", "steps of each run count")
    times = enumerated(sorted({str(row.runs) for row in rows}, key=int), "or")
    how = f"{times} time{'s' * (times != '1')}"
    batch = f"{rows[0].batch} samples per step"
    batch = (
        f"weak scaling: {batch} on {in_nodes(rows[0].nodes)}, and in proportion on more"
        if figures.weak
        else f"strong scaling: {batch} on any number of nodes"
    )
    return (
        f"The training {name} was run on {sizes} {noun} with {ranks} ({batch}), {how} on each "
        f"number of nodes. {steps}, after {warmup} to warm up."
    )


def _measured(figures: Figures, first: ScaleRow, last: ScaleRow) -> list[str]:
    sentences = [
        f"The median step took {in_digits(first.seconds)} s ({_range(first)}) on "
        f"{in_nodes(first.nodes)} and {in_digits(last.seconds)} s ({_range(last)}) on "
        f"{in_nodes(last.nodes)}.",
        f"The speed-up from {in_nodes(first.nodes)} to {in_nodes(last.nodes)} is "
        f"{in_digits(last.speedup)}, which is a parallel efficiency of {percent(last.efficiency)}.",
    ]
    share = figures.serial_share
    if share is not None:
        law = (
            "by Gustafson's law the serial share of the work"
            if figures.weak
            else "by Amdahl's law the share of the time on one node that more nodes do not shorten"
        )
        known = figures.weak or first.nodes == 1
        sentences.append(_marked(f"{law} is {percent(share)}.", measured=known))
    return sentences


def _marked(sentence: str, *, measured: bool) -> str:
    """The sentence, with a mark in front of it if it tells what was not measured."""
    return sentence[0].upper() + sentence[1:] if measured else f"{NOT_MEASURED} {sentence}"


def _range(row: ScaleRow) -> str:
    what = f"{row.runs} runs" if row.runs > 1 else "quartiles"
    return f"{what}: {in_digits(row.low)} to {in_digits(row.high)}"


def _cost(figures: Figures, first: ScaleRow, last: ScaleRow, total_steps: int | None) -> str:
    text = (
        f"A million samples cost {in_digits(first.node_hours)} node-hours on "
        f"{in_nodes(first.nodes)}"
    )
    if last is not first:
        text += f" and {in_digits(last.node_hours)} on {in_nodes(last.nodes)}"
    if total_steps and not figures.weak:
        whole = total_steps * last.batch / 1e6
        text += (
            f"; the {total_steps} steps of the whole training cost "
            f"{in_digits(whole * first.node_hours)} node-hours on {in_nodes(first.nodes)}"
        )
        if last is not first:
            text += f" and {in_digits(whole * last.node_hours)} on {in_nodes(last.nodes)}"
    return f"{text}, without start, checkpoints and validation."


def _energy(first: ScaleRow, last: ScaleRow) -> list[str]:
    if first.joules is None or last.joules is None:
        return []
    text = (
        f"The measured energy per sample is {in_digits(first.joules)} J on {in_nodes(first.nodes)}"
    )
    if last is not first:
        text += f" and {in_digits(last.joules)} J on {in_nodes(last.nodes)}"
    return [f"{text}."]


def _predicted(figures: Figures, last: ScaleRow) -> list[str]:
    sentences = []
    if figures.predicted:
        one = figures.predicted[0]
        sentences.append(
            f"{NOT_MEASURED} the fitted model gives {in_digits(one.seconds)} s "
            f"(90 % interval {in_digits(one.low)} to {in_digits(one.high)}) on "
            f"{in_nodes(one.nodes)}, a parallel efficiency of {percent(one.efficiency)}."
        )
    if figures.missed is not None:
        sentences.append(
            f"Fitted to the smaller jobs only, the model was {percent(abs(figures.missed))} off on "
            f"{in_nodes(last.nodes)}."
        )
    if figures.worthwhile is not None:
        sentences.append(worthwhile(figures))
    return sentences


def worthwhile(figures: Figures) -> str:
    """The sentence that says up to how many nodes the training is worth it."""
    count = figures.worthwhile or 0
    least = f"at least {percent(figures.least_efficiency)}"
    more = "more nodes were not looked at" if count == figures.most else "lower on more"
    sentence = f"the parallel efficiency is {least} up to {in_nodes(count)}, and {more}."
    return _marked(sentence, measured=count in [row.nodes for row in figures.measured])


def in_nodes(count: int) -> str:
    """A number of nodes with its noun."""
    return plural(count, "node")


def percent(share: float) -> str:
    """A share in percent, with a decimal place below ten."""
    whole = share == 0 or abs(round(share, 3)) >= 0.1
    return f"{100 * share:.{0 if whole else 1}f} %"


def in_digits(value: float) -> str:
    """A number with three digits or, from 1000 on, without a fraction; never with an exponent."""
    text = f"{value:.3g}"
    if abs(float(text)) < 1000:
        return f"{Decimal(text):f}"
    return f"{value:,.0f}"  # of what is not finite, too


def enumerated(words: Sequence[str], last: str = "and") -> str:
    """Words as a list in a sentence: 1, 2 and 4."""
    return f" {last} ".join(filter(None, [", ".join(words[:-1]), words[-1]]))
