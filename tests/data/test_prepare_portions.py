"""However input is cut, all of it is read once and in order, and no character is cut."""

from __future__ import annotations

import errno
import json
import os
import tempfile
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_train.data.prepare import texts as text_files
from hpc_train.data.prepare.inputs import TokenRecipe, each_once, files_at
from hpc_train.data.prepare.portions import cut_portions, read_part, split_inputs
from hpc_train.data.tokenizer import ByteTokenizer
from hpc_train.errors import DataError

TEXTS = st.lists(
    st.lists(st.text("aé€𝄞 \n", max_size=30), max_size=8).map("".join), min_size=1, max_size=6
).filter(any)
SIZES = st.integers(1, 60)


def read(parts) -> tuple[bytes, list[int]]:
    """The tokens of parts, and where documents begin."""
    tokens, begins = b"", []
    for part in parts:
        for made, first in read_part(part, TokenRecipe(), ByteTokenizer(), lambda count: None):
            if first:
                begins.append(len(tokens))
            tokens += made.tobytes()
    return tokens, begins


@given(TEXTS, SIZES, SIZES, SIZES, st.floats(0, 0.99), st.booleans())
def test_all_text_is_read_once(texts, piece, line, portion, validation, as_lines):
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(text_files, "TEXT_PIECE_BYTES", piece),
        mock.patch.object(text_files, "LINE_BYTES", line),
    ):
        if as_lines:
            content = "\n".join(json.dumps({"text": text}) for text in texts)
            Path(folder, "all.jsonl").write_text(content)
        else:
            for number, text in enumerate(texts):
                Path(folder, str(number)).write_text(text)
        found = text_files.only_texts(text_files.list_texts([folder]))
        splits = split_inputs(found, validation)
        whole, documents = b"", []
        for parts in (splits["validation"], splits["train"]):
            portions = cut_portions(parts, portion)
            assert [one.nbytes for portion in portions for one in portion].count(0) == 0
            for one in portions:
                read(one)[0].decode()  # no character is cut
            tokens, begins = read([part for one in portions for part in one])
            assert (tokens, begins) == read(parts)
            assert not tokens or (tokens.endswith(b"\0") and begins[0] == 0)
            whole += tokens
            documents += tokens.split(b"\0")[:-1]
    if as_lines:
        assert documents == [text.encode() for text in texts if text]
    else:
        paths = [int(Path(file.path).name) for file in found]
        assert whole.replace(b"\0", b"") == b"".join(texts[number].encode() for number in paths)
        assert len(documents) - len(found) in (0, 1), "one may be cut between the splits"


@given(st.integers(1, 500), st.integers(1, 2000))
def test_portions_have_about_the_wanted_size(lines, portion):
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "a").write_text("a line of text\n" * lines)
        parts = split_inputs(text_files.list_texts([folder]), 0)["train"]
        sizes = [sum(part.nbytes for part in one) for one in cut_portions(parts, portion)]
    assert sum(sizes) == 15 * lines
    wanted = 15 * lines / max(1, round(15 * lines / portion))
    assert all(abs(size - wanted) <= 16 for size in sizes)


def test_files_with_hidden_names_in_folders_are_no_texts(tmp_path):
    for name in ("a.txt", ".a.txt.swp", ".git/config", "notes/.draft/b.txt", "notes/c.txt"):
        path = tmp_path / ".data" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("text")
    folder = tmp_path / ".data"  # the name of the folder itself does not count
    found = {str(Path(file.path).relative_to(folder)) for file in text_files.list_texts([folder])}
    assert found == {"a.txt", "notes/c.txt"}
    [given] = text_files.list_texts([folder / ".a.txt.swp"])
    assert Path(given.path).name == ".a.txt.swp"


def test_linked_folders_are_read_once_and_folders_that_cannot_be_read_are_told(
    tmp_path, monkeypatch
):
    for name in ("in/a.txt", "in/deep/b.txt", "other/c.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("text")
    (tmp_path / "in" / "again").symlink_to("deep")
    (tmp_path / "in" / "deep" / "loop").symlink_to("..")
    (tmp_path / "in" / "linked").symlink_to("../other")
    (tmp_path / "in" / "lost").symlink_to("nothing")
    found = [str(path.relative_to(tmp_path / "in")) for path in files_at(tmp_path / "in", "text")]
    assert sorted(found) == ["a.txt", "deep/b.txt", "linked/c.txt"]
    listed = os.scandir

    def refused(path):
        if str(path).endswith("deep"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return listed(path)

    monkeypatch.setattr(os, "scandir", refused)
    with pytest.raises(DataError, match=r"in/deep cannot be read \(Permission denied\)"):
        text_files.list_texts([tmp_path / "in"])


def test_a_file_to_which_several_paths_lead_is_there_once(tmp_path, monkeypatch, caplog):
    caplog.set_level("INFO", "hpc_train")
    for name in ("in/b.txt", "in/c.txt", "other/d.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "in" / "a.txt").symlink_to("c.txt")
    (tmp_path / "in" / "e.txt").symlink_to("../other/d.txt")
    (tmp_path / "again").symlink_to("in")
    monkeypatch.chdir(tmp_path)
    given = [tmp_path / "in", tmp_path / "again", Path("in/../in/b.txt")]
    listed = text_files.list_texts(given)
    assert sorted(Path(file.path).name for file in listed) == ["b.txt", "c.txt", "e.txt"]
    assert {Path(file.path).parent for file in listed} == {tmp_path / "in"}
    assert "left out 6 paths to files that other paths lead to, too" in caplog.text
    both = [Path("other/d.txt"), Path("in/e.txt")]
    assert each_once(both[::-1]) == each_once(both) == both[:1]


def test_what_is_neither_file_nor_folder_is_refused(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(DataError, match="fifo is neither a file nor a folder"):
        text_files.list_texts([tmp_path / "fifo"])
