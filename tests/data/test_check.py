"""Hostile and damaged data folders: refused by one line, or their samples are the right ones."""

from __future__ import annotations

import copy
import json
import os
import threading
import time
from contextlib import contextmanager

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hpc_train import files
from hpc_train.data import manifest as manifests
from hpc_train.data.check import check_shards
from hpc_train.data.manifest import FILE_NAME, read_manifest
from hpc_train.data.prepare.work import prepare_text
from hpc_train.data.shards import TokenDataset
from hpc_train.data.tokenizer import describe_tokenizer
from hpc_train.errors import DataError
from tests.data.corruption import sealed

SEQUENCE = 16


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """A data folder of several shards."""
    folder = tmp_path_factory.mktemp("sound")
    (folder / "text").write_text("".join(f"line {n} of a text\n" for n in range(300)))
    prepare_text([folder / "text"], folder / "out", shard_mb=0.002, validation=0.2)
    return folder / "out"


@pytest.fixture
def out(sound, tmp_path):
    """A copy of it, to be damaged; cheap, as its files are links until they are replaced."""
    folder = tmp_path / "out"
    folder.mkdir()
    for path in sound.iterdir():
        os.link(path, folder / path.name)
    return folder


def replace(path, content):
    """Give a file another content, and leave others that are linked to it alone."""
    path.unlink()
    path.write_bytes(content)


@contextmanager
def replaced(path, content):
    """The same for a while: an example of Hypothesis leaves nothing to the next one."""
    aside = path.with_name("aside")
    path.rename(aside)
    path.write_bytes(content)
    try:
        yield
    finally:
        aside.rename(path)


def samples(folder):
    """The samples that training would see, by split."""
    manifest = read_manifest(folder)
    check_shards(folder, manifest)
    seen = {}
    for split in manifest.splits:
        dataset = TokenDataset(folder, manifest, split, SEQUENCE)
        inputs, targets = dataset.fetch(range(len(dataset)))
        dataset.close()
        seen[split] = [(*a, b[-1]) for a, b in zip(inputs.tolist(), targets.tolist(), strict=True)]
    return seen


def union(seen):
    """The samples of all splits."""
    return {sample for some in seen.values() for sample in some}


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=6,
)
VALUES = st.one_of(
    JSON,
    st.sampled_from(
        ["object", "O8", "float64", "int64", ">u2", "uint16", "uint64", True, -1, 0, 1e300, 1 << 70]
    ),
    st.sampled_from(
        ["../../etc/passwd", "/etc/passwd", "..", ".", "", "a\0b", "\ud800", "é", "a/b", "x" * 9999]
    ),
)


def places(tree, path=()):
    """The paths of all values of a JSON tree."""
    lists = enumerate(tree) if isinstance(tree, list) else ()
    for key, value in tree.items() if isinstance(tree, dict) else lists:
        yield (*path, key)
        yield from places(value, (*path, key))


def mutate(tree, draw):
    """Change, remove, copy or add a value somewhere."""
    path = draw(st.sampled_from(list(places(tree))))
    holder = tree
    for key in path[:-1]:
        holder = holder[key]
    how = draw(st.sampled_from(["change", "near", "remove", "copy", "add"]))
    value = holder[path[-1]]
    if how == "near" and isinstance(value, int):
        holder[path[-1]] = value + draw(st.sampled_from([-4096, -2, -1, 1, 2, 4096]))
    elif how == "remove":
        del holder[path[-1]]
    elif how == "copy":
        others = list(places(tree))
        other = tree
        for key in draw(st.sampled_from(others)):
            other = other[key]
        holder[path[-1]] = copy.deepcopy(other)
    elif how == "add" and isinstance(value, dict):
        value[draw(st.text(max_size=5))] = draw(VALUES)
    else:
        holder[path[-1]] = draw(VALUES)


CHEAP = settings(
    max_examples=150,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@CHEAP
@given(st.data())
def test_a_mutated_manifest_is_refused_or_gives_the_right_samples(sound, out, data):
    tree = json.loads((sound / FILE_NAME).read_text())
    for _ in range(data.draw(st.integers(1, 3))):
        if not any(places(tree)):
            break
        mutate(tree, data.draw)
    with replaced(out / FILE_NAME, sealed(tree).encode()):
        try:
            seen = samples(out)
            describe_tokenizer(read_manifest(out).tokenizer, out)
        except DataError as error:
            assert str(error)
        else:
            assert union(seen) <= union(samples(sound))


@CHEAP
@given(st.data())
def test_any_bytes_in_place_of_a_manifest(sound, out, data):
    content = bytearray((sound / FILE_NAME).read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        begin = data.draw(st.integers(0, len(content) - 1))
        end = begin + data.draw(st.integers(0, 3))
        content[begin:end] = data.draw(st.binary(max_size=4))
    with replaced(out / FILE_NAME, content):
        try:
            assert union(samples(out)) <= union(samples(sound))
        except DataError as error:
            assert str(error)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (["dtype"], "object", "dtype is 'object', not one of uint8, uint16, uint32"),
        (["vocab"], 257, "vocab is 257, not a whole number from 1 to 256"),
        (["vocab"], True, "vocab is True"),
        (["tokenizer"], "/etc/passwd", "tokenizer is '/etc/passwd', not a plain file name"),
        (["splits", "train", 0, "name"], "../x.h5", "shard 0 of train: name is '../x.h5'"),
        (["splits", "train", 1, "tokens"], 0, "shard 1 of train: tokens is 0"),
        (["splits", "train", 1, "offset"], 1 << 40, "its tokens end behind the end of the file"),
        (["splits", "train", 0, "hash"], "0" * 31, "not 32 hexadecimal digits"),
        (["splits", "train", 0, "more"], 1, "shard 0 of train has the unknown key 'more'"),
        (["splits", "train", 1, "name"], "train-00000.h5", "two shards have the same name"),
        (["splits", "test"], [], "not some of train, validation"),
        (["splits"], [], "not some of train, validation"),
        (["hash"], "0" * 32, "its hash is '00000000000000000000000000000000', but its content has"),
        (["documents"], 7, "but its content has the hash"),
        ([], 3, "the manifest is not an object"),
    ],
)
def test_the_line_says_what_is_wrong_in_a_manifest(sound, out, path, value, message):
    tree = {"": json.loads((sound / FILE_NAME).read_text())}
    holder = tree
    for key in ["", *path][:-1]:
        holder = holder[key]
    holder[["", *path][-1]] = value
    replace(out / FILE_NAME, json.dumps(tree[""]).encode())
    with pytest.raises(DataError) as caught:
        read_manifest(out)
    assert message in str(caught.value)
    assert "manifest.json is damaged" in str(caught.value)


def test_a_key_that_is_missing_is_named(sound):
    tree = json.loads((sound / FILE_NAME).read_text())
    del tree["splits"]["train"][0]["hash"]
    with pytest.raises(ValueError, match="shard 0 of train lacks the key hash"):
        manifests.parse_manifest(tree)


def test_a_key_that_is_there_twice_is_named(sound, out):
    text = (sound / FILE_NAME).read_text().replace('"vocab"', '"vocab": 7,\n "vocab"')
    replace(out / FILE_NAME, text.encode())
    with pytest.raises(DataError, match="has the key 'vocab' twice"):
        read_manifest(out)


def test_a_manifest_that_is_nested_too_deeply_or_is_a_pipe(tmp_path):
    (tmp_path / FILE_NAME).write_text("[" * 100_000)
    with pytest.raises(DataError, match="is damaged"):
        read_manifest(tmp_path)
    (tmp_path / FILE_NAME).unlink()
    os.mkfifo(tmp_path / FILE_NAME)
    with pytest.raises(DataError, match="holds no prepared data"):
        read_manifest(tmp_path)


def test_a_pipe_or_folder_in_place_of_a_shard_is_not_waited_for(sound, out):
    for make in (os.mkfifo, os.mkdir):
        path = out / "train-00000.h5"
        path.rmdir() if path.is_dir() else path.unlink()
        make(path)
        with pytest.raises(DataError, match="train-00000.h5"):
            check_shards(out, read_manifest(sound))


def test_a_shard_may_be_a_link_and_the_tokenizer_may_not_leave_the_folder(out, tmp_path):
    (out / "train-00000.h5").rename(tmp_path / "elsewhere")
    (out / "train-00000.h5").symlink_to(tmp_path / "elsewhere")
    check_shards(out, read_manifest(out))
    (tmp_path / "secret").write_text("a key")
    (out / "tokenizer.json").symlink_to(tmp_path / "secret")
    with pytest.raises(DataError, match=r"tokenizer.json is not a file of its folder"):
        describe_tokenizer("tokenizer.json", out)
    (tmp_path / "link").symlink_to(out)  # the folder itself may be reached by one
    (out / "tokenizer.json").unlink()
    (out / "tokenizer.json").write_text("{}")
    assert describe_tokenizer("tokenizer.json", tmp_path / "link") == "{}"


def test_a_short_read_is_not_the_end_of_a_shard(sound, monkeypatch):
    """A system call may read less than it was asked for, as it is interrupted."""
    whole = samples(sound)
    real = os.preadv

    def short(descriptor, buffers, offset):
        return real(descriptor, [buffers[0][: max(1, len(buffers[0]) // 2)]], offset)

    monkeypatch.setattr(files.os, "preadv", short)
    assert samples(sound) == whole


def test_threads_may_read_from_one_data_set(sound, monkeypatch):
    """They share its open files. None may close a file that another one reads."""
    monkeypatch.setattr("hpc_train.data.shard_files.most_open_files", lambda: 1)
    manifest = read_manifest(sound)
    dataset = TokenDataset(sound, manifest, "train", SEQUENCE)
    whole = dataset.fetch(range(len(dataset)))[0]
    wrong: list[object] = []
    real = os.preadv

    def slow(*arguments):
        time.sleep(1e-5)  # between opening and reading another thread has its turn
        return real(*arguments)

    monkeypatch.setattr(files.os, "preadv", slow)

    def look(seed):
        for _ in range(3):
            order = np.random.default_rng(seed).permutation(len(dataset))
            try:
                if not (dataset.fetch(order)[0] == whole[order]).all():
                    wrong.append("other samples")
            except DataError as error:
                wrong.append(error)

    threads = [threading.Thread(target=look, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    dataset.close()
    assert not wrong
