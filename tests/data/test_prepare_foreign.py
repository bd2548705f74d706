from __future__ import annotations

import itertools
import json
import shutil
import struct

import h5py
import numpy as np
import pytest

from hpc_train.data.check import check_shards
from hpc_train.data.manifest import read_manifest, read_manifests, tokenizer_of
from hpc_train.data.prepare.dealing import Dealing
from hpc_train.data.prepare.foreign import TokenLayout
from hpc_train.data.prepare.request import tokens_request
from hpc_train.data.prepare.work import begun, finish, work
from hpc_train.data.shards import TokenDataset
from hpc_train.data.tokenizer import loads
from hpc_train.errors import DataError, UserError
from tests.data.corruption import sealed

VOCAB = 50_000


@pytest.fixture
def rows():
    """Documents of many lengths."""
    generator = np.random.default_rng(0)
    return [generator.integers(0, VOCAB, size) for size in generator.integers(1, 200, 50)]


def prepared(paths, out, **how):
    """The manifest, the tokens to train on, and where documents begin among them."""
    layout = TokenLayout(**{name: how.pop(name) for name in {*TokenLayout._fields} & {*how}})
    with begun(tokens_request(paths, out, layout=layout, **how)) as preparation:
        work(Dealing(preparation))
        made = finish(preparation)
    check_shards(out, read_manifest(out))
    tokens, begins = [], []
    for shard in made.splits["train"]:
        with h5py.File(out / shard.name) as file:
            begins += (file["documents"][:] + sum(map(len, tokens))).tolist()
            tokens.append(file["tokens"][:])
    return made, np.concatenate(tokens), begins


def write_megatron(path, rows, code=8, dtype="<u2"):
    """A pair of files with two sequences in each document."""
    halves = [half for row in rows for half in np.array_split(row, 2)]
    sizes = np.array([len(half) for half in halves], "<i4")
    offsets = np.cumsum([0, *sizes[:-1]], dtype="<i8") * np.dtype(dtype).itemsize
    documents = np.arange(0, 2 * len(rows) + 1, 2, dtype="<i8")
    np.concatenate(halves).astype(dtype).tofile(path.with_suffix(".bin"))
    header = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, code, len(sizes), len(documents))
    content = [header, sizes.tobytes(), offsets.tobytes(), documents.tobytes()]
    path.with_suffix(".idx").write_bytes(b"".join(content))


@pytest.mark.parametrize(("code", "dtype"), [(8, "<u2"), (4, "<i4")])
@pytest.mark.parametrize(("name", "copy"), [("a.bin", False), ("a.idx", True)])
def test_megatron_documents_are_kept(tmp_path, rows, code, dtype, name, copy):
    write_megatron(tmp_path / "a", rows, code, dtype)
    how = {"vocab": VOCAB, "shard_mb": 0.002, "copy": copy}
    made, tokens, begins = prepared([tmp_path / name], tmp_path / "out", **how)
    shards = made.splits["train"]
    assert len(shards) > 3
    assert all(bool(shard.source) != copy for shard in shards)
    kept = "uint16" if copy or code == 8 else "uint32"
    assert (made.vocab, made.dtype, made.documents) == (VOCAB, kept, len(rows))
    assert tokens.tolist() == np.concatenate(rows).tolist()
    assert begins == np.cumsum([0, *map(len, rows[:-1])]).tolist()


def test_tokens_without_a_tokenizer_are_not_those_of_bytes(tmp_path):
    np.arange(65, dtype="<u2").tofile(tmp_path / "a.bin")
    made, *_ = prepared([tmp_path / "a.bin"], tmp_path / "new", vocab=65)
    assert made.tokenizer == "none"
    shutil.copytree(tmp_path / "new", tmp_path / "old")
    tree = json.loads(made.to_json()) | {"tokenizer": "bytes"}  # as earlier versions wrote it
    (tmp_path / "old" / "manifest.json").write_text(sealed(tree))
    folders = [tmp_path / "new", tmp_path / "old"]
    for manifest, folder in zip(read_manifests(folders), folders, strict=True):
        with pytest.raises(UserError, match="is not known: prepare the data with --tokenizer"):
            loads(tokenizer_of(manifest, folder))


def test_tokens_without_a_tokenizer_are_the_data_that_earlier_versions_made(tmp_path):
    np.arange(VOCAB, dtype="<u2").tofile(tmp_path / "a.bin")
    made, *_ = prepared([tmp_path / "a.bin"], tmp_path / "new", vocab=VOCAB)
    with h5py.File(tmp_path / "new" / made.splits["train"][0].name) as file:
        assert file.attrs["tokenizer"] == "unknown"
    shutil.copytree(tmp_path / "new", tmp_path / "old")
    tree = {**json.loads(made.to_json()), "tokenizer": "bytes"}
    (tmp_path / "old" / "manifest.json").write_text(json.dumps(tree), encoding="utf-8")
    new, old = read_manifests([tmp_path / "new", tmp_path / "old"])
    assert new.digest == old.digest


def test_raw_tokens_and_what_is_held_out(tmp_path, rows):
    every = np.concatenate(rows).astype("<u2")
    every.tofile(tmp_path / "train.bin")
    every[:100].tofile(tmp_path / "val.bin")
    how = {"held_out": [tmp_path / "val.bin"], "vocab": VOCAB, "shard_mb": 0.002}
    made, tokens, _ = prepared([tmp_path / "train.bin"], tmp_path / "out", **how)
    assert len(made.splits["train"]) > 3
    assert tokens.tolist() == every.tolist()
    assert made.tokens("validation") == 100
    assert made.documents == 2


@pytest.mark.parametrize("large", [False, True])
def test_a_dataset_of_hugging_face(tmp_path, rows, large):
    pa = pytest.importorskip("pyarrow")
    folder = tmp_path / "dataset"
    folder.mkdir()
    kind = (pa.large_list if large else pa.list_)(pa.int32())
    column = pa.array([row.tolist() for row in rows], kind)
    table = pa.table({"input_ids": column, "length": [len(row) for row in rows]})
    names = ["data-00000-of-00002.arrow", "data-00001-of-00002.arrow"]
    for name, part in zip(names, (table.slice(0, 20), table.slice(20)), strict=True):
        with pa.ipc.new_stream(str(folder / name), table.schema) as stream:
            stream.write_table(part, max_chunksize=7)
    state = {"_data_files": [{"filename": name} for name in names]}
    (folder / "state.json").write_text(json.dumps(state))
    made, tokens, begins = prepared([folder], tmp_path / "out", vocab=VOCAB, shard_mb=0.01)
    assert made.documents == len(rows)
    assert tokens.tolist() == np.concatenate(rows).tolist()
    assert begins == np.cumsum([0, *map(len, rows[:-1])]).tolist()
    for column in ("length", "no such"):
        with pytest.raises(DataError, match=f"column {column}"):
            prepared([folder], tmp_path / "new", vocab=VOCAB, column=column)


@pytest.mark.parametrize("names", [["a.bin", "a.idx"], ["a.idx", "a.bin"]])
def test_both_names_of_a_pair_are_one_file(tmp_path, rows, names):
    write_megatron(tmp_path / "a", rows)
    made, _, _ = prepared([tmp_path / name for name in names], tmp_path / "out", vocab=VOCAB)
    assert made.documents == len(rows)


def test_a_file_whose_header_would_become_tokens_is_refused(tmp_path):
    np.save(tmp_path / "a.npy", np.arange(10, dtype=np.uint16))
    with pytest.raises(DataError, match=r"a.npy is not one of .bin, .idx"):
        prepared([tmp_path / "a.npy"], tmp_path / "out", vocab=1 << 16)


def test_a_file_to_train_on_that_is_held_out_too_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "val.bin").write_bytes(bytes(4))
    with pytest.raises(DataError, match=r"val.bin is given to train on, and by --held_out"):
        prepared([tmp_path / "val.bin"], tmp_path / "out", vocab=10, held_out=["val.bin"])


@pytest.mark.parametrize("size", [0, -1, float("nan"), float("inf")])
def test_a_size_of_shards_that_is_none_is_refused(tmp_path, size):
    (tmp_path / "a.bin").write_bytes(bytes(4))
    with pytest.raises(DataError, match="--shard_mb"):
        prepared([tmp_path / "a.bin"], tmp_path / "out", vocab=10, shard_mb=size)


@pytest.mark.parametrize(
    ("content", "how", "message"),
    [
        (b"\1\0\2\0", {}, "vocabulary size is not known"),
        (b"\1\0\2\0", {"vocab": 1 << 33}, "has 8589934592 tokens: give 4294967296 or fewer"),
        (b"\1\0\2", {"vocab": 10}, "has 3 bytes, which is no number of uint16 tokens"),
        (b"\1\0\x0a\0", {"vocab": 10}, "has the token 10, but the vocabulary has 10"),
        (b"\xff\xff\xff\xff", {"vocab": 10, "stored": "int32"}, "has the token -1"),
    ],
)
def test_mistakes_with_raw_tokens(tmp_path, content, how, message):
    (tmp_path / "a.bin").write_bytes(content)
    with pytest.raises(DataError, match=message):
        prepared([tmp_path / "a.bin"], tmp_path / "out", **how)
    assert [path.name for path in tmp_path.iterdir()] == ["a.bin"]


@pytest.mark.parametrize("harm", ["magic", "short", "tokens", "code"])
def test_a_damaged_index_is_named(tmp_path, rows, harm):
    write_megatron(tmp_path / "a", rows, code=99 if harm == "code" else 8)
    index, tokens = tmp_path / "a.idx", tmp_path / "a.bin"
    if harm == "magic":
        index.write_bytes(b"?" + index.read_bytes()[1:])
    if harm == "short":
        index.write_bytes(index.read_bytes()[:-8])
    if harm == "tokens":
        tokens.write_bytes(tokens.read_bytes()[:-2])
    with pytest.raises(DataError, match=r"a.idx is not a Megatron index of its .bin file"):
        prepared([index], tmp_path / "out", vocab=VOCAB)


def test_a_folder_that_is_no_dataset(tmp_path):
    pytest.importorskip("pyarrow")
    with pytest.raises(DataError, match=r"no state.json"):
        prepared([tmp_path], tmp_path / "out", vocab=VOCAB)


def test_tokens_that_stay_in_their_file_are_verified_there(tmp_path, rows):
    every = np.concatenate(rows).astype("<u2")
    every.tofile(tmp_path / "train.bin")
    made, _, _ = prepared([tmp_path / "train.bin"], tmp_path / "out", vocab=VOCAB, shard_mb=0.002)
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {shard.source for shard in made.splits["train"]} < names
    assert sum(path.lstat().st_size for path in (tmp_path / "out").glob("*.bin")) < 1000

    def fetched():
        dataset = TokenDataset(tmp_path / "out", made, "train", 7)
        found = dataset.fetch(range(len(dataset)))[0].numpy()
        dataset.close()
        return found

    begins = np.cumsum([0] + [shard.tokens for shard in made.splits["train"]])
    expected = [
        every[place : place + 7]
        for begin, end in itertools.pairwise(begins)
        for place in range(begin, end - 7, 7)
    ]
    assert (fetched() == expected).all()
    every[17] ^= 1
    every.tofile(tmp_path / "train.bin")
    with pytest.raises(
        DataError, match=r"block 0 of its dataset tokens \(from byte 0 on, in .*/train.bin\)"
    ):
        fetched()
    (tmp_path / "train.bin").write_bytes(every.tobytes()[:-1])
    with pytest.raises(DataError, match=r"train.bin has \d+ bytes, fewer than"):
        check_shards(tmp_path / "out", made)
    (tmp_path / "train.bin").unlink()
    with pytest.raises(DataError, match=r"/train.bin is missing, to which .*source-\w+.bin links"):
        check_shards(tmp_path / "out", made)


@pytest.mark.parametrize("how", [{}, {"chunks": (100,), "compression": "gzip"}])
def test_a_dataset_of_an_hdf5_file(tmp_path, rows, how):
    every = np.concatenate(rows)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("deep/tokens", data=every.astype("<u2"), **how)
    given = {"vocab": VOCAB, "shard_mb": 0.002, "column": "deep/tokens"}
    made, tokens, begins = prepared([tmp_path / "a.h5"], tmp_path / "out", **given)
    assert tokens.tolist() == every.tolist()
    assert begins == [0]
    assert all(bool(shard.source) != bool(how) for shard in made.splits["train"])
    with pytest.raises(DataError, match="variables are: deep/tokens.*--column names"):
        prepared([tmp_path / "a.h5"], tmp_path / "other", vocab=VOCAB)
