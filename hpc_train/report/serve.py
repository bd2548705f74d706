"""`hpc-train report --serve`: the report of a running job, for its owner's browser.

The server listens on 127.0.0.1 or on a Unix socket, and has one page. Other users of a login node
reach 127.0.0.1 too, so the page's address has a random token, which is compared in constant time.
No part of a request becomes a path of the file system. Names of hosts other than this one's are
refused, so that no web site can point its own name here (DNS rebinding).
"""

from __future__ import annotations

import base64
import getpass
import gzip
import hashlib
import hmac
import os
import re
import secrets
import signal
import socket
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from hpc_train.errors import HpcTrainError, UserError
from hpc_train.launch.alive import job_runs
from hpc_train.launch.queued import TASKS

REFRESH_SECONDS = 10
SHARE_OF_TIME = 0.1  # of the time: making pages takes no more of a login node's core
CONNECTION_SECONDS = 60.0  # after which a connection is closed, whatever it does
CONNECTIONS = 64  # at once; further ones are closed
SECRET_BYTES = 24
LAST_PORT = 65535
HOST = re.compile(r"(127\.0\.0\.1|localhost|\[::1\])(:\d{1,5})?", re.ASCII | re.IGNORECASE)
HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}
META = re.compile('<meta http-equiv="Content-Security-Policy"[^>]*>')
# What a page may do. The hashes of its two scripts follow, so that no other text can run.
POLICY = (
    "default-src 'none'; img-src data:; style-src 'unsafe-inline'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; script-src"
)
LIVE = Path(__file__).with_name("live.js").read_text(encoding="utf-8")


@dataclass(frozen=True)
class LivePage:
    """A page as it is sent.

    Args:
        tag: changes with the page (ETag).
        body: the page in UTF-8.
        zipped: the same, compressed by gzip.
        policy: its Content-Security-Policy.
    """

    tag: str
    body: bytes
    zipped: bytes
    policy: str


class ServedReport:
    """Makes the page of some runs again when their files have changed.

    Threads may share it. While one makes a page, the others get the page before.

    Args:
        runs: the run directories.
        make: makes the text of the page. Only one thread calls it at a time.
        seconds: the time after which a reader's browser asks for a newer page.
    """

    def __init__(
        self, runs: Sequence[Path], make: Callable[[], str], seconds: float = REFRESH_SECONDS
    ) -> None:
        self.runs, self.make, self.seconds = runs, make, seconds
        self._lock = threading.Lock()
        self._state: object = None
        self._next = 0.0
        self._told = ""
        self._page = self._made()

    def page(self) -> LivePage:
        """The newest page."""
        if time.monotonic() >= self._next and self._lock.acquire(blocking=False):
            try:
                if state_of(self.runs) != self._state:
                    self._page = self._made()
            except (HpcTrainError, OSError, ValueError) as error:
                self._tell(f"the page stays as it was: {error}")
            finally:
                self._lock.release()
        return self._page

    def _made(self) -> LivePage:
        """Make the page, and find out when the next one may be made."""
        begin = time.monotonic()
        try:
            state = state_of(self.runs)
            page = live_page(self.make(), self.seconds)
            self._state = state
            return page
        finally:
            end = time.monotonic()
            self._next = end + max(self.seconds / 2, (end - begin) / SHARE_OF_TIME)

    def _tell(self, text: str) -> None:
        if text != self._told:
            print(f"hpc-train report: {text}", file=sys.stderr, flush=True)
        self._told = text


def state_of(runs: Sequence[Path]) -> list[tuple[str, int, int]]:
    """Name, size and time of change of each file that a report of these runs reads.

    Whether a job runs is there for each folder, too.
    """
    found = []
    for run in runs:
        for folder in (run, *run.glob("task-*")):
            found.append((str(folder), int(bool(job_runs(folder))), 0))
            with suppress(OSError):
                for entry in os.scandir(folder):
                    if entry.name.endswith(".jsonl") or entry.name in ("config.yaml", TASKS):
                        status = entry.stat()
                        found.append((entry.path, status.st_size, status.st_mtime_ns))
    return sorted(found)


def live_page(text: str, seconds: float) -> LivePage:
    """Add the script that asks for newer pages to a page of HTML."""
    tag = hashlib.blake2b(text.encode(), digest_size=12).hexdigest()
    text = META.sub("", text, count=1)  # a header says it better, and lets the script ask
    before, end, after = text.rpartition("</body>")
    own = before.rpartition("<script>")[2].partition("</script>")[0]
    script = LIVE.replace("TAG", tag).replace("SECONDS", f"{seconds:g}")
    body = f"{before}<script>{script}</script>{end}{after}".encode()
    hashes = (base64.b64encode(hashlib.sha256(one.encode()).digest()) for one in (own, script))
    policy = " ".join([POLICY, *(f"'sha256-{one.decode()}'" for one in hashes)])
    return LivePage(f'"{tag}"', body, gzip.compress(body, 6), policy)


class _Handler(BaseHTTPRequestHandler):
    """Answers one request, and closes the connection."""

    server: _Server
    default_request_version = "HTTP/1.0"  # answers to 0.9 would have no headers
    error_content_type = "text/plain; charset=utf-8"
    error_message_format = "%(code)d %(message)s\n"

    def handle(self) -> None:
        """Answer, in a limited time."""
        cut = threading.Timer(CONNECTION_SECONDS, self._cut)
        cut.daemon = True
        cut.start()
        try:
            super().handle()
        finally:
            cut.cancel()

    def _cut(self) -> None:
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def parse_request(self) -> bool:
        """Read the request, and refuse it unless it is one for the page."""
        if not super().parse_request():
            return False
        hosts = self.headers.get_all("Host", [])
        nameless = not hosts and self.request_version == "HTTP/1.0"
        if not nameless and (len(hosts) != 1 or not HOST.fullmatch(hosts[0])):
            self.send_error(HTTPStatus.MISDIRECTED_REQUEST)
        elif self.command not in ("GET", "HEAD"):
            self.send_error(HTTPStatus.METHOD_NOT_ALLOWED)
        elif not hmac.compare_digest(self.path.encode(), f"/{self.server.token}/".encode()):
            self.send_error(HTTPStatus.NOT_FOUND)
        else:
            return True
        return False

    def do_GET(self) -> None:
        """Send the page, or say that it has not changed."""
        page = self.server.report.page()
        if self.headers.get("If-None-Match") in (page.tag, page.tag.strip('"')):
            self.send_response(HTTPStatus.NOT_MODIFIED)
            self.send_header("ETag", page.tag)
            self.end_headers()
            return
        zipped = "gzip" in self.headers.get("Accept-Encoding", "")
        body = page.zipped if zipped else page.body
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Security-Policy", page.policy)
        self.send_header("ETag", page.tag)
        self.send_header("Vary", "Accept-Encoding")
        if zipped:
            self.send_header("Content-Encoding", "gzip")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_HEAD(self) -> None:
        """Send what stands before the page."""
        self.do_GET()

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Refuse the request in one line of text, which repeats nothing of it."""
        super().send_error(code, HTTPStatus(code).phrase)

    def send_response(self, code: int, message: str | None = None) -> None:
        """Begin an answer with the headers that every answer has."""
        super().send_response(code, message)
        for name, value in HEADERS.items():
            self.send_header(name, value)
        if code != HTTPStatus.OK:
            self.send_header("Content-Security-Policy", "default-src 'none'")
        if code == HTTPStatus.METHOD_NOT_ALLOWED:
            self.send_header("Allow", "GET, HEAD")

    def version_string(self) -> str:
        """The server's name, without versions."""
        return "hpc-train"

    def address_string(self) -> str:
        """A Unix socket's clients have no address."""
        return ""

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Log nothing: the address is a secret."""


class _Server(ThreadingHTTPServer):
    """Answers each connection in a thread of its own."""

    daemon_threads = True
    request_queue_size = CONNECTIONS

    def __init__(self, address: tuple[str, int] | str, report: ServedReport) -> None:
        self.report = report
        self.token = secrets.token_urlsafe(SECRET_BYTES)
        self._free = threading.BoundedSemaphore(CONNECTIONS)
        if isinstance(address, str):
            self.address_family = socket.AF_UNIX
        super().__init__(address, _Handler)  # type: ignore[arg-type]

    def server_bind(self) -> None:
        """Bind without asking for the machine's name, which may take long."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = "localhost", 0

    def process_request(self, request: Any, client_address: Any) -> None:
        """Begin a thread, or close the connection if there are too many."""
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer one connection."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Report an error of this program; a client may leave when it likes."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


def serve(report: ServedReport, *, port: int = 0, path: Path | None = None) -> None:
    """Serve a report until Ctrl-C or SIGTERM. Two lines say how to reach it.

    Args:
        report: the report.
        port: the port of 127.0.0.1; 0 takes a free one.
        path: of a Unix socket, which is taken in place of a port.

    Raises:
        UserError: the port or the path cannot be taken.
    """
    with suppress(KeyboardInterrupt), _listening(report, port, path) as server:
        before = signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            print(_how_to_reach(server, path), flush=True)
            server.serve_forever()
        finally:
            signal.signal(signal.SIGTERM, before)


@contextmanager
def _listening(report: ServedReport, port: int, path: Path | None) -> Iterator[_Server]:
    if port > LAST_PORT:
        raise UserError(f"there is no port {port}", f"give one from 1 to {LAST_PORT}")
    try:
        if path is None:
            server = _Server(("127.0.0.1", port), report)
        else:
            _remove_left_behind(path)
            before = os.umask(0o177)  # from its first moment on, nobody else may connect
            try:
                server = _Server(str(path), report)
            finally:
                os.umask(before)
    except OSError as error:
        where = f"port {port} of 127.0.0.1" if path is None else f"the Unix socket {path}"
        remedy = "give another port" if path is None else "give a short path on a local disk"
        raise UserError(f"cannot listen on {where}: {error.strerror or error}", remedy) from error
    try:
        yield server
    finally:
        server.server_close()
        if path is not None:
            path.unlink(missing_ok=True)


def _remove_left_behind(path: Path) -> None:
    """Remove a socket that a killed server has left behind.

    Raises:
        UserError: the path is in use, or is something else.
    """
    with suppress(FileNotFoundError):
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise UserError(f"{path} is there, and is no Unix socket", "give another path")
        with socket.socket(socket.AF_UNIX) as client, suppress(ConnectionRefusedError):
            client.connect(str(path))
            raise UserError(f"another server listens on {path}", "give another path")
        path.unlink()


def _how_to_reach(server: _Server, path: Path | None) -> str:
    port = _free_port() if path else server.server_address[1]
    here = str(path.absolute()) if path else f"127.0.0.1:{port}"
    tunnel = f"ssh -N -L {port}:{here} {getpass.getuser()}@{socket.gethostname()}"
    return f"http://127.0.0.1:{port}/{server.token}/\nFrom another machine, run first: {tunnel}"


def _free_port() -> int:
    """A port for the reader's end of a tunnel, which others are unlikely to have chosen."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        return int(unused.getsockname()[1])
