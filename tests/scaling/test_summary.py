"""The figures of a study, as table, page and text."""

from __future__ import annotations

import csv
import math
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from hpc_train.planning.predict import rounds_of_messages
from hpc_train.scaling.charts import LEFT, RIGHT, WIDTH, phase_chart
from hpc_train.scaling.page import page
from hpc_train.scaling.paragraph import in_digits, paragraph, worthwhile
from hpc_train.scaling.summary import as_csv, figures_of, time_points
from tests.scaling.studies import measured

LIMITS = {"least_efficiency": 0.5, "most_nodes": 1000}


def amdahl(nodes):
    return 0.9 / nodes + 0.1


def strong(**changed):
    runs = [measured(n, amdahl(n)) for _ in range(3) for n in (1, 2, 4)]
    return figures_of(runs, weak=False, **LIMITS | changed)


def test_strong_scaling_by_amdahls_law():
    figures = strong()
    last = figures.measured[-1]
    assert (last.nodes, last.runs, last.batch) == (4, 3, 16)
    assert last.speedup == pytest.approx(1 / amdahl(4))
    assert last.efficiency == pytest.approx(1 / amdahl(4) / 4)
    assert last.node_hours == pytest.approx(4 * amdahl(4) * 1e6 / 16 / 3600)
    assert last.tokens_per_second == pytest.approx(160 / amdahl(4))
    assert figures.serial_share == pytest.approx(0.1, rel=1e-6)
    assert figures.missed == pytest.approx(0, abs=1e-6)
    assert figures.worthwhile == 11
    assert [row.nodes for row in figures.predicted] == [8, 16, 32]
    for row in figures.predicted:
        assert row.seconds == pytest.approx(amdahl(row.nodes))
        assert row.low < row.seconds < row.high


def test_weak_scaling_counts_samples():
    runs = [measured(n, 1 + 0.1 * (n > 1), batch=16 * n) for n in (1, 2, 4)]
    figures = figures_of(runs, weak=True, **LIMITS)
    last = figures.measured[-1]
    assert last.speedup == pytest.approx(4 / 1.1)
    assert last.efficiency == pytest.approx(1 / 1.1)
    assert figures.serial_share == pytest.approx((4 - 4 / 1.1) / 3)
    assert [row.batch for row in figures.predicted] == [128, 256, 512]


def test_gustafsons_share_takes_any_ratio_of_nodes():
    runs = [measured(2, 1.0, batch=32), measured(5, 1.0 * 2.5 / 1.9, batch=80)]
    figures = figures_of(runs, weak=True, **LIMITS)
    assert figures.serial_share == pytest.approx(0.4)


def test_no_more_nodes_are_predicted_than_there_are_samples():
    assert [row.nodes for row in strong(most_nodes=16).predicted] == [8, 16]
    figures = strong(most_nodes=6)
    assert not figures.predicted
    assert figures.worthwhile == 6


def test_numbers_of_nodes_to_predict_can_be_given():
    assert [row.nodes for row in strong(targets=[4, 100]).predicted] == [100]


@pytest.mark.parametrize("targets", [[], [1], [1, 2, 16]])
@pytest.mark.parametrize("weak", [False, True])
@pytest.mark.parametrize("times", [{2: 0.1, 4: 0.2}, {4: 1.0, 8: 1.5}, {4: 1.0, 8: 0.6}])
def test_a_study_without_one_node_has_a_page(times, weak, targets):
    runs = [measured(n, t, batch=2 * n if weak else 16) for n, t in times.items()]
    figures = figures_of(runs, weak=weak, targets=targets, **LIMITS)
    text = page(figures, "gpt", paragraph(figures, "gpt", 4, 1, None), "1.0")
    assert "Amdahl's law" not in text or "Prediction, not measured: by Amdahl's law" in text
    assert all(row.seconds > 0 and row.low >= 0 for row in figures.rows)
    for chart in re.findall("<svg.*?</svg>", text, re.DOTALL)[:2]:
        places = [float(x) for x in re.findall(r'cx="(-?[\d.]+)"', chart)]
        assert len(places) == len(figures.rows)
        (band,) = re.findall(r'class="band" points="([^"]*)"', chart)
        places += [float(place.split(",")[0]) for place in band.split()]
        assert min(places) >= LEFT
        assert max(places) <= WIDTH - RIGHT


def test_what_lies_between_measured_numbers_of_nodes_is_a_prediction():
    figures = figures_of([measured(1, 1.0), measured(64, 0.9)], weak=False, **LIMITS)
    assert 1 < figures.worthwhile < 64
    assert worthwhile(figures).startswith("Prediction, not measured: the parallel efficiency is")


def test_one_number_of_nodes_has_no_model():
    figures = figures_of([measured(2, 0.5)], weak=False, **LIMITS)
    assert figures.model is None
    assert figures.worthwhile is None
    text = paragraph(figures, "gpt", 4, 1, None)
    assert "took 0.5 s on 2 nodes" in text
    assert "3 steps of each run count, after 1 to" in text
    assert "1 step of each run counts, after 3 to" in paragraph(figures, "gpt", 4, 3, None)
    assert "speed-up" not in text
    assert page(figures, "gpt", text, "1.0").count("<svg") == 1


def test_the_quartiles_of_a_single_run_lie_within_what_was_measured():
    run = replace(measured(1, 1.0), seconds=(1.0, 2.0))
    (row,) = figures_of([run], weak=False, **LIMITS).measured
    assert (row.low, row.high) == (1.25, 1.75)


def test_runs_that_scatter_make_an_error_and_those_that_do_not_borrow_half_of_it():
    runs = [measured(1, t) for t in (0.9, 1.0, 1.1)] + [measured(2, 0.5) for _ in range(3)]
    one, two = time_points(runs)
    assert one.seconds == 1.0
    assert one.error > 0.04
    assert 0 < two.error / two.seconds < one.error


def test_the_table_has_a_line_for_each_number_of_nodes():
    rows = list(csv.DictReader(as_csv(strong()).splitlines()))
    assert [row["nodes"] for row in rows] == ["1", "2", "4", "8", "16", "32"]
    assert [row["kind"] for row in rows] == ["measured"] * 3 + ["predicted"] * 3
    assert float(rows[2]["efficiency"]) == pytest.approx(1 / amdahl(4) / 4)
    assert float(rows[0]["forward_seconds"]) == pytest.approx(0.1)
    assert rows[3]["forward_seconds"] == rows[0]["joules"] == ""


def test_the_text_has_the_figures_and_says_what_is_predicted():
    text = paragraph(strong(), "gpt", 40, 10, 1000)
    for part in (
        "run on 1, 2 and 4 nodes with 1 rank on each node",
        "strong scaling: 16 samples per step",
        "3 times on each number of nodes",
        "30 steps of each run count, after 10 to warm up",
        "speed-up from 1 node to 4 nodes is 3.08, which is a parallel efficiency of 77 %",
        "By Amdahl's law the share of the time on one node that more nodes do not shorten is 10 %",
        "the 1000 steps of the whole training cost 0.278 node-hours on 1 node and 0.361 on 4",
        "Prediction, not measured: the parallel efficiency is at least 50 % up to 11 nodes",
    ):
        assert part in text
    assert "energy" not in text
    assert "Caution" not in text


@pytest.mark.parametrize("where", ["text", "page", "table"])
def test_shared_cores_are_said_everywhere(where):
    runs = [measured(n, 1.0, shared="hosts share cores: a, b are one machine") for n in (1, 2)]
    figures = figures_of(runs, weak=False, **LIMITS)
    text = paragraph(figures, "gpt", 4, 1, None)
    made = {"text": text, "page": page(figures, "gpt", text, "1.0"), "table": as_csv(figures)}
    assert "osts share cores: a, b are one machine" in made[where]


def test_nodes_that_are_parts_of_one_host_are_said_to_be():
    run = measured(2, 1.0)
    run.told["hosts"] = 1
    figures = figures_of([measured(1, 1.0), run], weak=False, **LIMITS)
    assert figures.shared.startswith("all ranks ran on one host")


class Page(HTMLParser):
    """Notes what a page loads, and checks that its elements are closed in their order."""

    EMPTY = ("meta", "link", "br")

    def __init__(self):
        super().__init__()
        self.open, self.loaded = [], []

    def handle_starttag(self, tag, attrs):
        self.loaded += [value for key, value in attrs if key in ("src", "href", "xlink:href")]
        if tag not in self.EMPTY:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_page_is_whole_and_needs_no_other_file():
    figures = strong()
    text = page(figures, "<gpt>", paragraph(figures, "<gpt>", 40, 10, 1000), "1.0")
    found = Page()
    found.feed(text)
    assert not found.open
    assert found.loaded == ["data:,"]
    assert not re.search(r"https?:|//\w|@import|url\(", text)
    assert "<gpt>" not in text
    assert "&lt;gpt&gt;" in text
    assert "prefers-color-scheme: dark" in text
    assert text.count("<svg") == 3
    assert "NaN" not in text


def test_more_nodes_that_are_slower_have_no_serial_share():
    for weak in (False, True):
        runs = [measured(n, float(n * n), batch=16 * n if weak else 16) for n in (1, 2)]
        figures = figures_of(runs, weak=weak, **LIMITS)
        assert figures.serial_share is None
        text = page(figures, "gpt", paragraph(figures, "gpt", 4, 1, None), "1.0")
        assert "serial share" not in text


@pytest.mark.parametrize(
    "times",
    [
        {1: 1.0, 2: 0.75, 4: 0.9, 8: 1.2, 16: 1.5},
        {1: 1.0, 2: 1.0, 4: 4.0},
        {n: 1 / n + 0.02 * rounds_of_messages(n) for n in (1, 2, 4, 8)},
    ],
)
def test_a_time_that_grows_with_the_nodes_has_no_amdahl_share(times):
    figures = figures_of([measured(n, t) for n, t in times.items()], weak=False, **LIMITS)
    assert "Amdahl" not in paragraph(figures, "gpt", 4, 1, None)


def test_only_numbers_of_nodes_that_can_be_run_are_told():
    figures = strong(can_run=lambda nodes: 64 % nodes == 0, targets=[8, 11, 16, 40])
    assert [row.nodes for row in figures.predicted] == [8, 16]
    assert (figures.worthwhile, figures.most) == (8, 32)


@pytest.mark.parametrize(
    ("seconds", "ticks"),
    [
        (0.125, ["50 ms", "100 ms"]),
        (0.01, ["2 ms", "4 ms", "6 ms", "8 ms", "10 ms"]),
        (4.99, ["1 s", "2 s", "3 s", "4 s"]),
        (90.0, ["20 s", "40 s", "1 min", "1 min 20 s"]),
    ],
)
def test_the_axis_of_the_phases_has_round_times(seconds, ticks):
    figures = figures_of([measured(1, seconds)], weak=False, **LIMITS)
    labels = re.findall(r'text-anchor="end">([^<]*)</text>', str(phase_chart(figures)))
    assert labels == ticks


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (999.4, "999"),
        (999.6, "1,000"),
        (12345.6, "12,346"),
        (1e-5, "0.00001"),
        (0.012345, "0.0123"),
        (0.0, "0"),
        (-12345.6, "-12,346"),
        (math.inf, "inf"),
        (math.nan, "nan"),
    ],
)
def test_numbers_have_three_digits_and_no_exponent(value, text):
    assert in_digits(value) == text
