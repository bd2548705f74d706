from __future__ import annotations

import errno
import gzip
import json
import logging
import os
import random
import re
import resource
from pathlib import Path

import h5py
import numpy as np
import pytest

from hpc_train.data import manifest as manifests
from hpc_train.data.check import check_shards
from hpc_train.data.manifest import read_manifest
from hpc_train.data.prepare import texts as text_files
from hpc_train.data.prepare import work as prepare
from hpc_train.data.prepare.dealing import Dealing
from hpc_train.data.prepare.partial import locked_partial
from hpc_train.data.prepare.portions import whole_parts
from hpc_train.data.prepare.request import text_request
from hpc_train.data.prepare.work import prepare_text
from hpc_train.data.shards import TokenDataset
from hpc_train.errors import DataError
from tests.data.prepared import seen


@pytest.fixture
def texts(tmp_path):
    """A folder of texts of many lengths, and some files that are none."""
    folder = tmp_path / "texts"
    (folder / "sub").mkdir(parents=True)
    generator = random.Random(0)
    for number in range(20):
        lines = [f"text {number} line {line} äöü€𝄞\n" for line in range(generator.randint(1, 60))]
        (folder / ("sub" if number % 2 else "") / f"{number}.txt").write_text("".join(lines))
    (folder / "binary").write_bytes(b"\x00\x01")
    (folder / "latin1").write_bytes("äöü".encode("latin-1"))
    (folder / "cut").write_bytes("€".encode()[:2])
    (folder / "empty").write_bytes(b"")
    return folder


def all_tokens(out, split):
    tokens = []
    for shard in read_manifest(out).splits.get(split, ()):
        with h5py.File(out / shard.name) as file:
            tokens.append(file["tokens"][:])
    return np.concatenate(tokens) if tokens else np.array([], np.uint8)


@pytest.mark.parametrize("shard_mb", [256, 0.001])
@pytest.mark.parametrize("validation", [0.0, 0.2])
def test_all_text_is_in_the_shards_once_and_nothing_else(texts, tmp_path, shard_mb, validation):
    out = tmp_path / "out"
    made = prepare_text([texts], out, shard_mb=shard_mb, validation=validation)
    assert made.documents == 20
    tokens = bytes(all_tokens(out, "validation")) + bytes(all_tokens(out, "train"))
    lines = [line for text in tokens.split(b"\0") for line in text.splitlines()]
    expected = [line for path in texts.rglob("*.txt") for line in path.read_bytes().splitlines()]
    assert sorted(lines) == sorted(expected)
    share = made.tokens("validation") / len(tokens)
    assert share == pytest.approx(validation, abs=0.02)
    assert (len(made.splits["train"]) > 1) == (shard_mb < 1)
    check_shards(out, read_manifest(out))


def test_one_long_text_is_cut_at_a_line(tmp_path):
    (tmp_path / "a.txt").write_text("".join(f"line {n}\n" for n in range(1000)))
    prepare_text([tmp_path / "a.txt"], tmp_path / "out", validation=0.1)
    held_out = bytes(all_tokens(tmp_path / "out", "validation")).rstrip(b"\0")
    assert held_out.startswith(b"line 0\n")
    assert held_out.endswith(b"\n")
    assert 800 < len(held_out) < 1100


def test_a_shard_tells_people_what_it_is(texts, tmp_path):
    prepare_text([texts], tmp_path / "out", validation=0)
    with h5py.File(tmp_path / "out" / "train-00000.h5") as file:
        assert file.attrs["tokenizer"] == "bytes"
        assert file.attrs["source"].endswith("and 15 more")


def test_the_same_texts_give_the_same_shards(texts, tmp_path):
    for name in ("a", "b"):
        prepare_text([texts], tmp_path / name, validation=0.1)
    assert read_manifest(tmp_path / "a").digest == read_manifest(tmp_path / "b").digest


def test_samples_are_consecutive_tokens_and_targets_follow_them(texts, tmp_path):
    out = tmp_path / "out"
    made = prepare_text([texts], out, shard_mb=0.001, validation=0)
    dataset = TokenDataset(out, made, "train", 16)
    expected = []
    for shard in made.splits["train"]:
        with h5py.File(out / shard.name) as file:
            tokens = file["tokens"][:]
        starts = range(0, len(tokens) - 16, 16)
        expected += [tokens[start : start + 17].tolist() for start in starts]
    assert len(dataset) == len(expected)
    order = np.random.default_rng(0).permutation(len(dataset))
    inputs, targets = dataset.fetch(order)
    for row, index in enumerate(order):
        assert inputs[row].tolist() == expected[index][:-1]
        assert targets[row].tolist() == expected[index][1:]
    dataset.close()


def test_more_shards_than_open_files(texts, tmp_path, monkeypatch):
    monkeypatch.setattr("hpc_train.data.shard_files.most_open_files", lambda: 2)
    made = prepare_text([texts], tmp_path / "out", shard_mb=0.001)
    dataset = TokenDataset(tmp_path / "out", made, "train", 16)
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(2):
        dataset.fetch(range(len(dataset)))
    assert len(list(Path("/proc/self/fd").iterdir())) <= before + 2


@pytest.mark.parametrize("end", ["<|endoftext|>", "<|end_of_text|>", "<of my own>"])
def test_a_tokenizer_of_the_library(texts, tmp_path, caplog, end):
    caplog.set_level(logging.INFO, "hpc_train")
    tokenizers = pytest.importorskip("tokenizers")
    from tokenizers import decoders, models, pre_tokenizers, trainers

    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=[end],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train([str(path) for path in texts.rglob("*.txt")], trainer)
    tokenizer.save(str(tmp_path / "mine.json"))
    out = tmp_path / "out"
    made = prepare_text([texts], out, tokenizer=str(tmp_path / "mine.json"), validation=0)
    assert (made.vocab, made.dtype, made.tokenizer) == (300, "uint16", "tokenizer.json")
    from hpc_train.data.tokenizer import describe_tokenizer, loads

    codec = loads(describe_tokenizer(made.tokenizer, out))
    text = codec.decode(all_tokens(out, "train").tolist())
    known = end != "<of my own>"
    told = f"token 0 ('{end}') is put behind each text" if known else "no token is put behind texts"
    assert told in caplog.text
    assert text.endswith(end) == known
    parts = [part for part in text.split(end) if part]
    every = sorted(path.read_text() for path in texts.rglob("*.txt"))
    assert sorted(parts) == every if known else len(text) == len("".join(every))


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"paths": ["/no/such/folder"]}, "/no/such/folder does not exist"),
        ({"validation": 1.0}, "--validation is 1.0"),
        ({"shard_mb": 0}, "--shard_mb is 0"),
        ({"shard_mb": 1e308}, "--shard_mb is 1e+308: give a size above 0, and at most 1e+09"),
        ({"tokenizer": "/no/tokenizer.json"}, "tokenizer /no/tokenizer.json"),
    ],
)
def test_mistakes_leave_nothing_behind(texts, tmp_path, how, message):
    arguments = {"paths": [texts], "out": tmp_path / "out", **how}
    with pytest.raises(DataError) as caught:
        prepare_text(**arguments)
    assert message in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["texts"]


def test_a_folder_without_text(tmp_path):
    folder = tmp_path / "given"
    folder.mkdir()
    (folder / ".hidden").write_text("text\n")
    with pytest.raises(DataError, match="no file is in the folders.*begin with a dot are left out"):
        prepare_text([folder], tmp_path / "out")
    (folder / "binary").write_bytes(b"\0")
    with pytest.raises(DataError, match=r"given \(1 is not UTF-8, such as .*iconv -f latin1 -t"):
        prepare_text([folder], tmp_path / "out")
    (folder / "binary").write_bytes(b"")
    with pytest.raises(DataError, match="no text in the 1 file that was given: give files"):
        prepare_text([folder], tmp_path / "out")
    (tmp_path / "file").touch()
    (folder / "text").write_text("text\n")
    with pytest.raises(DataError, match="Not a directory: give another path"):
        prepare_text([folder], tmp_path / "file" / "out")


def test_a_mixture_without_its_brackets_is_told_the_form(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in "ab":
        (tmp_path / name).mkdir()
    told = r"a list: '\[\{path: a, weight: 1\}, \{path: b, weight: 1\}\]'"
    with pytest.raises(DataError, match=told):
        read_manifest(Path("a,b"))


def test_byte_order_marks_are_no_text_and_skipped_files_are_named(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    folder = tmp_path / "given"
    folder.mkdir()
    (folder / "a.txt").write_bytes(b"\xef\xbb\xbfone\n")
    (folder / "b.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "two"}\n')
    (folder / "c.txt.gz").write_bytes(gzip.compress(b"\xef\xbb\xbfthree\n"))
    (folder / "latin").write_bytes(b"caf\xe9\n")
    (folder / "empty").touch()
    (folder / "link").symlink_to("nowhere")
    prepare_text([folder], tmp_path / "out")
    (shard,) = (tmp_path / "out").glob("*.h5")
    with h5py.File(shard) as file:
        assert sorted(bytes(file["tokens"][:]).split(b"\0")) == [b"", b"one\n", b"three\n", b"two"]
    assert f"skipped 1 file that is not UTF-8 text, such as {folder}/latin" in caplog.text
    assert f"skipped 1 file that is empty, such as {folder}/empty" in caplog.text
    assert f"such as dangling links and pipes: {folder}/link" in caplog.text


@pytest.mark.parametrize(
    ("name", "why"), [("a.txt", "the text is too short"), ("a.txt.gz", "files are not cut")]
)
def test_a_text_of_which_nothing_is_held_out_says_why(tmp_path, caplog, name, why):
    opened = gzip.open if name.endswith(".gz") else open
    with opened(tmp_path / name, "wt") as out:
        out.write("ab\n")
    prepare_text([tmp_path / name], tmp_path / "out", validation=0.1)
    assert f"nothing is held out for validation: {why}" in caplog.text.replace("compressed ", "")


def test_nothing_to_train_on_is_refused(tmp_path):
    # The end of the file is no text, and its begin is held out.
    (tmp_path / "a.txt").write_bytes(b"text\n" * 20000 + b"\xff\n" * 10)
    with pytest.raises(DataError, match="leave no tokens to train on"):
        prepare_text([tmp_path / "a.txt"], tmp_path / "out", validation=0.9)


def test_a_shard_may_be_larger_than_memory(texts, tmp_path):
    assert prepare_text([texts], tmp_path / "a", shard_mb=1e9, validation=0.1) == prepare_text(
        [texts], tmp_path / "b", validation=0.1
    )


def test_a_target_inside_of_the_input_is_refused(texts):
    with pytest.raises(DataError, match="is in the folder"):
        prepare_text([texts], texts / "deep" / "out")
    assert not (texts / "deep").exists()


def test_an_existing_folder_is_not_touched(texts, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    prepare_text([texts], out)  # an empty one may be there
    before = {path: path.stat().st_mtime_ns for path in out.iterdir()}
    with pytest.raises(DataError, match="exists already"):
        prepare_text([texts], out)
    assert before == {path: path.stat().st_mtime_ns for path in out.iterdir()}


def test_a_kill_after_a_folder_has_its_name_leaves_nothing_for_good(texts, tmp_path, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr("shutil.rmtree", lambda *_, **how: None)
        prepare_text([texts], tmp_path / "out")
    left = tmp_path / ".out.partial"
    with locked_partial(tmp_path / "out"):  # somebody may still be removing it
        with pytest.raises(DataError, match="out exists already, and is complete: give another"):
            prepare_text([texts], tmp_path / "out")
        assert left.exists()
    with pytest.raises(DataError, match="out exists already, and is complete: give another"):
        prepare_text([texts], tmp_path / "out")
    assert not left.exists()
    check_shards(tmp_path / "out", read_manifest(tmp_path / "out"))


@pytest.mark.parametrize("out", [".", "./", "new/.."])
def test_an_out_without_a_name_is_refused(texts, tmp_path, monkeypatch, out):
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    with pytest.raises(DataError, match="is no name of a new folder: give a name"):
        prepare_text([texts], out)
    assert not [*Path().iterdir()]


def test_a_link_as_target_is_refused_at_the_start(texts, tmp_path):
    out = tmp_path / "out"
    for leads_to in ("nothing", "empty"):
        (tmp_path / "empty").mkdir(exist_ok=True)
        out.symlink_to(leads_to)
        with pytest.raises(DataError, match=f"out is a link: give {tmp_path / leads_to}, to which"):
            prepare_text([texts], out)
        out.unlink()


@pytest.mark.parametrize("nbytes", [3000, 7000, 40000])
def test_a_full_disk_is_told(tmp_path, nbytes):
    (tmp_path / "a.txt").write_text("text\n" * 12000)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        with pytest.raises(DataError, match="cannot write .*: File too large: free some space"):
            prepare_text([tmp_path / "a.txt"], tmp_path / "out", validation=0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_disk_that_loses_data_is_noticed_before_anything_is_published(
    texts, tmp_path, monkeypatch
):
    real = h5py.File

    class Forgetful(real):
        def close(self):
            name = self.filename
            super().close()
            with open(name, "r+b") as file:  # noqa: PTH123
                file.seek(-9000, os.SEEK_END)
                file.write(b"\0" * 100)

        __exit__ = lambda self, *_: self.close()  # noqa: E731

    monkeypatch.setattr("hpc_train.data.write.h5py.File", Forgetful)
    with pytest.raises(DataError, match="did not keep what was written"):
        prepare_text([texts], tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["texts"]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda shard: shard.unlink(), "is missing"),
        (lambda shard: os.truncate(shard, shard.stat().st_size - 1), "its manifest says"),
        (lambda shard: shard.write_bytes(b"\0" * shard.stat().st_size), "is damaged"),
    ],
)
def test_damaged_shards_are_named(texts, tmp_path, damage, message):
    out = tmp_path / "out"
    made = prepare_text([texts], out)
    damage(out / "train-00000.h5")
    with pytest.raises(DataError, match=f"train-00000.h5 .*{message}"):
        check_shards(out, made)


def test_a_shard_of_another_preparation_is_named(texts, tmp_path):
    prepare_text([texts], tmp_path / "a")
    text = (texts / "0.txt").read_text()
    (texts / "0.txt").write_text(text.swapcase())
    made = prepare_text([texts], tmp_path / "b")
    (tmp_path / "a" / "train-00000.h5").rename(tmp_path / "b" / "train-00000.h5")
    with pytest.raises(DataError, match="not the one its manifest describes"):
        check_shards(tmp_path / "b", made)


def test_a_shard_that_shrinks_while_it_is_read(texts, tmp_path):
    made = prepare_text([texts], tmp_path / "out", validation=0)
    dataset = TokenDataset(tmp_path / "out", made, "train", 16)
    shard = tmp_path / "out" / "train-00000.h5"
    os.truncate(shard, 5000)
    with pytest.raises(DataError, match="has 5000 bytes"):
        dataset.fetch([len(dataset) - 1])
    dataset.close()


@pytest.mark.parametrize(
    "text", ["", "{", "{}", "[]", '{"format": "other/1"}', '{"format": "hpc_train.tokens/1"}']
)
def test_a_damaged_manifest_is_named(tmp_path, text):
    (tmp_path / manifests.FILE_NAME).write_text(text)
    with pytest.raises(DataError, match=r"manifest.json is damaged .*run `hpc-train prepare`"):
        read_manifest(tmp_path)


def test_a_folder_without_a_manifest_says_how_to_make_one(tmp_path):
    with pytest.raises(DataError, match="holds no prepared data"):
        read_manifest(tmp_path)


def test_a_manifest_reads_back_equal(texts, tmp_path):
    made = prepare_text([texts], tmp_path / "out")
    assert manifests.parse_manifest(json.loads(made.to_json())) == made


def test_a_split_of_less_than_one_sample_is_an_error(texts, tmp_path):
    made = prepare_text([texts], tmp_path / "out")
    with pytest.raises(DataError, match="not one sample of 1000000"):
        TokenDataset(tmp_path / "out", made, "train", 1_000_000)


def test_one_long_line_is_cut_like_any_text(tmp_path):
    (tmp_path / "line").write_text("\u00e9" * 50_000)
    made = prepare_text([tmp_path / "line"], tmp_path / "out", validation=0.1)
    assert 10_000 <= made.tokens("validation") <= 10_000 + 2 * text_files.LINE_BYTES
    assert made.tokens("validation") % 2 == 1, "no character is cut; a separator ends each part"
    assert made.tokens("train") + made.tokens("validation") == 100_002


def test_characters_at_the_border_of_two_pieces_are_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(text_files, "TEXT_PIECE_BYTES", 3)
    (tmp_path / "a").write_text("a€äb𝄞")
    [part] = whole_parts(text_files.list_texts([tmp_path / "a"]))
    assert text_files.is_text_part(part)


def test_each_document_begins_behind_a_separator(texts, tmp_path):
    made = prepare_text([texts], tmp_path / "out", shard_mb=0.001, validation=0.2)
    for split, shards in made.splits.items():
        ended = True  # whether a document has ended before the next token
        for shard in shards:
            with h5py.File(tmp_path / "out" / shard.name) as file:
                tokens, documents = file["tokens"][:], file["documents"][:]
            begins = np.concatenate([[ended], tokens[:-1] == 0]).astype(bool)
            assert documents.dtype == np.int64
            assert documents.tolist() == np.flatnonzero(begins).tolist(), split
            ended = tokens[-1] == 0


def packed(kind: str, content: bytes) -> bytes:
    """Content as a file of two compressed frames; or unchanged."""
    half = len(content) // 2
    if kind == "gz":
        return gzip.compress(content[:half]) + gzip.compress(content[half:])
    if kind == "zst":
        compress = pytest.importorskip("zstandard").ZstdCompressor().compress
        return compress(content[:half]) + compress(content[half:])
    return content


@pytest.mark.parametrize("kind", ["", "gz", "zst"])
@pytest.mark.parametrize("form", ["txt", "jsonl"])
def test_other_formats_have_the_tokens_of_plain_texts(tmp_path, monkeypatch, kind, form):
    """Texts are longer than what is encoded at once."""
    monkeypatch.setattr(text_files, "TEXT_PIECE_BYTES", 100)
    texts = ["a first\ntext €\n" * 40, "short", "x" * 5000]
    (tmp_path / "plain").mkdir()
    (tmp_path / "other").mkdir()
    suffix = f".{kind}" if kind else ""
    for number, text in enumerate(texts):
        (tmp_path / f"plain/{number}.txt").write_text(text)
        packed_text = packed(kind, text.encode())
        if form == "txt":
            (tmp_path / f"other/{number}.txt{suffix}").write_bytes(packed_text)
    if form == "jsonl":
        lines = [json.dumps({"meta": 1, "text": text}) for text in ["", *texts]]
        content = "\n\n".join(lines).encode()
        (tmp_path / f"other/all.jsonl{suffix}").write_bytes(packed(kind, content))
    found = []
    for name in ("plain", "other"):
        made = prepare_text([tmp_path / name], tmp_path / f"{name}.out", validation=0)
        assert made.documents == 3
        tokens = bytes(all_tokens(tmp_path / f"{name}.out", "train"))
        assert tokens.endswith(b"\0")
        found.append(sorted(tokens.split(b"\0")))
    assert found[0] == found[1] == sorted([b"", *(text.encode() for text in texts)])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{", "line 203: "),
        (b"[]", "line 203: it is not an object with a text under the key text"),
        (b'{"txt": "a"}', "line 203: it is not an object with a text under the key text"),
        (b'{"text": 1}', "line 203: it is not an object"),
        (b'{"text": "\\u0000"}', "line 203: its text has a zero byte"),
        (b'{"text": "\\ud800"}', "line 203: "),
        (b'{"text": "\xff"}', "line 203: "),
    ],
)
def test_a_bad_json_line_is_named(tmp_path, line, message):
    sound = [b'{"text": "some words of a document"}'] * 202
    (tmp_path / "a.jsonl").write_bytes(b"\n".join([*sound, line, *sound]))
    with pytest.raises(DataError, match=re.escape(f"{tmp_path}/a.jsonl, {message}")):
        prepare_text([tmp_path / "a.jsonl"], tmp_path / "out", shard_mb=0.001, validation=0)
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]  # no start could go on there


@pytest.mark.parametrize("kind", ["gz", "zst"])
@pytest.mark.parametrize("harm", ["short", "other", "begin"])
def test_a_damaged_compressed_file_is_named(tmp_path, kind, harm):
    noise = random.Random(1)
    content = packed(kind, "".join(f"{noise.random()}\n" for _ in range(20_000)).encode())
    half = 0 if harm == "begin" else 3 * len(content) // 4
    bad = content[:half] if harm == "short" else content[:half] + b"?" * (len(content) - half)
    (tmp_path / f"a.txt.{kind}").write_bytes(bad)
    with pytest.raises(DataError, match=f"a.txt.{kind} is (damaged|not UTF-8)"):
        prepare_text([tmp_path / f"a.txt.{kind}"], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_turns_out_not_to_be_text_is_left_out(texts, tmp_path, caplog):
    (texts / "begins well").write_bytes(b"text\n" * 20_000 + b"\xff")
    with caplog.at_level("INFO"):
        made = prepare_text([texts], tmp_path / "out", validation=0)
    assert made.documents == 20
    assert f"left out what is not UTF-8 text in 1 file, such as {texts}/begins well" in caplog.text


def test_texts_around_a_part_that_is_left_out_are_separated(tmp_path):
    begin, end = b"before\n" * 60_000, b"behind\n" * 60_000
    (tmp_path / "a.txt").write_bytes(begin + b"\0" + end)
    made = prepare_text([tmp_path / "a.txt"], tmp_path / "out", validation=0, shard_mb=0.2)
    tokens, documents = b"", []
    for shard in made.splits["train"]:
        with h5py.File(tmp_path / "out" / shard.name) as file:
            documents += [len(tokens) + int(place) for place in file["documents"]]
            tokens += bytes(file["tokens"][:])
    before, _, behind = tokens.partition(b"\0")
    assert before.startswith(b"before\n")
    assert before.endswith(b"before\n")
    assert behind.startswith(b"behind\n")
    assert len(behind) > 100_000
    assert documents == [0, len(before)]
    assert made.documents == 2


@pytest.mark.parametrize("ending", ["gz", "zst"])
def test_the_text_in_a_compressed_file_is_estimated_well(tmp_path, ending):
    compress = gzip.compress
    if ending == "zst":
        compress = pytest.importorskip("zstandard").ZstdCompressor().compress
    words = np.random.default_rng(0).integers(0, 100_000, 500_000)
    for number, text in enumerate(
        [b"one line\n" * 400_000, b" ".join(b"%d" % word for word in words), b"short\n" * 9000]
    ):
        path = tmp_path / f"{number}.txt.{ending}"
        path.write_bytes(compress(text))
        [file] = text_files.only_texts(text_files.list_texts([path]))
        assert file.nbytes == pytest.approx(len(text), rel=0.05)


def failing(monkeypatch, count: int) -> None:
    """Let the disk be full after `count` shards."""
    real, left = prepare.write_shard, [count]

    def write_shard(*arguments):
        if not left[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        left[0] -= 1
        return real(*arguments)

    monkeypatch.setattr(prepare, "write_shard", write_shard)


def test_a_preparation_continues_where_it_has_failed(texts, tmp_path, monkeypatch, caplog):
    how = {"shard_mb": 0.002, "validation": 0.1}
    prepare_text([texts], tmp_path / "whole", **how)
    with monkeypatch.context() as patch:
        failing(patch, 4)
        with pytest.raises(DataError, match="cannot write .*No space left"):
            prepare_text([texts], tmp_path / "out", **how)
    assert not (tmp_path / "out").exists()
    (shard, *_) = tmp_path.glob(".out.partial/*/shards/train-00000.h5")
    shard.write_bytes(b"lost")  # as a machine does that loses its power, if its disk has lied
    with caplog.at_level("INFO"):
        prepare_text([texts], tmp_path / "out", **how)
    assert re.search(r"continues: [23] of \d+ portions are finished", caplog.text)
    assert seen(tmp_path / "out") == seen(tmp_path / "whole")
    assert {path.name for path in tmp_path.iterdir()} == {"texts", "out", "whole"}


@pytest.mark.parametrize("changed", ["options", "input"])
def test_another_plan_starts_afresh(texts, tmp_path, monkeypatch, caplog, changed):
    with monkeypatch.context() as patch:
        failing(patch, 4)
        with pytest.raises(DataError, match="No space left"):
            prepare_text([texts], tmp_path / "out", shard_mb=0.002)
    if changed == "input":
        (texts / "0.txt").write_text("another text\n")
    how = {"shard_mb": 0.002, "validation": 0.3 if changed == "options" else 0.01}
    with caplog.at_level("INFO"):
        prepare_text([texts], tmp_path / "out", **how)
    assert "whose 4 finished portions are removed: it starts afresh" in caplog.text
    prepare_text([texts], tmp_path / "whole", **how)
    assert seen(tmp_path / "out") == seen(tmp_path / "whole")


def test_a_file_that_changes_after_the_plan_is_refused(texts, tmp_path):
    request = text_request([texts], tmp_path / "out")
    with (
        pytest.raises(DataError, match=r"5.txt has changed since the preparation began"),
        prepare.begun(request) as preparation,
    ):
        with (texts / "sub/5.txt").open("a") as file:
            file.write("more\n")
        prepare.work(Dealing(preparation))


def test_a_second_preparation_of_a_folder_is_refused(texts, tmp_path):
    with prepare.begun(text_request([texts], tmp_path / "out")) as preparation:
        with pytest.raises(DataError, match=f"out is being prepared by process {os.getpid()} on"):
            prepare_text([texts], tmp_path / "out")
        prepare.work(Dealing(preparation))
        prepare.finish(preparation)
    check_shards(tmp_path / "out", read_manifest(tmp_path / "out"))
