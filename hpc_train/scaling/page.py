"""Writes the page of a study: one HTML file that needs no other file and no network."""

from __future__ import annotations

from pathlib import Path

import jinja2

from hpc_train.mpi.phases import STEP_PHASES
from hpc_train.scaling.charts import efficiency_chart, phase_chart, speedup_chart
from hpc_train.scaling.paragraph import in_digits, in_nodes, worthwhile
from hpc_train.scaling.summary import Figures


def page(figures: Figures, name: str, text: str, version: str) -> str:
    """The page as HTML.

    Args:
        figures: the figures of the study.
        name: what the training is called.
        text: the text for a proposal.
        version: the version of hpc_train.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"number": in_digits, "nodes": in_nodes}
    return environment.get_template("page.html").render(
        figures=figures,
        name=name,
        text=text,
        phases=[*STEP_PHASES, "other"],
        worthwhile=worthwhile(figures) if figures.worthwhile is not None else "",
        has_tokens=any(row.tokens_per_second for row in figures.rows),
        has_joules=any(row.joules is not None for row in figures.rows),
        has_flops=any(row.tflops is not None for row in figures.rows),
        has_peak=any(row.mfu is not None for row in figures.rows),
        charts=[
            ("Speed-up", speedup_chart(figures)),
            ("Parallel efficiency", efficiency_chart(figures)),
        ]
        if len(figures.rows) > 1
        else [],
        phase_chart=phase_chart(figures),
        version=version,
    )
