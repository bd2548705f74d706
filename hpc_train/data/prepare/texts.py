"""Texts: files of text and of JSON lines, plain or compressed, and the tokens of their documents.

A file of text is one document, and so is each line of a JSON lines file.
"""

from __future__ import annotations

import codecs
import io
import json
import logging
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from shlex import quote
from typing import Any, BinaryIO

import numpy as np
import xxhash

from hpc_train.data.prepare.inputs import (
    COMPRESSED,
    NAMES_LOGGED,
    InputFile,
    InputPart,
    Tell,
    TokenRecipe,
    decompressed,
    each_once,
    files_at,
    opened_input,
    opened_text,
    reading_from,
)
from hpc_train.data.tokenizer import Tokenizer
from hpc_train.errors import DataError, plural

logger = logging.getLogger(__name__)

TEXT_PIECE_BYTES = 1 << 20  # of text that is encoded at once
LINE_BYTES = 4096
SNIFFED_BYTES = 1 << 16  # of each file, to see whether it is text
# The size of a compressed text is estimated from its beginning, which has at least these bytes of
# the text and of the file. It is read in small pieces, so that few bytes are read ahead.
SNIFFED_TEXT_BYTES, SNIFFED_RAW_BYTES, SNIFFED_PIECE_BYTES = 1 << 20, 1 << 16, 1 << 12
MOST_SNIFFED_BYTES = 1 << 26  # of a text, however well it is compressed
SNIFFERS = 8  # threads; a file system over a network takes milliseconds to open a file


def list_texts(paths: Sequence[str | Path]) -> list[InputFile]:
    """All files among files and in folders, sorted by a hash of their names. None is opened.

    In folders, what has a name with a dot at its beginning is left out. A file to which several
    paths lead is there once.

    Raises:
        DataError: a path does not exist, or a folder cannot be read.
    """
    found: dict[Path, str] = {}
    for given in map(Path, paths):
        found.update((path, str(path.relative_to(given))) for path in files_at(given, "text"))
    order = sorted(
        each_once(found),
        key=lambda path: (xxhash.xxh3_64_intdigest(os.fsencode(found[path])), path),
    )
    return [_listed(path) for path in order]


def _listed(path: Path) -> InputFile:
    with reading_from(str(path)):
        about = path.stat()
    suffixes = [suffix.lower() for suffix in path.suffixes[-2:]]
    kind = suffixes[:-1] if suffixes and suffixes[-1] in COMPRESSED else suffixes
    form = "jsonl" if kind[-1:] == [".jsonl"] else "text"
    return InputFile(str(path), form, about.st_size, about.st_mtime_ns, about.st_size)


def only_texts(listed: Sequence[InputFile]) -> list[InputFile]:
    """The files that begin like UTF-8 text. The sizes of compressed texts are estimated.

    Raises:
        DataError: there is no file, no file is text, or one cannot be read.
        SetupError: the `zstandard` library is needed and missing.
    """
    with ThreadPoolExecutor(SNIFFERS) as threads:
        texts = [file for file in threads.map(_sniffed, listed) if file is not None]
    if not listed:
        raise DataError(
            "no file is in the folders that were given",
            "give files or folders of UTF-8 text; files whose names begin with a dot are left out",
        )
    if not texts:
        given = plural(len(listed), "file that was", "files that were")
        other = [file.path for file in listed if file.size]
        if not other:
            raise DataError(f"no text in the {given} given", "give files or folders of UTF-8 text")
        count = plural(len(other), "is", "are")
        raise DataError(
            f"no text in the {given} given ({count} not UTF-8, such as {other[0]})",
            _conversion(other[0]),
        )
    taken = {file.path for file in texts}
    for why, skipped in (
        ("empty", [file.path for file in listed if not file.size]),
        ("not UTF-8 text", [file.path for file in listed if file.size and file.path not in taken]),
    ):
        if skipped:
            count = plural(len(skipped), "file that is", "files that are")
            logger.info("skipped %s %s, such as %s", count, why, ", ".join(skipped[:NAMES_LOGGED]))
    return texts


def _conversion(path: str) -> str:
    """A remedy for a file of text that is not UTF-8."""
    return f"convert it, for instance from Latin-1: iconv -f latin1 -t utf-8 {quote(path)} > NEW"


def _sniffed(file: InputFile) -> InputFile | None:
    nbytes = file.nbytes
    with opened_input(file) as raw:
        stream: Any = raw
        if file.compressed:
            stream = decompressed(_SmallPieces(raw), file.path, SNIFFED_PIECE_BYTES)
        begin = stream.read(SNIFFED_BYTES)
        if file.compressed:
            nbytes = _estimated(file, raw, stream, len(begin))
    whole = len(begin) < SNIFFED_BYTES
    # Of a JSON lines file every line is checked later.
    known = file.format == "jsonl" or _is_utf8(io.BytesIO(begin), len(begin), whole=whole)
    if not begin or not known:
        return None
    return replace(file, nbytes=nbytes)


def _estimated(file: InputFile, raw: BinaryIO, stream: Any, made: int) -> int:
    """Estimate the bytes of a compressed text. `made` of them are decompressed already."""
    while made < MOST_SNIFFED_BYTES:
        if made >= SNIFFED_TEXT_BYTES and raw.tell() >= SNIFFED_RAW_BYTES:
            break
        if not (piece := stream.read(SNIFFED_BYTES)):
            return made
        made += len(piece)
    return file.size * made // raw.tell()


class _SmallPieces:
    """A file from which few bytes are read at once, however many are asked for."""

    def __init__(self, raw: BinaryIO) -> None:
        self._raw = raw

    def read(self, size: int = -1) -> bytes:
        return self._raw.read(min(size, SNIFFED_PIECE_BYTES) if size >= 0 else SNIFFED_PIECE_BYTES)


def is_text_part(part: InputPart) -> bool:
    """Whether a part of a plain text is UTF-8 without zero bytes.

    Raises:
        DataError: the file cannot be read, or has changed.
    """
    with opened_input(part.file) as stream:
        stream.seek(part.begin)
        return _is_utf8(stream, part.nbytes)


def _is_utf8(stream: Any, nbytes: int, *, whole: bool = True) -> bool:
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        while nbytes and (piece := stream.read(min(nbytes, TEXT_PIECE_BYTES))):
            if b"\0" in piece:
                return False
            decoder.decode(piece)
            nbytes -= len(piece)
        decoder.decode(b"", final=whole)
    except UnicodeDecodeError:
        return False
    return True


def cut_text(file: InputFile, position: int) -> int:
    """The place at which a plain file may be cut, at or soon behind a position.

    It is the end of a line. A text may also be cut inside a line of more than LINE_BYTES.
    """
    with opened_text(file) as (stream, _):
        stream.seek(position)
        rest = stream.readline() if file.format == "jsonl" else _rest_of_line(stream)
        return position + len(rest)


def _rest_of_line(stream: io.BufferedReader) -> bytes:
    """Read to the end of a line, but at most LINE_BYTES and the rest of a UTF-8 character."""
    rest = stream.readline(LINE_BYTES)
    if len(rest) == LINE_BYTES and not rest.endswith(b"\n"):
        while (following := stream.peek(1)[:1]) and following[0] & 0xC0 == 0x80:
            rest += stream.read(1)
    return rest


def read_text(
    part: InputPart, recipe: TokenRecipe, codec: Tokenizer, tell: Tell
) -> Iterator[tuple[np.ndarray, bool]]:
    """The tokens of a part of a text file or of a JSON lines file.

    Args:
        part: the part.
        recipe: how tokens are made.
        codec: the recipe's tokenizer.
        tell: is called with the numbers of bytes of the stream that have been read.

    Yields:
        Tokens (N,) of the recipe's type, and whether a document begins with them.

    Raises:
        DataError: the file cannot be read, has changed, or is not what its name says.
    """
    with opened_text(part.file) as (stream, position):
        if not part.file.compressed:
            stream.seek(part.begin)
        texts = _lines(part, recipe.key, stream) if part.file.format == "jsonl" else None
        pieces = _documents(texts) if texts is not None else _pieces_of(part, stream)
        told = position()
        for piece, first, last in pieces:
            if first and codec.front:
                yield np.array(codec.front, recipe.dtype), True
                first = False
            if piece or first:
                yield _tokens(codec.encode(piece), recipe), first
            if last and codec.separator is not None:
                yield np.array([codec.separator], recipe.dtype), False
            now = position()
            tell(now - told)
            told = now


def _tokens(encoded: Sequence[int] | bytes, recipe: TokenRecipe) -> np.ndarray:
    made = np.frombuffer(encoded, np.uint8) if isinstance(encoded, bytes) else np.array(encoded)
    return made.astype(recipe.dtype, copy=False)


def _pieces_of(part: InputPart, stream: io.BufferedReader) -> Iterator[tuple[bytes, bool, bool]]:
    """The pieces of a text. With each it says whether the text begins or ends with it."""
    first, nbytes = part.first, part.nbytes
    if first and stream.peek(len(codecs.BOM_UTF8)).startswith(codecs.BOM_UTF8):
        nbytes -= len(stream.read(len(codecs.BOM_UTF8)))  # it says that the file is UTF-8
    for piece in _pieces(stream, None if part.file.compressed else nbytes):
        if part.file.compressed and not _is_utf8(io.BytesIO(piece), len(piece)):
            raise DataError(
                f"{part.file.path} is not UTF-8 text all through", "convert it, or leave it out"
            )
        yield piece, first, False
        first = False
    if part.last:
        yield b"", False, True


def _pieces(stream: io.BufferedReader, nbytes: int | None) -> Iterator[bytes]:
    """The pieces of the next `nbytes` bytes, or of all. They end where `_rest_of_line` ends."""
    left = nbytes
    while left is None or left > 0:
        piece = stream.read(TEXT_PIECE_BYTES if left is None else min(TEXT_PIECE_BYTES, left))
        if not piece:
            return
        if left is None or len(piece) < left:
            piece += _rest_of_line(stream)
        if left is not None:
            piece = piece[:left]  # inside a long line its rest may reach behind the end
            left -= len(piece)
        yield piece


def _documents(texts: Iterator[bytes]) -> Iterator[tuple[bytes, bool, bool]]:
    """The pieces of whole texts. With each it says whether its text begins or ends with it."""
    for text in texts:
        first = True
        if len(text) > TEXT_PIECE_BYTES:
            reader: Any = io.BytesIO(text)
            for piece in _pieces(io.BufferedReader(reader), None):
                yield piece, first, False
                first = False
            text = b""
        yield text, first, True


def _lines(part: InputPart, key: str, stream: io.BufferedReader) -> Iterator[bytes]:
    """The texts of JSON lines. Empty lines and empty texts are left out."""
    place = part.begin
    for number, line in enumerate(stream, 1):
        if not part.file.compressed:
            if place >= part.end:
                return
            place += len(line)
        if not line.strip():
            continue
        try:
            text = _text_of(line, key)
        except ValueError as error:
            raise DataError(
                f"{part.file.path}, line {_lines_before(part) + number}: {error}",
                "mend or remove the line, or name the key of the text by --text_key",
            ) from None
        if text:
            yield text


def _text_of(line: bytes, key: str) -> bytes:
    """The text in a JSON line.

    Raises:
        ValueError: it has none.
    """
    try:
        tree = json.loads(line.decode("utf-8-sig"))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(tree, dict) or not isinstance(tree.get(key), str):
        raise ValueError(f"it is not an object with a text under the key {key}")
    text: bytes = tree[key].encode("utf-8")
    if b"\0" in text:
        raise ValueError("its text has a zero byte")
    return text


def _lines_before(part: InputPart) -> int:
    with opened_input(part.file) as stream:
        left, count = part.begin, 0
        while left and (piece := stream.read(min(left, TEXT_PIECE_BYTES))):
            count += piece.count(b"\n")
            left -= len(piece)
    return count
