"""Run directories as a training leaves them, and what a page says."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

BEGIN = 1_790_000_000.0


def write_lines(path: Path, records) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))


def record(step: int, **values):
    """A record of a GPT."""
    return {
        "step": step,
        "epoch": 1,
        "loss": 1.0 + 1 / step,
        "lr": 1e-3,
        "grad_norm": 2.0,
        "samples_per_second": 40.0,
        "tokens_per_second": 400.0,
        "step_seconds": 0.5,
        "data_seconds": 0.05,
        "forward_seconds": 0.1,
        "backward_seconds": 0.2,
        "comm_seconds": 0.05,
        "memory_gb": 1.5,
        "time": BEGIN + step,
    } | values


def start(time: float, after: int, **values):
    """The event of a start on two hosts with two ranks each: pipelines across them."""
    return {
        "time": BEGIN + time,
        "event": "start",
        "step": after,
        "after": after,
        "job": "slurm::17",
        "version": "0.1",
        "device": "cpu",
        "cores": 2,
        "hosts": ["first", "second"],
        "layout": {"dp": 2, "tp": 1, "pp": 2},
        "ranks": [[0, 0, 0, 0], [0, 1, 0, 0], [1, 0, 0, 1], [1, 1, 0, 1]],
    } | values


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.inside: list[str] = []
        self.json = ""

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag in ("script", "style"):
            self.inside.append("data" if ("id", "data") in attrs else tag)

    def handle_endtag(self, tag):
        if tag in ("script", "style"):
            self.inside.pop()

    def handle_data(self, text):
        if not self.inside:
            self.texts.append(text)
        elif self.inside[-1] == "data":
            self.json += text


class Page:
    """What a browser finds in a page."""

    def __init__(self, html: str) -> None:
        parser = _Page()
        parser.feed(html)
        self.html = html
        self.elements = parser.elements
        self.text = re.sub(r"\s+", " ", " ".join(parser.texts))
        self.data = json.loads(parser.json, parse_constant=lambda name: 1 / 0)

    def count(self, tag: str, **attributes) -> int:
        wanted = {name.strip("_").replace("_", "-"): value for name, value in attributes.items()}
        return sum(tag == name and wanted.items() <= found.items() for name, found in self.elements)

    def series(self, key: str, run: int = 0):
        return self.data["runs"][run]["series"][key]
