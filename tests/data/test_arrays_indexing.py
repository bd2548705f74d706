"""Whatever a file or an index says: one clear error that names it, or values of the file."""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import h5py
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hpc_train.data import Arrays, fork_server
from hpc_train.data.arrays import hdf5_index, indexing
from hpc_train.data.arrays.stored import COLUMNS, parse_variable
from hpc_train.errors import DataError, UserError
from tests.data.fields import answers_here, field
from tests.programs import ENVIRON, hpc_train, modules_of, only_line, run

COUNT = 1500  # damaged files
VARIABLES = ["contiguous", "chunked"]


@pytest.fixture
def mpi(monkeypatch):
    """A process that uses MPI, and has called nothing before."""
    monkeypatch.setattr(fork_server, "mpi_runs", lambda: True)
    monkeypatch.setattr(fork_server, "_state", None)


@pytest.fixture(scope="module")
def started():
    """A fork server, as a script has it that calls start_workers() first."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fork_server, "mpi_runs", lambda: False)
        fork_server.start_workers()


def helper_that(monkeypatch, does):
    """Let the helper process do something else in place of answering."""
    monkeypatch.setattr(indexing, "HELPER", ["-c", f"import os, sys, time\n{does}"])


def damaged(path, number, sound):
    """Damage a file at random; the number chooses how."""
    content, random = bytearray(sound), np.random.default_rng(number)
    used = np.flatnonzero(np.frombuffer(sound, np.uint8))
    for _ in range(random.integers(1, 4)):
        # Half of the damage is in what describes the values, at the beginning of the file.
        place = random.choice(used[used < 2500] if number % 2 else used)
        flipped = content[place] ^ 1 << random.integers(8)
        content[place] = random.integers(256) if number % 3 else flipped
    if number % 10 == 0:
        content = content[: random.integers(len(content))]
    path.write_bytes(content)


def test_damaged_files_are_refused_or_read_and_end_no_process(tmp_path):
    """Values that nothing protects may be others. If a file ends a helper, another one goes on."""
    path = tmp_path / "a.h5"
    expected = field(path)
    sound, rest, outcomes = path.read_bytes(), list(range(COUNT)), Counter()
    while rest:
        with indexing.helper_process(path) as helper:
            ended = False
            while rest and not ended:
                damaged(path, rest.pop(), sound)
                try:
                    answer = helper.look_into(path, VARIABLES)
                    outcomes[look(path, answer, expected)] += 1
                except DataError as error:
                    assert str(path) in str(error)
                    ended = "ended" in str(error) or "answered" in str(error)
                    outcomes["ended" if ended else "refused"] += 1
    assert outcomes["refused"] > COUNT // 10, outcomes
    assert outcomes["right"] > COUNT // 10, outcomes


def look(path, answer, expected):
    """How reading a damaged file ends."""
    how = "right"
    for name in VARIABLES:
        try:
            values = arrays_of(path, name, answer).fetch(range(4)).numpy()
        except (DataError, UserError) as error:
            assert name in str(error) or str(path) in str(error) or "window" in str(error)
            return "refused"
        if not np.array_equal(values, expected[:4]):
            how = "other"
    return how


def arrays_of(path, name, answer):
    """The data set that an answer of a helper makes."""

    def told(paths, names):
        return [indexing._checked(path, names, answer)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hpc_train.data.arrays.dataset.look_up", told)
        return Arrays(path, name)


@pytest.mark.parametrize(
    ("does", "message"),
    [
        ("os.kill(os.getpid(), 11)", "HDF5 library ended by SIGSEGV"),
        ("sys.exit(3)", "HDF5 library ended with exit code 3"),
        ("print('x' * 5000, flush=True); time.sleep(9)", "has lost its memory"),
        ("print('[]', flush=True); time.sleep(9)", "cannot be read as HDF5: no answer"),
        ("print('y' * 3000, end='', flush=True); time.sleep(99)", "more than 1000 bytes"),
        ("time.sleep(99)", "has not answered within 0.3 s"),
    ],
)
def test_a_helper_that_dies_or_lies_or_hangs(tmp_path, monkeypatch, does, message):
    field(tmp_path / "a.h5")
    helper_that(monkeypatch, does)
    if "hang" in message or "answered" in message:
        monkeypatch.setattr(indexing, "INDEX_SECONDS", 0.3)
    if "1000" in message:
        monkeypatch.setattr(indexing, "ANSWER_BYTES", 1000)
    with pytest.raises(DataError, match=message) as caught:
        Arrays(tmp_path / "a.h5", "contiguous")
    assert "a.h5" in str(caught.value)


def test_a_rank_that_uses_mpi_takes_the_fork_server(tmp_path, started, monkeypatch):
    monkeypatch.setattr(fork_server, "mpi_runs", lambda: True)
    expected = field(tmp_path / "a.h5")
    np.testing.assert_array_equal(Arrays(tmp_path / "a.h5", "chunked").fetch([1]), expected[1:2])
    (tmp_path / "b.h5").write_bytes(b"no HDF5 at all")
    with pytest.raises(DataError, match=r"b.h5 is no HDF5 file"):
        Arrays(tmp_path / "b.h5", "chunked")
    monkeypatch.setattr(indexing, "serve_forked", killed)
    with pytest.raises(DataError, match=r"a.h5: .* ended by SIGKILL"):
        Arrays(tmp_path / "a.h5", "chunked")


def killed(*_):
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_rank_that_uses_mpi_and_has_no_helper_is_told_what_to_do(tmp_path, mpi):
    field(tmp_path / "a.h5")
    with pytest.raises(UserError) as caught:
        Arrays(tmp_path / "a.h5", "contiguous")
    advice = (
        f"run `hpc-train data index {tmp_path}/a.h5` once, or call hpc_train.start_workers() at"
    )
    assert caught.value.remedy.startswith(advice)


def test_an_index_file_needs_no_helper(tmp_path, mpi, monkeypatch):
    expected = field(tmp_path / "a.h5")
    with h5py.File(tmp_path / "a.h5", "a") as file:
        file["text"] = "a text"
    done = run(*hpc_train("data", "index", str(tmp_path / "a.h5")))
    assert (done.returncode, done.stderr) == (0, "")
    assert "a.h5.index.json: variables that can be read: chunked, contiguous" in done.stdout
    assert "text cannot be read: its texts have no fixed length" in done.stdout
    arrays = Arrays(tmp_path / "a.h5", VARIABLES)
    np.testing.assert_array_equal(arrays.fetch([4])[0, 1], expected[4])
    with pytest.raises(DataError, match="has no variable t2m: it has chunked, contiguous, text"):
        Arrays(tmp_path / "a.h5", "t2m")
    os.utime(tmp_path / "a.h5", ns=(0, 0))  # the index is of another state of the file
    with pytest.raises(
        UserError, match="has another size or time of change than in its index, and"
    ):
        Arrays(tmp_path / "a.h5", VARIABLES)


def test_the_verb_loads_neither_torch_nor_mpi_nor_hdf5(tmp_path):
    field(tmp_path / "a.h5")
    code, told, modules = modules_of("data", "index", tmp_path / "a.h5")
    assert (code, {"torch", "mpi4py.MPI", "h5py"} & modules) == (0, set()), told


def test_files_that_cannot_be_indexed_are_named(tmp_path):
    field(tmp_path / "a.h5")
    (tmp_path / "b.h5").write_bytes(b"nothing")
    os.mkfifo(tmp_path / "pipe")
    paths = [str(tmp_path / name) for name in ("b.h5", "a.h5", "no.h5", "pipe")]
    done = run(*hpc_train("data", "index", *paths))
    assert done.returncode == 2
    assert only_line(done.stderr) == "files that were not indexed: 3 of 4: see above"
    assert f"{paths[0]} is no HDF5 file" in done.stdout
    assert f"{paths[2]}: No such file or directory" in done.stdout
    assert f"{paths[3]} is not a file" in done.stdout
    assert Path(paths[1] + ".index.json").exists()
    done = run(*hpc_train("data", "index", paths[0]))
    assert f"{paths[0]} is no HDF5 file: give HDF5" in only_line(done.stderr)
    assert done.stdout == ""


@pytest.fixture(scope="module")
def trees(tmp_path_factory):
    """A file, and what an index says of its variables."""
    path = tmp_path_factory.mktemp("index") / "a.h5"
    field(path)
    return path, hdf5_index.answer(str(path), VARIABLES)["variables"]


NUMBERS = st.sampled_from([-1, 0, 1, 2, 31, 1 << 31, 1 << 40, 1 << 62, 1 << 63, 1 << 70])
ANYTHING = (
    st.none() | NUMBERS | st.floats() | st.text(max_size=3) | st.booleans()
    | st.lists(NUMBERS, max_size=4)
)  # fmt: skip


@settings(max_examples=400, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_a_lying_index_never_reads_outside_of_the_file(trees, data):
    path, variables = trees
    name = data.draw(st.sampled_from(VARIABLES))
    tree = json.loads(json.dumps(variables[name]))
    key = data.draw(st.sampled_from([*tree, "table"]))
    if key == "table" and "table" in tree:
        column = data.draw(st.sampled_from([*COLUMNS]))
        kind = np.dtype(COLUMNS[column])
        values = np.frombuffer(base64.b64decode(tree["table"][column]), kind).copy()
        place = data.draw(st.integers(0, len(values) - 1))
        least, most = int(np.iinfo(kind).min), int(np.iinfo(kind).max)
        values[place] = data.draw(st.integers(least, most) | st.integers(0, 99))
        tree["table"][column] = base64.b64encode(values.tobytes()).decode()
    elif key in ("shape", "chunk"):
        tree[key][data.draw(st.integers(0, 2))] = data.draw(NUMBERS | st.integers(0, 99))
    else:
        tree[key] = data.draw(ANYTHING)
    read = []
    real = os.preadv

    def preadv(descriptor, buffers, offset):
        read.append(offset + sum(map(len, buffers)))
        return real(descriptor, buffers, offset)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "preadv", preadv)
        try:
            arrays = arrays_of(path, name, (path.stat(), {name: tree}))
            arrays.fetch([0, len(arrays) - 1])
        except DataError as error:
            assert path.name in str(error) or "takes" in str(error) or "row" in str(error)
    assert max(read, default=0) <= path.stat().st_size


def test_an_index_that_claims_more_than_a_file_can_hold(trees):
    path, variables = trees
    for name, key, value in (
        ("contiguous", "offset", path.stat().st_size),
        ("chunked", "shape", [1 << 40, 5, 7]),
        ("chunked", "chunk", [1 << 20, 1 << 10, 4]),
        ("chunked", "filters", [[1, [1], "deflate"]] * 2),
        ("chunked", "scale", float("inf")),
        ("contiguous", "dtype", "O"),
        ("contiguous", "truth", [None]),
        ("contiguous", "truth", [[]]),
    ):
        says = r"leave the file|claims|more than|twice|finite|type|truth values"
        with pytest.raises(ValueError, match=says):
            parse_variable({**variables[name], key: value}, path.stat().st_size)


@pytest.mark.parametrize("text", ["", "[" * 100_000, "[]", '{"format": "x"}', "null", "\xff"])
def test_an_index_file_that_is_damaged_is_named(tmp_path, text):
    field(tmp_path / "a.h5")
    (tmp_path / "a.h5.index.json").write_text(text, encoding="latin-1")
    with pytest.raises(DataError, match=r"the index .*a.h5.index.json cannot be used"):
        Arrays(tmp_path / "a.h5", "chunked")


def test_a_helper_ends_with_its_rank_and_does_not_hang(tmp_path):
    """A signal ends it if a file takes too long, also if nobody is left who would kill it."""
    code = (
        "import time\nfrom hpc_train.data.arrays import hdf5_index\n"
        "hdf5_index.answer = lambda path, names: time.sleep(99)\n"
        "hdf5_index.answer_requests([{'path': '', 'names': None}], 1, 1)"
    )
    begin = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", code], env=ENVIRON, check=False, stdout=subprocess.DEVNULL
    )
    assert done.returncode == -signal.SIGALRM
    assert time.monotonic() - begin < 60


def test_the_helpers_of_tests_answer_as_the_process_does(tmp_path, monkeypatch):
    field(tmp_path / "a.h5")
    [(_, expected)] = indexing.ask_helper([tmp_path / "a.h5"], None)
    answers_here(monkeypatch)
    [(_, found)] = indexing.ask_helper([tmp_path / "a.h5"], None)
    assert found == expected
