"""Drives a headless Chromium over the DevTools protocol, without any library.

The protocol's messages are JSON, each ended by a zero byte. Chromium reads them from its
descriptor 3 and writes them to descriptor 4 (--remote-debugging-pipe).
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

LIMIT = 30.0  # seconds, in which Chromium has to answer
NAMES = ("chromium", "chromium-browser", "google-chrome")
OPTIONS = (
    "--headless",
    "--no-sandbox",  # it needs user namespaces, which root in a container may lack
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--no-first-run",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)


def chromium() -> str | None:
    """The path of Chromium on this machine; None if there is none."""
    return next(filter(None, map(shutil.which, NAMES)), None)


@dataclass
class Page:
    """An open page.

    Args:
        browser: the browser.
        session: its name in the protocol.

    Attributes:
        messages: what it wrote to the console, and errors.
        requests: the addresses that it asked for.
    """

    browser: Browser
    session: str
    messages: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol. Returns its result."""
        return self.browser.call(method, self.session, **parameters)

    def show(
        self, width: int, height: int, *, dark: bool = False, paper: bool = False, scale: float = 1
    ) -> None:
        """Choose the size of the window in CSS pixels, the colours, and screen or paper."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=False,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        media = "print" if paper else "screen"
        self.call("Emulation.setEmulatedMedia", media=media, features=[scheme])

    def go(self, address: str) -> None:
        """Open an address, and wait for the page's end of loading.

        Raises:
            RuntimeError: the page cannot be opened.
        """
        loads = self.browser.loads.get(self.session, 0)
        done = self.call("Page.navigate", url=address)
        if "errorText" in done:
            raise RuntimeError(f"{address}: {done['errorText']}")
        self.wait_for_load(loads)

    def wait_for_load(self, before: int) -> None:
        """Wait until the page has loaded more often than this number of times."""
        limit = time.monotonic() + LIMIT
        while self.browser.loads.get(self.session, 0) <= before:
            self.browser.read(limit)

    def evaluate(self, expression: str) -> Any:
        """The value of an expression of JavaScript, as JSON has it; promises are awaited.

        Raises:
            RuntimeError: it throws.
        """
        done = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in done:
            raise RuntimeError(json.dumps(done["exceptionDetails"]))
        return done["result"].get("value")

    def picture(self, clip: Sequence[float] | None = None) -> bytes:
        """A PNG of the window, or of a rectangle (x, y, width, height) of the whole page."""
        more: dict[str, Any] = {}
        if clip is not None:
            names = ("x", "y", "width", "height")
            area = dict(zip(names, clip, strict=True)) | {"scale": 1}
            more = {"clip": area, "captureBeyondViewport": True}
        return base64.b64decode(self.call("Page.captureScreenshot", format="png", **more)["data"])

    def close(self) -> None:
        """Close the page."""
        self.browser.pages.pop(self.session)
        self.call("Page.close")


class Browser:
    """A running Chromium. `started()` makes it.

    Args:
        program: its path.
        folder: for its profile.
    """

    def __init__(self, program: str, folder: Path) -> None:
        self.pages: dict[str, Page] = {}
        self.loads: dict[str, int] = {}
        self._rest = b""
        self._answers: dict[int, dict[str, Any]] = {}
        self._count = 0
        theirs_in, self._out = _high_pipe()
        self._in, theirs_out = _high_pipe()
        null = os.open(os.devnull, os.O_RDWR)
        copies = ((null, 0), (null, 1), (null, 2), (theirs_in, 3), (theirs_out, 4))
        self.process = os.posix_spawn(
            program,
            [program, *OPTIONS, f"--user-data-dir={folder}", "about:blank"],
            os.environ | {"HOME": str(folder)},
            file_actions=[(os.POSIX_SPAWN_DUP2, one, other) for one, other in copies],
            setpgroup=0,
        )
        for descriptor in (null, theirs_in, theirs_out):
            os.close(descriptor)

    def open(self) -> Page:
        """Open an empty page."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = self.pages[session] = Page(self, session)
        for domain in ("Page", "Runtime", "Log", "Network"):
            page.call(f"{domain}.enable")
        return page

    def call(self, method: str, session: str = "", **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol. Returns its result.

        Raises:
            RuntimeError: Chromium refuses the call.
            TimeoutError: it does not answer.
        """
        self._count += 1
        message = {"id": self._count, "method": method, "params": parameters}
        if session:
            message["sessionId"] = session
        rest = memoryview(json.dumps(message).encode() + b"\0")
        while rest:
            rest = rest[os.write(self._out, rest) :]
        limit = time.monotonic() + LIMIT
        while self._count not in self._answers:
            self.read(limit)
        answer = self._answers.pop(self._count)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        return dict(answer["result"])

    def read(self, limit: float) -> None:
        """Take in messages.

        Raises:
            TimeoutError: none has come when time.monotonic() is at the limit.
            RuntimeError: Chromium has ended.
        """
        if not select.select([self._in], [], [], max(0.0, limit - time.monotonic()))[0]:
            raise TimeoutError("Chromium does not answer")
        text = os.read(self._in, 1 << 20)
        if not text:
            raise RuntimeError("Chromium has ended")
        *messages, self._rest = (self._rest + text).split(b"\0")
        for message in messages:
            self._take(json.loads(message))

    def _take(self, message: dict[str, Any]) -> None:
        if "id" in message:
            self._answers[message["id"]] = message
            return
        session, given = message.get("sessionId", ""), message["params"]
        page = self.pages.get(session)
        if message["method"] == "Page.loadEventFired":
            self.loads[session] = self.loads.get(session, 0) + 1
        if page is None:
            return
        match message["method"]:
            case "Runtime.consoleAPICalled":
                words = [str(word.get("value", word.get("description"))) for word in given["args"]]
                page.messages.append(" ".join([given["type"], *words]))
            case "Runtime.exceptionThrown":
                page.messages.append(json.dumps(given["exceptionDetails"]))
            case "Log.entryAdded":
                page.messages.append(f"{given['entry']['level']} {given['entry']['text']}")
            case "Network.requestWillBeSent":
                page.requests.append(given["request"]["url"])

    def end(self) -> None:
        """End Chromium and what it has started."""
        with suppress(ProcessLookupError):
            os.killpg(self.process, signal.SIGKILL)
        os.waitpid(self.process, 0)
        os.close(self._in)
        os.close(self._out)


def _high_pipe() -> list[int]:
    """A pipe whose descriptors are none of those that Chromium gets."""
    ends = []
    for end in os.pipe():
        ends.append(fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10))
        os.close(end)
    return ends


@contextmanager
def started(program: str) -> Iterator[Browser]:
    """A headless Chromium, which ends with the block.

    Args:
        program: its path, see `chromium`.
    """
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        browser = Browser(program, Path(folder))
        try:
            yield browser
        finally:
            browser.end()
