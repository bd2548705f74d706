"""The whole page, as a browser would read it."""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path

import pytest

from hpc_train.errors import UserError
from hpc_train.report.page import NO_VALUE, LiveReport, plain_number, report_of, short_number
from tests.report.runs import BEGIN, Page, record, start, write_lines

HOSTILE = "</script><script>alert(1)</script><!-- <img src=x onerror=alert(1)> {{ 7*7 }} '\""


@pytest.fixture
def run(tmp_path):
    """A run that failed once, with a slow rank."""
    folder = tmp_path / "my"
    (folder / "logs").mkdir(parents=True)
    records = [record(step) for step in range(1, 101)]
    records[49] |= {"validation_loss": 1.25, "validation_accuracy": 0.5}
    write_lines(folder / "metrics.jsonl", records)
    events = [
        start(0, 0),
        {"time": BEGIN + 45, "event": "end", "step": 47, "reason": "failed", "why": "host b died"},
        start(50, 40),
        {
            "time": BEGIN + 60,
            "event": "slow",
            "step": 60,
            "rank": 3,
            "host": "second",
            "cause": "load",
            "seconds": 0.2,
            "share": 0.4,
            "why": "another program takes its core",
        },
        {
            "time": BEGIN + 100,
            "event": "communication",
            "step": 100,
            "operations": [
                {"name": "ring", "bytes": 4e9, "seconds": 8, "bandwidth": 5e8, "limit": 1e9}
            ],
        },
        {"time": BEGIN + 101, "event": "end", "step": 100, "reason": "finished"},
    ]
    write_lines(folder / "events.jsonl", events)
    (folder / "config.yaml").write_text("run: {dir: my, seed: 1}\nmodel: {layers: 2}\n")
    return folder


def test_a_page_says_what_the_run_did(run):
    page = Page(report_of([run]))
    assert page.count("html", lang="en") == 1
    for words in (
        "finished",
        "1.25 at step 50",
        "failed: host b died",
        "4 ranks on 2 hosts: dp 2 ",
        "A pipeline lies on up to 2 hosts",
        "another program takes its core",
        "500 MB/s",
        "50%",
        "model: {layers: 2}",
    ):
        assert words in page.text
    assert [mark["lost"] for mark in page.data["runs"][0]["marks"]] == [7]
    assert page.count("span", class_="rank") == 3
    assert page.count("span", class_="rank slow") == 1
    keys = [plot["key"] for plot in page.data["plots"]]
    assert keys[:4] == ["loss", "validation_loss", "validation_accuracy", "grad_norm"]
    assert all(page.count("figure", class_="plot", data_key=key) == 1 for key in keys)
    assert page.series("loss")["mean"][:2] == [2, 1.5]
    phases = page.data["runs"][0]["phases"]
    assert phases["other"][0] == pytest.approx(0.1)
    assert sum(phases[phase][0] for phase in phases) == pytest.approx(0.5)


def test_a_share_above_its_limit_is_explained(run):
    why = "A share is above 100 % where"
    assert why not in Page(report_of([run])).text
    row = {"name": "gradient sums inside nodes", "bandwidth": 2e9, "limit": 1e9, "seconds": 2.5e-3}
    write_lines(
        run / "events.jsonl", [start(0, 0), {"event": "communication", "operations": [row]}]
    )
    text = Page(report_of([run])).text
    assert why in text
    assert "2.5 ms 2 GB/s 1 GB/s 200%" in text


def claim(run, *, silent: float) -> None:
    """Let a job of another host own a run that it has written to so many seconds ago."""
    path = run / ".claim/000001"
    path.parent.mkdir()
    path.write_text("")
    os.utime(path, (time.time() - silent,) * 2)


def test_a_killed_run_has_lost_what_its_next_start_has_dropped(tmp_path):
    resumed = start(90, 50, reached=75, reached_time=BEGIN + 80)
    write_lines(tmp_path / "events.jsonl", [start(0, 0), resumed])
    records = [record(step, time=BEGIN + 100) for step in range(1, 61)]
    write_lines(tmp_path / "metrics.jsonl", records)
    claim(tmp_path, silent=1000)
    text = Page(report_of([tmp_path])).text
    assert "steps lost 25 " in text
    assert " 0 at least 1 min 20 s 75 25 no end is recorded" in text
    # The newest start was killed, too, and its last record tells its last step.
    assert f" 50 at least 10 s 60 {NO_VALUE} no end is recorded" in text
    assert "no end is recorded; last record at " in text


def test_lost_steps_that_nobody_knows_are_unknown(tmp_path):
    write_lines(tmp_path / "events.jsonl", [start(0, 0), start(90, 50)])
    write_lines(tmp_path / "metrics.jsonl", [record(50)])
    text = Page(report_of([tmp_path])).text
    assert "steps lost unknown" in text
    assert " 0 unknown unknown unknown no end is recorded" in text


def test_a_run_whose_job_is_heard_of_is_running(tmp_path):
    write_lines(tmp_path / "events.jsonl", [start(0, 0)])
    write_lines(tmp_path / "metrics.jsonl", [])
    claim(tmp_path, silent=5)
    text = Page(report_of([tmp_path])).text
    assert "state running " in text
    assert f" 0 unknown {NO_VALUE} {NO_VALUE} running" in text


def test_a_run_whose_launcher_starts_it_again_is_starting(tmp_path):
    write_lines(tmp_path / "events.jsonl", [start(0, 0)])
    lines = [
        {"time": BEGIN + 9, "event": "end", "code": 1},
        {"time": time.time(), "event": "start"},
    ]
    write_lines(tmp_path / "launch.jsonl", lines)
    write_lines(tmp_path / "metrics.jsonl", [])
    assert "state starting " in Page(report_of([tmp_path])).text


def test_a_page_names_no_address_and_loads_nothing(run):
    html = report_of([run])
    page = Page(html)
    for name, attributes in page.elements:
        assert name not in ("iframe", "object", "embed", "base", "img")
        assert not attributes.get("src")
        assert name == "link" or "href" not in attributes
    policy = next(
        found["content"]
        for name, found in page.elements
        if found.get("http-equiv") == "Content-Security-Policy"
    )
    assert policy.startswith("default-src 'none'")
    addresses = set(re.findall(r"https?://[\w./-]+", html))
    assert addresses == {"http://www.w3.org/2000/svg"}  # a name that nothing fetches
    assert "url(" not in html
    assert "@import" not in html


def test_texts_from_files_never_become_elements(run):
    plain = Page(report_of([run]))
    write_lines(
        run / "metrics.jsonl", [record(step, **{HOSTILE: step * 1.0}) for step in range(1, 101)]
    )
    events = [
        start(0, 0, hosts=[HOSTILE, "\ud800"], device=HOSTILE, job=HOSTILE),
        {"time": BEGIN, "event": "end", "step": 9, "reason": "failed", "why": HOSTILE},
        start(9, 5, hosts=[HOSTILE, HOSTILE], version=HOSTILE),
        {"time": BEGIN, "event": "slow", "step": 1, "rank": 1, "host": HOSTILE, "cause": HOSTILE},
        {"time": BEGIN, "event": "communication", "operations": [{"name": HOSTILE, "bytes": "x"}]},
    ]
    write_lines(run / "events.jsonl", events)
    write_lines(run / "samples.jsonl", [{"step": HOSTILE, "prompt": HOSTILE, "text": HOSTILE}])
    (run / "config.yaml").write_text(json.dumps({HOSTILE: {"a": HOSTILE}}))
    other = run.with_name("x'\"><script>alert(2)<\x2fscript>".replace("/", "_"))
    run.rename(other)
    page = Page(report_of([other, other.parent / "." / other.name]))
    names = ("script", "img", "style")
    assert [page.count(name) for name in names] == [plain.count(name) for name in names]
    assert not [found for _, found in page.elements if "onerror" in found]
    assert HOSTILE in {plot["key"] for plot in page.data["plots"]}
    assert HOSTILE.replace("\n", " ") in page.text
    assert "<!--" not in page.html.replace("<!doctype", "")
    page.html.encode()


def test_a_run_that_has_not_begun_to_train_has_a_page(tmp_path):
    (tmp_path / "logs").mkdir()
    page = Page(report_of([tmp_path]))
    assert "has no records in metrics.jsonl yet" in page.text
    assert "state no start is recorded " in page.text
    assert page.data["plots"] == []


def test_numbers_that_are_not_finite_or_huge_leave_gaps(tmp_path):
    write_lines(
        tmp_path / "metrics.jsonl",
        [record(1), record(2, loss=None, grad_norm=1e308), record(3, grad_norm=1e308, time=1e300)],
    )
    page = Page(report_of([tmp_path]))
    assert page.series("loss")["mean"] == [2, None, pytest.approx(1.3333)]
    assert "loss was infinite or not a number in 1 record, first at step 2" in page.text


def test_a_run_that_has_diverged_is_the_last_of_a_comparison(tmp_path):
    for name, loss, validation in (("a", 3.0, 3.5), ("b", None, 1.5), ("c", 2.0, 2.5)):
        records = [record(1, loss=1.0, validation_loss=validation), record(2, loss=loss)]
        write_lines(tmp_path / name / "metrics.jsonl", records)
    runs = [tmp_path / name for name in "abc"]
    page = Page(report_of(runs))
    assert page.data["parallel"]["names"] == ["c", "a", "b"]
    assert " b 1.5 not finite " in page.text
    for run in runs[:2]:
        assert ("last loss not finite" in Page(report_of([run])).text) == (run.name == "b")
    write_lines(tmp_path / "b/metrics.jsonl", [record(1, loss=None)])
    assert "last loss not finite" in Page(report_of([runs[1]])).text


def test_the_speed_of_a_page_is_that_of_all_steps_after_the_first_of_each_start(tmp_path):
    write_lines(tmp_path / "events.jsonl", [start(0, 0), start(9, 60), start(10, 50)])
    seconds = {1: 30.0, 50: 1.0, 51: 20.0, 100: 2.0}
    records = [record(step, step_seconds=taken) for step, taken in seconds.items()]
    write_lines(tmp_path / "metrics.jsonl", records)
    assert "mean time per step 1.5 s " in Page(report_of([tmp_path])).text


def test_several_runs_share_plots_and_show_their_differences(run, tmp_path):
    other = tmp_path / "other"
    write_lines(other / "metrics.jsonl", [record(step, loss=9.0) for step in range(1, 10)])
    (other / "config.yaml").write_text("run: {dir: other, seed: 1}\nmodel: {layers: 3}\n")
    page = Page(report_of([run, other]))
    assert [one["name"] for one in page.data["runs"]] == ["my", "other"]
    assert page.series("loss", 1)["mean"] == [9] * 9
    assert page.count("table", id="differences") == 1
    assert "model.layers 2 3" in page.text


def test_runs_are_compared_only_if_they_have_a_configuration(run, tmp_path):
    other, bare = tmp_path / "other", tmp_path / "bare"
    for folder in (other, bare):
        write_lines(folder / "metrics.jsonl", [record(1)])
    (other / "config.yaml").write_text("run: {dir: other, seed: 1}\nmodel: {layers: 3}\n")
    page = Page(report_of([run, bare, other]))
    assert "This run has no configuration: bare." in page.text
    assert "Differences key my other model.layers 2 3" in page.text
    assert "run.seed" not in page.text
    assert page.data["parallel"]["axes"][0]["label"] == "model.layers"
    page = Page(report_of([run, bare]))
    assert "Differences" not in page.text
    assert "This run has no configuration: bare." in page.text


def test_a_run_that_is_given_twice_is_one_run(run, monkeypatch):
    monkeypatch.chdir(run.parent)
    page = Page(report_of([run, Path("my"), Path("my/../my")]))
    assert [one["name"] for one in page.data["runs"]] == ["my"]
    assert "<title>my " in page.html


def test_one_rank_with_one_core_and_keys_without_a_plot(tmp_path):
    one = start(
        0, 0, hosts=["a"], cores=1, ranks=[[0, 0, 0, 0]], layout={"dp": 1, "tp": 1, "pp": 1}
    )
    write_lines(tmp_path / "events.jsonl", [one])
    write_lines(tmp_path / "metrics.jsonl", [record(1, **{f"more_{n}": 1.0 for n in range(27)})])
    page = Page(report_of([tmp_path]))
    assert "1 rank on 1 host:" in page.text
    assert "1 core per rank" in page.text
    assert "3 further keys have no plot." in page.text


def test_runs_of_the_same_name_are_told_apart(tmp_path):
    for folder in ("a/run", "b/run"):
        write_lines(tmp_path / folder / "metrics.jsonl", [record(1)])
    page = Page(report_of([tmp_path / "a/run", tmp_path / "b/run"]))
    names = [one["name"] for one in page.data["runs"]]
    assert names == [str(tmp_path / "a/run"), str(tmp_path / "b/run")]


def test_tasks_of_sweeps_of_the_same_name_are_told_apart(tmp_path):
    sweeps = [tmp_path / name / "sweep" for name in "ab"]
    for sweep in sweeps:
        write_lines(sweep / "task-0/metrics.jsonl", [record(1)])
        (sweep / "tasks.json").write_text("{}")
    runs = Page(report_of(sweeps)).data["runs"]
    assert [run["name"] for run in runs] == [f"{sweep}/task-0" for sweep in sweeps]


def test_each_plot_has_its_place_in_the_data_because_a_name_may_change_in_a_browser(tmp_path):
    write_lines(tmp_path / "metrics.jsonl", [record(1, **{"a\r\nb": 3.0, "c": 4.0})])
    page = Page(report_of([tmp_path]))
    found = [one for tag, one in page.elements if tag == "figure" and one.get("class") == "plot"]
    assert len(found) == len(page.data["plots"])
    for one in found:
        assert page.data["plots"][int(one["data-plot"])]["key"] == one["data-key"]


def test_a_sweep_is_compared_by_its_options_the_best_first(tmp_path):
    tasks = {}
    for number, (lr, loss) in enumerate([(1e-2, 3.0), (1e-3, 1.0), (1e-4, 2.0)]):
        tasks[str(number)] = [f"--optimizer.lr={lr}", "--optimizer.name", "adamw"]
        write_lines(tmp_path / f"task-{number}/metrics.jsonl", [record(1, loss=loss)])
    (tmp_path / "task-3").mkdir()  # it has not begun
    (tmp_path / "tasks.json").write_text(json.dumps(tasks | {"3": ["--optimizer.lr=5"]}))
    page = Page(report_of([tmp_path]))
    found = page.data["parallel"]
    assert found["names"] == ["task-1", "task-2", "task-0", "task-3"]
    axes = {axis["label"]: axis["values"] for axis in found["axes"]}
    assert axes["optimizer.lr"] == [1e-3, 1e-4, 1e-2, 5]
    assert axes["optimizer.name"] == ["adamw"] * 3 + [""]
    assert found["axes"][-1]["label"] == "last loss"
    assert axes["last loss"] == [1, 2, 3, None]
    assert "last step" not in axes, "it is the same for all"


def test_damaged_options_of_tasks_are_left_out(tmp_path):
    for number in range(2):
        write_lines(tmp_path / f"task-{number}/metrics.jsonl", [record(1, loss=1.0 + number)])
    for text, shown in (
        ("null", "run last loss"),
        ('{"0": 5, "1": ["--lr=2"]}', "run lr last loss"),
    ):
        (tmp_path / "tasks.json").write_text(text)
        assert f"{shown} " in Page(report_of([tmp_path])).text


def test_runs_without_records_are_compared_by_their_options(tmp_path):
    runs = [tmp_path / str(number) for number in range(3)]
    for number, run in enumerate(runs):
        run.mkdir()
        (run / "config.yaml").write_text(f"optimizer: {{lr: {number + 1}}}")
    (axis,) = Page(report_of(runs)).data["parallel"]["axes"]
    assert (axis["label"], axis["values"]) == ("optimizer.lr", [1, 2, 3])


def test_a_run_without_an_option_has_no_place_on_its_axis_of_numbers(tmp_path):
    for number in range(4):
        write_lines(tmp_path / f"{number}/metrics.jsonl", [record(1)])
    for number in range(3):
        (tmp_path / f"{number}/config.yaml").write_text(f"optimizer: {{lr: {number + 1}}}")
    found = Page(report_of([tmp_path / str(number) for number in range(4)])).data["parallel"]
    axes = {axis["label"]: axis["values"] for axis in found["axes"]}
    assert axes["optimizer.lr"] == [1, 2, 3, None]


def test_the_costs_are_the_largest_that_are_told(tmp_path):
    costs = {"node_hours": 1.5, "joules": 4000.0, "metered_node_hours": 1.5}
    write_lines(tmp_path / "metrics.jsonl", [record(1, node_hours=1.25, joules=3e3)])
    write_lines(tmp_path / "events.jsonl", [start(0, 0), {"event": "end", "step": 1} | costs])
    text = Page(report_of([tmp_path])).text
    for told in ("node-hours 1.5 ", "energy 4 kJ ", "tokens per joule 0.05 "):
        assert told in text


def test_tokens_per_joule_are_those_of_the_time_in_which_energy_was_read(tmp_path):
    records = [record(step, node_hours=step / 100) for step in range(1, 101)]
    for one in records[90:]:
        one |= {"joules": (one["step"] - 90) * 20.0, "metered_node_hours": one["node_hours"] - 0.9}
    write_lines(tmp_path / "metrics.jsonl", records)
    text = Page(report_of([tmp_path])).text  # 200 tokens and 20 J a step
    for told in ("energy 200 J, read in 10 % of the time ", "tokens per joule 10 "):
        assert told in text


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (12_345_678.0, "12,345,678"),
        (1282.73, "1,283"),
        (0.00061, "0.00061"),
        (999.96, "1,000"),
        (4.2e12 + 0.5, "4.2e+12"),
    ],
)
def test_numbers_are_written_in_full_as_far_as_one_can_read_them(value, words):
    assert plain_number(value) == words


def test_a_prefix_is_chosen_for_the_number_that_is_shown():
    values = (999.7e6, 1.5e15, 0.25, 2e18)
    assert [short_number(value, "B") for value in values] == [
        "1 GB",
        "1.5 PB",
        "0.25 B",
        "2,000 PB",
    ]


def test_a_live_report_follows_a_run(tmp_path):
    write_lines(tmp_path / "metrics.jsonl", [record(1)])
    report = LiveReport([tmp_path])
    assert len(Page(report.html()).series("loss")["mean"]) == 1
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(record(2)) + "\n")
    assert len(Page(report.html()).series("loss")["mean"]) == 2


def test_many_runs_of_many_records_stay_small(tmp_path):
    text = "".join(f"{json.dumps(record(step))}\n" for step in range(1, 1500))
    runs = [tmp_path / f"run{number}" for number in range(20)]
    for run in runs:
        run.mkdir()
        (run / "metrics.jsonl").write_text(text)
    assert len(report_of(runs)) < 2_000_000
    assert len(report_of(runs[:1])) < 2_000_000


def test_a_folder_that_is_no_run_is_refused(tmp_path):
    with pytest.raises(UserError, match="is not a run directory"):
        report_of([tmp_path])
