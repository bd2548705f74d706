"""`hpc-train prepare`: turn text files into shards with a manifest.

The folder is built under a temporary name, and each shard is read back after it is written. The
folder gets its final name last, so a folder with that name is complete.
"""

from __future__ import annotations

import codecs
import logging
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

import numpy as np
import xxhash

from hpc_train import files
from hpc_train.data.manifest import FILE_NAME, Manifest, Shard
from hpc_train.data.tokenizer import BYTES, Tokenizer, describe_tokenizer, loads
from hpc_train.data.write import write_shard
from hpc_train.errors import DataError

logger = logging.getLogger(__name__)

TEXT_PIECE_BYTES = 8 << 20
LINE_BYTES = 4096
TOKENIZER_FILE = "tokenizer.json"


@dataclass(frozen=True)
class Text:
    """A part of a text file: the bytes from `begin` up to, but not including, `end`."""

    path: Path
    begin: int
    end: int


def prepare_text(
    paths: Sequence[str | Path],
    out: str | Path,
    *,
    tokenizer: str = BYTES,
    shard_mb: float = 256,
    validation: float = 0.01,
) -> Manifest:
    """Turn text files into token shards.

    Args:
        paths: files, or folders that are searched with their subfolders. Files that are not UTF-8
            text are skipped; the log says how many.
        out: the data folder to make.
        tokenizer: "bytes", or a file of the `tokenizers` library, which is copied to `out`.
        shard_mb: approximate size of a shard in MiB.
        validation: share of the text, by bytes, that is held out for validation. Texts are sorted
            by a hash of their names, so that both splits have a mixture. The text at the border is
            cut.

    Returns:
        The manifest of the new folder.

    Raises:
        DataError: there is no text, `out` exists already, or a file cannot be read or written.
        SetupError: the `tokenizers` library is needed and missing.
    """
    target = Path(out)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise DataError(f"{target} exists already", "give another --out, or delete it first")
    if not 0 <= validation < 1:
        raise DataError(f"--validation is {validation}", "give a share of at least 0 and below 1")
    if shard_mb <= 0:
        raise DataError(f"--shard_mb is {shard_mb}", "give a size above 0")
    texts = find_texts(paths)
    description = describe_tokenizer(tokenizer)
    codec = loads(description)
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        partial.mkdir(parents=True)
        manifest = _write_splits(texts, partial, codec, shard_mb, validation)
        if description != BYTES:
            files.write_text(partial / TOKENIZER_FILE, description)
            manifest = replace(manifest, tokenizer=TOKENIZER_FILE)
        _publish(partial, target, manifest)
    except OSError as error:
        raise DataError(
            f"cannot write {target}: {error.strerror or error}",
            "free some space, or get permission to write there",
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return manifest


def find_texts(paths: Sequence[str | Path]) -> list[Path]:
    """The text files among files and in folders, sorted by a hash of their names.

    Raises:
        DataError: a path does not exist, or no file is text.
    """
    found: dict[Path, str] = {}
    for given in map(Path, paths):
        if not given.exists():
            raise DataError(f"{given} does not exist", "give files or folders of text")
        inside = [given] if given.is_file() else given.rglob("*")
        found.update((path, str(path.relative_to(given))) for path in inside if path.is_file())
    texts = [path for path in found if is_text(path)]
    if not texts:
        raise DataError(
            f"no text in {', '.join(map(str, paths))} ({len(found)} files)",
            "give files or folders of UTF-8 text",
        )
    if len(texts) < len(found):
        logger.info("skipped %d files that are not UTF-8 text", len(found) - len(texts))
    return sorted(
        texts, key=lambda path: (xxhash.xxh3_64_intdigest(os.fsencode(found[path])), path)
    )


def is_text(path: Path) -> bool:
    """Whether a file is non-empty UTF-8 without zero bytes."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    size = 0
    try:
        with path.open("rb") as file:
            while piece := file.read(TEXT_PIECE_BYTES):
                decoder.decode(piece)
                size += len(piece)
                if b"\0" in piece:
                    return False
        decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        return False
    except OSError as error:
        logger.warning("%s cannot be read (%s)", path, error.strerror)
        return False
    return size > 0


def split_texts(paths: Sequence[Path], validation: float) -> dict[str, list[Text]]:
    """Split texts: the first ones are for validation, the rest for training.

    The text at the border is cut at the end of a line, or inside a line of more than LINE_BYTES.
    """
    sizes = [path.stat().st_size for path in paths]
    held_out = int(sum(sizes) * validation)
    splits: dict[str, list[Text]] = {"train": [], "validation": []}
    for path, size in zip(paths, sizes, strict=True):
        border = min(size, max(0, held_out))
        if 0 < border < size:
            with path.open("rb") as file:
                file.seek(border)
                border += len(_rest_of_line(file))
        held_out -= size
        for split, begin, end in (("validation", 0, border), ("train", border, size)):
            if begin < end:
                splits[split].append(Text(path, begin, end))
    return splits


def _rest_of_line(file: BinaryIO) -> bytes:
    """Read to the end of a line, but at most LINE_BYTES and the rest of a UTF-8 character."""
    rest = file.readline(LINE_BYTES)
    if len(rest) == LINE_BYTES and not rest.endswith(b"\n"):
        while (following := file.read(1)) and following[0] & 0xC0 == 0x80:
            rest += following
        if following:
            file.seek(-1, os.SEEK_CUR)
    return rest


def _write_splits(
    paths: list[Path], directory: Path, codec: Tokenizer, shard_mb: float, validation: float
) -> Manifest:
    dtype = np.dtype(np.min_scalar_type(codec.vocab - 1))
    tokens_per_shard = max(1, int(shard_mb * (1 << 20)) // dtype.itemsize)
    splits = {
        split: tuple(_write_shards(texts, directory, split, codec, dtype, tokens_per_shard))
        for split, texts in split_texts(paths, validation).items()
    }
    return Manifest(
        vocab=codec.vocab,
        dtype=str(dtype),
        tokenizer=BYTES,
        documents=len(paths),
        splits={split: shards for split, shards in splits.items() if shards},
    )


def _write_shards(
    texts: list[Text], directory: Path, split: str, codec: Tokenizer, dtype: np.dtype, size: int
) -> Iterator[Shard]:
    number = 0
    pending: list[np.ndarray] = []
    count = 0
    for tokens in _encoded(texts, codec, dtype):
        pending.append(tokens)
        count += len(tokens)
        while count >= size:
            joined = np.concatenate(pending)
            yield write_shard(directory / f"{split}-{number:05d}.h5", joined[:size])
            pending, count, number = [joined[size:]], count - size, number + 1
    if count:
        yield write_shard(directory / f"{split}-{number:05d}.h5", np.concatenate(pending))


def _encoded(texts: list[Text], codec: Tokenizer, dtype: np.dtype) -> Iterator[np.ndarray]:
    for text in texts:
        for piece in _pieces(text):
            encoded = codec.encode(piece)
            made = np.frombuffer(encoded, np.uint8) if isinstance(encoded, bytes) else encoded
            yield np.asarray(made).astype(dtype)
        if codec.separator is not None:
            yield np.array([codec.separator], dtype)


def _pieces(text: Text) -> Iterator[bytes]:
    """The pieces of a text, of some MiB each. They end where `_rest_of_line` ends."""
    with text.path.open("rb") as file:
        file.seek(text.begin)
        while (position := file.tell()) < text.end:
            piece = file.read(min(TEXT_PIECE_BYTES, text.end - position))
            if not piece:
                raise DataError(
                    f"{text.path} has become shorter", "prepare files that nobody writes to"
                )
            if position + len(piece) < text.end:
                piece += _rest_of_line(file)
            yield piece


def _publish(partial: Path, target: Path, manifest: Manifest) -> None:
    """Write the manifest, then give the folder its final name."""
    files.write_text(partial / FILE_NAME, manifest.to_json())
    with suppress(FileNotFoundError):
        target.rmdir()  # an empty folder of that name is fine
    files.rename(partial, target)
