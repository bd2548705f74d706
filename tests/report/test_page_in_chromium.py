"""The report in a real browser: headless Chromium draws it, and tells what the page did."""

from __future__ import annotations

import json

import pytest

from docs.browser import chromium, started
from docs.screenshots import made_up_run, made_up_sweep, write_lines
from hpc_train.report.page import report_of
from tests.report.test_serve import serving

PROGRAM = chromium()
pytestmark = pytest.mark.skipif(PROGRAM is None, reason="there is no Chromium: install it")

# Elements that are wider than the window, without those that scroll on their own.
WIDER = """
[...document.querySelectorAll("body *")].filter((one) => {
  if (one.closest(".scroll") && !one.matches(".scroll")) return false;
  const box = one.getBoundingClientRect();
  return box.width > 0 && (box.right > innerWidth + 0.5 || box.left < -0.5);
}).map((one) => one.outerHTML.slice(0, 100))
"""
# Texts whose contrast with what is behind them is below 4.5 (WCAG 2.2, success criterion 1.4.3).
FAINT = """
(() => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const parts = (colour) => {
    canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const light = (rgb) => rgb.slice(0, 3).map((v) => v / 255)
    .map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = (one) => {
    for (; one; one = one.parentElement) {
      const found = parts(getComputedStyle(one).backgroundColor);
      if (found[3] === 255) return found;
    }
    return [255, 255, 255, 255];
  };
  const texts = [...document.querySelectorAll("body *")].filter((one) =>
    [...one.childNodes].some((node) => node.nodeType === 3 && node.data.trim()) &&
    one.checkVisibility() && !one.matches("script, style, noscript, option"));
  const faint = texts.map((one) => {
    const style = getComputedStyle(one), svg = one instanceof SVGElement;
    const [a, b] = [light(parts(svg ? style.fill : style.color)), light(behind(one))];
    return [(Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), one.outerHTML.slice(0, 100)];
  }).filter(([ratio]) => ratio < 4.5);
  return { count: texts.length, faint };
})()
"""
# Plots without size, or without a line or an area that has one.
EMPTY = """
[...document.querySelectorAll("svg.chart")].filter((svg) => {
  const box = svg.getBoundingClientRect();
  const drawn = [...svg.querySelectorAll("path, polyline")].filter((one) => {
    const size = one.getBBox();
    return size.width > 3;
  });
  return box.width < 200 || box.height < 80 || !drawn.length;
}).map((svg) => svg.outerHTML.slice(0, 200))
"""


@pytest.fixture(scope="module")
def browser():
    with started(PROGRAM) as made:
        yield made


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """The reports of a run and of a sweep."""
    folder = tmp_path_factory.mktemp("reports")
    made = {}
    for run in (made_up_run(folder / "one"), made_up_sweep(folder / "sweep")):
        made[run.name] = folder / f"{run.name}.html"
        made[run.name].write_text(report_of([run]))
    return made


@pytest.fixture(params=["one", "sweep"])
def file(request, files):
    return files[request.param]


@pytest.fixture
def page(browser):
    """A page. In the end its console must be empty."""
    made = browser.open()
    yield made
    assert made.messages == []
    made.close()


def test_a_report_asks_for_nothing_but_itself(page, file):
    page.show(1200, 900)
    page.go(file.as_uri())
    page.evaluate("new Promise((done) => setTimeout(done, 100))")
    assert page.requests == [file.as_uri(), *["data:,"] * page.requests.count("data:,")]


def test_a_report_fits_a_phone(page, file):
    page.show(360, 780)
    page.go(file.as_uri())
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    assert page.evaluate(WIDER) == []
    assert page.evaluate(EMPTY) == []
    page.show(900, 400)  # the phone is turned
    page.evaluate("new Promise((done) => setTimeout(done, 300))")
    assert page.evaluate(WIDER) == []
    assert page.evaluate("document.querySelector('svg.chart').getBoundingClientRect().width") > 380


@pytest.mark.parametrize("dark", [False, True])
def test_all_is_drawn_and_can_be_read_in_both_colours(page, file, dark):
    page.show(1200, 900, dark=dark)
    page.go(file.as_uri())
    assert page.evaluate(EMPTY) == []
    found = page.evaluate(FAINT)
    assert found["count"] > 40
    assert found["faint"] == []
    back = "getComputedStyle(document.body).backgroundColor"
    shade = sum(json.loads(page.evaluate(back).replace("rgb(", "[").replace(")", "]")))
    assert (shade < 200) == dark
    page.evaluate("document.getElementById('theme').click()")
    other = sum(json.loads(page.evaluate(back).replace("rgb(", "[").replace(")", "]")))
    assert (other < 200) != dark, "the button switches the colours"
    assert page.evaluate(FAINT)["faint"] == []
    page.evaluate("sessionStorage.clear()")


def test_the_x_axis_can_be_steps_time_samples_and_tokens(page, files):
    page.show(1200, 900)
    page.go(files["one"].as_uri())
    texts = (
        "[...document.querySelectorAll('#plot-0 text, figure.plot[data-key=loss] text')]"
        ".map((one) => one.textContent).join('|')"
    )
    line = "document.querySelector('figure.plot[data-key=loss] path.line').getAttribute('d')"
    seen, lines = set(), set()
    for axis in ("step", "time", "samples", "tokens"):
        page.evaluate(
            f"(() => {{ const axis = document.getElementById('axis'); axis.value = '{axis}';"
            "axis.dispatchEvent(new Event('input')); })()"
        )
        seen.add(page.evaluate(texts))
        lines.add(page.evaluate(line))
        assert page.evaluate(EMPTY) == []
    assert len(seen) == 4, "each axis has labels of its own"
    assert len(lines) >= 2, "over time, pauses between jobs move the line"
    page.evaluate("sessionStorage.clear()")


def test_curves_are_smoothed_and_logarithmic_on_demand(page, files):
    page.show(1200, 900)
    page.go(files["one"].as_uri())
    line = "document.querySelector('figure.plot[data-key=loss] path.line').getAttribute('d')"
    before = page.evaluate(line)
    page.evaluate(
        "(() => { const one = document.getElementById('smoothing'); one.value = 0.9;"
        "one.dispatchEvent(new Event('input')); })()"
    )
    smoothed = page.evaluate(line)
    page.evaluate("document.getElementById('logarithmic').click()")
    assert len({before, smoothed, page.evaluate(line)}) == 3
    page.evaluate("sessionStorage.clear()")


def test_a_run_can_be_hidden(page, files):
    page.show(1200, 900)
    page.go(files["sweep"].as_uri())
    count = "document.querySelectorAll('figure.plot[data-key=loss] path.line').length"
    before = page.evaluate(count)
    assert before == 12
    page.evaluate("document.querySelector('#legend input').click()")
    assert page.evaluate(count) == 11


def test_a_report_is_printed_on_white_without_controls(page, file):
    page.show(720, 1000, dark=True, paper=True)
    page.go(file.as_uri())
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert not page.evaluate("document.getElementById('axis').checkVisibility()")
    assert page.evaluate(EMPTY) == []
    assert page.evaluate(FAINT)["faint"] == []
    printed = page.call("Page.printToPDF", printBackground=False)["data"]
    assert printed.startswith("JVBERi")  # %PDF in base64


HOSTILE = "</script><script>window.ran = 1</script><img src=//evil.example/x onerror=ran=1>"


def test_texts_of_a_run_are_never_markup(page, tmp_path):
    """What a data set, a configuration or a key says must not run, nor ask for anything."""
    run = tmp_path / "<b>run"
    run.mkdir()
    record = {"step": 1, "loss": 1.0, HOSTILE: 2.0, "constructor": 1.0, "__proto__": 2.0}
    start = {"event": "start", "time": 1.0, "after": 0, "job": HOSTILE, "hosts": [HOSTILE]}
    slow = {"event": "slow", "step": 1, "rank": HOSTILE, "cause": HOSTILE, "why": HOSTILE}
    write_lines(run / "metrics.jsonl", [record, record | {"step": 2}])
    write_lines(run / "events.jsonl", [start | {"ranks": [[0, 0, 0, 0]]}, slow])
    write_lines(run / "samples.jsonl", [{"step": 1, "prompt": HOSTILE, "text": HOSTILE}])
    (run / "config.yaml").write_text(f"run: {{dir: '{HOSTILE}'}}\n")
    file = tmp_path / "report.html"
    file.write_text(report_of([run]))
    page.show(360, 780)
    page.go(file.as_uri())
    assert page.evaluate("[window.ran ?? null, document.images.length]") == [None, 0]
    assert page.evaluate("document.body.innerText").count("evil.example") > 4
    assert page.evaluate(WIDER) == []
    assert set(page.requests) <= {file.as_uri(), "data:,"}


def test_a_served_page_renews_itself_where_it_is_read(page, tmp_path):
    run = made_up_run(tmp_path / "run")
    records = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(records[:50]))
    with serving("--refresh", "1", str(run)) as (process, port, path):
        address = f"http://127.0.0.1:{port}{path}"
        page.show(360, 780)
        page.go(address)
        assert page.evaluate(EMPTY) == []
        loads = page.browser.loads[page.session]
        page.evaluate(
            "(() => { window.old = true; const axis = document.getElementById('axis');"
            "axis.value = 'samples'; axis.dispatchEvent(new Event('input'));"
            "const details = document.querySelector('details'); details.open = !details.open;"
            "window.scrollTo(0, 1500); })()"
        )
        opened = page.evaluate("document.querySelector('details').open")
        page.evaluate("new Promise((done) => setTimeout(done, 1500))")
        assert page.evaluate("window.old") is True, "nothing has changed yet"
        (run / "metrics.jsonl").write_text("".join(records[:900]))
        page.wait_for_load(loads)
        page.evaluate("new Promise((done) => setTimeout(done, 50))")
        assert page.evaluate("window.old ?? null") is None
        assert page.evaluate("window.scrollY") == 1500
        assert page.evaluate("document.getElementById('axis').value") == "samples"
        assert page.evaluate("document.querySelector('details').open") == opened
        assert page.evaluate("document.getElementById('live').checkVisibility()") is False
        assert set(page.requests) <= {address, "data:,"}
        assert page.messages == []
        process.kill()
        process.wait()
        page.evaluate("new Promise((done) => setTimeout(done, 1500))")
        assert "not connected" in page.evaluate("document.getElementById('live').textContent")
        page.messages.clear()  # Chromium tells there that the server has gone
