"""`hpc-train prepare` on many ranks: as a function, and as it is run."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sysconfig
from pathlib import Path

import psutil
import pytest

from hpc_train.cli.prepare import prepare_together
from hpc_train.data.prepare import work as prepare
from hpc_train.data.prepare.dealing import FAILED_FILE
from hpc_train.data.prepare.request import text_request
from hpc_train.data.prepare.work import prepare_text
from hpc_train.errors import DataError
from tests.data.prepared import seen
from tests.programs import COLD, ENVIRON, command, hpc_train, only_line, run, wait_for_end
from tests.waiting import wait_until

HOW = {"shard_mb": 0.01, "validation": 0.1}
WORDS = ("--shard_mb", "0.01", "--validation", "0.1")
LIBRARY = Path(sysconfig.get_path("stdlib"))


def together_prepared(group, texts: Path, out: Path):
    return prepare_together(group, lambda: text_request([texts], out, **HOW))


@pytest.mark.ranks(1, 2, 3, 4)
def test_any_number_of_ranks_makes_the_same_folder(group, together):
    made = together_prepared(group, LIBRARY / "json", together / "out")
    if group.rank == 0:
        alone = prepare_text([LIBRARY / "json"], together / "alone", **HOW)
        assert made == alone
        assert len(made.splits["train"]) > 3
        assert seen(together / "out") == seen(together / "alone")
        assert not list(together.glob(".*"))


@pytest.mark.ranks(2, 4)
def test_a_full_disk_of_one_rank_ends_all_and_the_next_start_continues(
    group, together, monkeypatch
):
    bad, real, written = group.size - 1, prepare.write_shard, []

    def write_shard(path, *arguments):
        attempt = path.parent.parent
        if group.rank == bad:
            wait_until(lambda: list(attempt.parent.glob("*-*.json")))
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if written:
            wait_until((attempt / FAILED_FILE).exists)
        written.append(path)
        return real(path, *arguments)

    with monkeypatch.context() as patch, pytest.raises(DataError) as caught:
        patch.setattr(prepare, "write_shard", write_shard)
        together_prepared(group, LIBRARY / "email", together / "out")
    assert f"rank {bad} " in caught.value.cause
    assert "No space left" in caught.value.cause
    group.barrier()
    if group.rank == 0:
        assert not (together / "out").exists()
        assert list(together.glob(".out.partial/*/*-*.json"))
    group.barrier()
    together_prepared(group, LIBRARY / "email", together / "out")
    if group.rank == 0:
        prepare_text([LIBRARY / "email"], together / "alone", **HOW)
        assert seen(together / "out") == seen(together / "alone")


@pytest.mark.ranks(3)
def test_what_only_rank_0_can_see_is_an_error_of_all(group, together):
    with pytest.raises(DataError, match="/no/such does not exist"):
        together_prepared(group, Path("/no/such"), together / "out")


def test_ranks_and_one_process_print_and_make_the_same(tmp_path):
    alone = run(
        *hpc_train("prepare", "text", f"{LIBRARY}/json", "--out", "a", *WORDS), cwd=tmp_path
    )
    assert alone.returncode == 0, alone.stderr
    words = ["prepare", "text", f"{LIBRARY}/json", "--out", "b", *WORDS]
    many = run(*command("mpirun", 3, *words), cwd=tmp_path)
    assert many.returncode == 0, many.stderr
    assert alone.stdout.splitlines()[-1].removeprefix("a") == many.stdout.splitlines()[
        -1
    ].removeprefix("b")
    assert seen(tmp_path / "a") == seen(tmp_path / "b")


@pytest.mark.parametrize("launcher", ["alone", "mpirun"])
def test_a_killed_preparation_continues(tmp_path, launcher):
    out, how = tmp_path / "out", {"shard_mb": 0.004, "validation": 0.1}
    paths = [str(LIBRARY / name) for name in ("json", "email", "asyncio")]
    options = ["--out", str(out), "--shard_mb", "0.004", "--validation", "0.1"]
    words = command(launcher, 2, "prepare", "text", *paths, *options)
    started = subprocess.Popen(
        words,
        env=ENVIRON | COLD,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    wait_until(lambda: list(tmp_path.glob(".out.partial/*/train-*5.json")), pause=0.002)
    for process in [*psutil.Process(started.pid).children(recursive=True), started]:
        process.send_signal(signal.SIGKILL)
    started.wait()
    wait_for_end(out, 30)
    assert not out.exists()
    done = run(*words)
    assert done.returncode == 0, done.stderr
    assert "continues: " in done.stdout
    prepare_text(paths, tmp_path / "alone", **how)
    assert seen(out) == seen(tmp_path / "alone")
    assert {path.name for path in tmp_path.iterdir()} == {"out", "alone"}


def test_mistakes_in_the_input_end_all_ranks_with_one_line(tmp_path):
    lines = [json.dumps({"text": "words " * 50})] * 200
    (tmp_path / "a.jsonl").write_text("\n".join([*lines, "{}", *lines]))
    out = ["--out", str(tmp_path / "out"), *WORDS]
    done = run(*command("mpirun", 2, "prepare", "text", str(tmp_path / "a.jsonl"), *out))
    assert done.returncode == 2
    assert f"{tmp_path}/a.jsonl, line 201: it is not an object" in only_line(done.stderr)
    with prepare.begun(text_request([LIBRARY / "json"], tmp_path / "out")):
        again = run(*command("mpirun", 2, "prepare", "text", f"{LIBRARY}/json", *out))
    assert again.returncode == 2
    assert f"is being prepared by process {os.getpid()} on" in only_line(again.stderr)


def test_tokens_of_others(tmp_path):
    (tmp_path / "a.bin").write_bytes(bytes(range(100)) * 100)
    words = ["prepare", "tokens", "a.bin", "--stored", "uint8", "--vocab", "100", "--out", "out"]
    done = run(*hpc_train(*words), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "vocabulary of 100, 10000 tokens to train on" in done.stdout
