"""The report of a running job over real connections: who gets it, and who does not."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from hpc_train.errors import UserError
from hpc_train.report import serve as module
from hpc_train.report.serve import ServedReport, serve
from tests.programs import ENVIRON, hear_ctrl_c, hpc_train, only_line, run
from tests.waiting import PATIENCE, wait_until

LINE = re.compile(r"http://127\.0\.0\.1:(\d+)(/[\w-]{32,}/)\n")
TUNNEL = re.compile(r"From another machine, run first: ssh -N -L (\d+):(\S+) \S+@\S+\n")


def write_records(folder: Path, *losses: float) -> None:
    lines = [json.dumps({"step": step, "loss": loss}) for step, loss in enumerate(losses, 1)]
    (folder / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))


@contextmanager
def serving(*words: str):
    """Serve as a user does; gives the process, the port and the page's path."""
    command = hpc_train("report", "--serve", *words)
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRON,
        preexec_fn=hear_ctrl_c,
    ) as process:
        try:
            line = process.stdout.readline()
            found = LINE.match(line)
            assert found, line + process.stderr.read()
            tunnel = TUNNEL.fullmatch(process.stdout.readline())
            socket_at = Path(words[1]) if words[0] == "--socket" else f"127.0.0.1:{found[1]}"
            assert (tunnel[1], tunnel[2]) == (found[1], str(socket_at))
            yield process, int(found[1]), found[2]
        finally:
            process.kill()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("served") / "run"
    made.mkdir()
    write_records(made, 4.5, 4.25, 4.0)
    (made / "secret").write_text("not for readers")
    return made


@pytest.fixture(scope="module")
def served(folder):
    with serving(str(folder)) as (_, port, path):
        yield port, path


def connect(to: int | Path) -> socket.socket:
    if isinstance(to, Path):
        client = socket.socket(socket.AF_UNIX)
        client.settimeout(30)
        client.connect(str(to))
        return client
    return socket.create_connection(("127.0.0.1", to), timeout=30)


def ask(to: int | Path, request: str) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of the answer to a request that may be wrong in any way."""
    with connect(to) as client:
        client.sendall(request.encode("latin-1"))
        answer = b""
        with suppress(ConnectionResetError):
            while part := client.recv(1 << 16):
                answer += part
    head, _, body = answer.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    return int(first.split()[1]), dict(line.split(": ", 1) for line in lines), body


def get(path: str, *, host: str = "127.0.0.1:80", method: str = "GET", more: str = "") -> str:
    return f"{method} {path} HTTP/1.1\r\nHost: {host}\r\n{more}\r\n"


def test_the_page_has_strict_headers(served):
    port, path = served
    status, headers, body = ask(port, get(path))
    assert status == 200
    assert b"<title>run" in body
    assert int(headers["Content-Length"]) == len(body)
    assert headers["Cache-Control"] == "no-store"
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Referrer-Policy"] == "no-referrer"
    policy = headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none';")
    scripts = policy.partition("script-src ")[2].split()
    assert len(scripts) == 2
    assert all(source.startswith("'sha256-") for source in scripts)
    assert "frame-ancestors 'none'" in policy
    assert not any("Python" in value for value in headers.values())
    assert ask(port, get(path, method="HEAD"))[::2] == (200, b"")
    assert ask(port, f"GET {path} HTTP/1.0\r\n\r\n")[0] == 200, "HTTP/1.0 has no host"


def test_a_page_that_a_reader_has_is_not_sent_again(served):
    port, path = served
    tag = ask(port, get(path))[1]["ETag"]
    for method in ("GET", "HEAD"):
        answer = ask(port, get(path, method=method, more=f"If-None-Match: {tag}\r\n"))
        assert answer[::2] == (304, b"")
    assert ask(port, get(path, more='If-None-Match: "other"\r\n'))[0] == 200


def test_other_addresses_get_nothing(served, folder):
    port, path = served
    token = path.strip("/")
    other = f"/{'x' * len(token)}/"
    for asked in (
        "/",
        other,
        f"/{token}",
        path.upper() if path.upper() != path else path.lower(),
        f"{path}secret",
        f"{path}../secret",
        f"{path}%2e%2e/secret",
        f"{path}..%2f..%2f..%2f..%2fetc/passwd",
        "/../../../../etc/passwd",
        f"/{folder}/secret",
        f"{path}metrics.jsonl",
        f"{path}?file=secret",
        f"{other}?{path}",
        f"//{token}//",
        f"http://127.0.0.1:{port}{path}",
        "/\xff\xfe/",
    ):
        status, headers, body = ask(port, get(asked))
        assert (status, body) == (404, b"404 Not Found\n"), asked
        assert headers["Content-Security-Policy"] == "default-src 'none'"
        assert headers["Cache-Control"] == "no-store"


def test_other_methods_are_refused(served):
    port, path = served
    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT", "WHAT", "get"):
        status, headers, body = ask(port, get(path, method=method, more="Content-Length: 0\r\n"))
        assert (status, headers["Allow"]) == (405, "GET, HEAD"), method
        assert path.encode() not in body


def test_hosts_of_other_names_are_refused(served):
    """A web site whose name leads to 127.0.0.1 would read the page otherwise."""
    port, path = served
    for host in (
        "evil.example",
        "127.0.0.1.evil.example",
        "localhost.evil.example:80",
        "",
        "a@localhost",
    ):
        assert ask(port, get(path, host=host))[0] == 421, host
    two = f"GET {path} HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n"
    assert ask(port, two)[0] == 421
    assert ask(port, f"GET {path} HTTP/1.1\r\n\r\n")[0] == 421
    for host in ("localhost", "LOCALHOST:8765", "[::1]:8765", "127.0.0.1"):
        assert ask(port, get(path, host=host))[0] == 200, host


def test_broken_and_slow_clients_block_nobody(served):
    port, path = served
    silent = [connect(port) for _ in range(20)]
    for number, client in enumerate(silent):
        client.sendall(b"GET /" * (number % 3))
    for request in (
        "nonsense\r\n\r\n",
        "GET / HTTP/9.9\r\n\r\n",
        f"GET /{'x' * 70000} HTTP/1.1\r\n\r\n",
    ):
        assert ask(port, request)[0] >= 400
    with connect(port) as client:  # asks, and goes without reading
        client.sendall(get(path).encode())
    answers = []
    readers = [
        threading.Thread(target=lambda: answers.append(ask(port, get(path))[0])) for _ in range(12)
    ]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join(30)
    assert answers == [200] * 12
    for client in silent:
        client.close()


@contextmanager
def served_here(folder: Path):
    """Serve in a thread of this process. Gives the socket, and the page's path."""
    write_records(folder, 1.0)
    path = folder / "socket"
    report = ServedReport([folder], lambda: "<body></body>")
    with module._listening(report, 0, path) as server:
        thread = threading.Thread(target=server.serve_forever, args=[0.01])
        thread.start()
        try:
            yield path, f"/{server.token}/"
        finally:
            server.shutdown()
            thread.join()


def test_a_connection_that_asks_nothing_is_closed_in_time(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "CONNECTION_SECONDS", 0.2)
    with served_here(tmp_path) as (path, _), connect(path) as client:
        client.sendall(b"GET")
        assert client.recv(1) == b""


def test_too_many_connections_are_closed_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "CONNECTIONS", 2)
    with served_here(tmp_path) as (path, page):
        with connect(path), connect(path), connect(path) as third:
            assert third.recv(1) == b""

        def answers() -> bool:
            with suppress(OSError, IndexError):
                return ask(path, get(page))[0] == 200
            return False

        wait_until(answers)  # the server has to see that the others are gone


def test_a_unix_socket_is_for_its_owner_alone(folder, tmp_path):
    path = tmp_path / "socket"
    with serving("--socket", str(path), str(folder)) as (process, _, page):
        assert path.stat().st_mode & 0o777 == 0o600
        assert ask(path, get(page))[0] == 200
        assert ask(path, get("/"))[0] == 404
        with pytest.raises(UserError, match="another server listens"):
            serve(ServedReport([folder], str), path=path)
        process.terminate()
        assert process.wait(PATIENCE) == 0
    assert not path.exists()


def test_a_socket_left_behind_is_taken_over_and_other_files_are_not(folder, tmp_path):
    path = tmp_path / "socket"
    with serving("--socket", str(path), str(folder)) as (process, _, _):
        process.kill()
        process.wait()
    assert path.exists()
    with serving("--socket", str(path), str(folder)) as (_, _, page):
        assert ask(path, get(page))[0] == 200
    path.unlink()
    path.write_text("mine")
    with pytest.raises(UserError, match="no Unix socket"):
        serve(ServedReport([folder], str), path=path)
    assert path.read_text() == "mine"
    for long in (tmp_path / ("x" * 120), tmp_path / "missing" / "socket"):
        with pytest.raises(UserError, match="cannot listen on the Unix socket"):
            serve(ServedReport([folder], str), path=long)


def test_only_this_machine_is_listened_to_and_ctrl_c_ends_it(folder):
    with serving(str(folder)) as (process, port, _):
        done = run(*hpc_train("report", "--serve", "--port", str(port), str(folder)))
        assert done.returncode == 2
        told = f"cannot listen on port {port} of 127.0.0.1: Address already in use: give another"
        assert told in only_line(done.stderr)
        done = run(*hpc_train("report", "--serve", "--port", "99999999", str(folder)))
        assert "there is no port 99999999: give one from 1 to 65535" in only_line(done.stderr)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", port), timeout=5)
        process.send_signal(signal.SIGINT)
        out, error = process.communicate(timeout=PATIENCE)
        assert (process.returncode, out, error) == (0, "", "")


def test_two_lines_say_how_to_reach_the_page(folder, tmp_path):
    words = ["--socket", str(tmp_path / "s"), str(folder)]
    with serving(*words) as (process, port, _):
        process.terminate()
        process.wait()
    with serving(*words) as (_, other, _):  # `serving` checks the form
        assert other != port, "two people do not take the same port"
    done = run(*hpc_train("report", "--socket", "s", str(folder)))
    assert (done.returncode, "without --serve" in only_line(done.stderr)) == (2, True)
    done = run(*hpc_train("report", "--serve", "--out", "s", str(folder)))
    assert done.returncode == 2
    done = run(*hpc_train("report", "--serve", str(tmp_path)))
    assert "is not a run directory" in only_line(done.stderr)


class Counted:
    """A page that counts how often it was made."""

    def __init__(self) -> None:
        self.count, self.error = 0, None

    def __call__(self) -> str:
        self.count += 1
        if self.error:
            raise self.error
        return f"<html><body>{self.count}</body></html>"


def test_the_page_is_made_again_only_if_files_have_changed(tmp_path, capsys):
    write_records(tmp_path, 1.0)
    made = Counted()
    report = ServedReport([tmp_path], made, seconds=0)
    report._next = 0.0
    (tmp_path / "progress.json").write_text("changes with each step, and is not read")
    first = report.page()
    assert (made.count, report.page()) == (1, first)
    write_records(tmp_path, 1.0, 2.0)
    report._next = 0.0
    assert report.page().tag != first.tag
    assert (made.count, report.page() is report.page()) == (2, True)
    (tmp_path / "task-0").mkdir()
    write_records(tmp_path / "task-0", 1.0)
    report._next = time.monotonic() + 100
    assert b"<body>2" in report.page().body, "the next one is not due"
    report._next = 0.0
    kept = report.page()
    assert b"<body>3" in kept.body
    made.error = OSError("stale file handle")
    write_records(tmp_path, 1.0, 2.0, 3.0)
    for _ in range(2):
        report._next = 0.0
        assert report.page() is kept
    assert capsys.readouterr().err.count("stale file handle") == 1
    made.error = None
    report._next = 0.0
    assert b"<body>6" in report.page().body


def test_readers_get_the_page_before_while_a_new_one_is_made(tmp_path):
    write_records(tmp_path, 1.0)
    begun, go = threading.Event(), threading.Event()

    def make() -> str:
        if begun.is_set():
            return "<body>never</body>"
        if report is not None:
            begun.set()
            assert go.wait(PATIENCE)
        return "<body></body>"

    report = None
    report = ServedReport([tmp_path], make, seconds=0)
    write_records(tmp_path, 2.0, 3.0)
    report._next = 0.0
    before = report._page
    maker = threading.Thread(target=report.page)
    maker.start()
    assert begun.wait(PATIENCE)
    assert report.page() is before
    go.set()
    maker.join(30)
