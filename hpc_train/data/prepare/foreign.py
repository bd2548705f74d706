"""Token files of other programs: raw tokens, Megatron's pairs, Arrow folders, HDF5 datasets."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Sequence
from contextlib import closing
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hpc_train.data.arrays.indexing import FileIndex, look_up
from hpc_train.data.arrays.regions import BoxReader
from hpc_train.data.prepare.inputs import (
    InputFile,
    InputPart,
    Tell,
    TokenRecipe,
    opened_input,
    reading_from,
)
from hpc_train.errors import DataError, SetupError, plural

# The header of a Megatron index: magic, version, code of the tokens' type, and two numbers, of
# sequences and of entries in the list of documents. Then follow the sequences' lengths (int32) and
# byte offsets (int64), and for each document its first sequence (int64), with the end as one more.
MAGIC = b"MMIDIDX\0\0"
HEADER = struct.Struct("<9sQBQQ")
CODES = {1: "uint8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}
HDF5_SUFFIXES = (".h5", ".hdf5")
READ_TOKENS = 1 << 20


class TokenLayout(NamedTuple):
    """How files of other programs have their tokens, and whether shards get a copy.

    Args:
        stored: NumPy's name for the type of raw tokens.
        column: the column of the tokens in Arrow files, or their dataset in HDF5 files.
        copy: whether shards get the tokens in any case.
    """

    stored: str = "uint16"
    column: str = "input_ids"
    copy: bool = False


USUAL_LAYOUT = TokenLayout()


class MegatronIndex(NamedTuple):
    """What a Megatron index says.

    Args:
        stored: NumPy's name for the tokens' type.
        sizes: tokens of each sequence (S,) int32.
        offsets: place of each sequence in the tokens' file, in bytes (S,) int64.
        documents: the first sequence of each document, and the number of sequences (D + 1,) int64.
        ends: where each document ends in the stream of all documents, in bytes (D,) int64.
    """

    stored: str
    sizes: np.ndarray
    offsets: np.ndarray
    documents: np.ndarray
    ends: np.ndarray


def list_token_files(paths: Sequence[str | Path], layout: TokenLayout) -> list[InputFile]:
    """The token files among files and folders, in the order in which they are given.

    Args:
        paths: raw files (.bin), Megatron pairs by either name, folders of Hugging Face datasets, or
            HDF5 files.
        layout: how they have their tokens.

    Raises:
        DataError: a path is not one of these, or is damaged.
    """
    found = []
    for given in map(Path, paths):
        with reading_from(str(given)):
            if given.is_dir():
                found += _arrow_files(given)
            elif given.suffix.lower() in HDF5_SUFFIXES:
                found.append(_hdf5_file(given, layout.column))
            elif (index := given.with_suffix(".idx")).exists():
                tokens = given.with_suffix(".bin")
                if given == index and str(tokens) in map(str, paths):
                    continue  # both names of one pair, such as from a pattern of the shell
                about = read_index(index, tokens.stat().st_size)
                total = int(about.ends[-1]) if len(about.ends) else 0
                found.append(_listed(tokens, "megatron", total, about.stored))
            else:
                size = given.stat().st_size
                if given.suffix.lower() != ".bin":  # its header would become tokens
                    raise DataError(
                        f"{given} is not one of .bin, .idx, .h5, .hdf5 or a folder",
                        "save its tokens as raw numbers in a file NAME.bin, or name it so",
                    )
                if size % np.dtype(layout.stored).itemsize:
                    raise DataError(
                        f"{given} has {plural(size, 'byte')}, which is no number of "
                        f"{layout.stored} tokens",
                        "give the type of its tokens by --stored",
                    )
                found.append(_listed(given, "raw", size, layout.stored))
    return found


def _listed(
    path: Path, form: str, nbytes: int | None = None, stored: str = "", offset: int = 0
) -> InputFile:
    about = path.stat()
    nbytes = about.st_size if nbytes is None else nbytes
    return InputFile(str(path), form, about.st_size, about.st_mtime_ns, nbytes, stored, offset)


def _hdf5_file(path: Path, column: str) -> InputFile:
    stored = _hdf5_index(str(path), column).variables[column]
    if len(stored.shape) != 1 or stored.dtype.kind not in "iu":
        raise DataError(
            f"{path}: dataset {column} is of {stored.dtype} and {len(stored.shape)} dimensions, "
            "not tokens one after the other",
            "name the dataset of the tokens by --column",
        )
    nbytes = stored.shape[0] * stored.dtype.itemsize
    if stored.offset is None:
        return _listed(path, "hdf5", nbytes, stored.dtype.str)
    return _listed(path, "raw", nbytes, stored.dtype.str, stored.offset)


@lru_cache(maxsize=8)
def _hdf5_index(path: str, column: str) -> FileIndex:
    try:
        [index] = look_up([Path(path)], [column])
    except DataError as error:
        remedy = f"{error.remedy}; --column names the dataset of the tokens"
        raise DataError(error.cause, remedy) from None
    return index


def one_type(given: Sequence[InputFile], vocab: int) -> tuple[str, str]:
    """NumPy's name for the type of all tokens, if shards can refer to the files that have them.

    Args:
        given: the token files.
        vocab: vocabulary size of the tokens.

    Returns:
        The name, or "" and the reason why shards cannot.
    """
    for file in given:
        kind = np.dtype(file.stored or "V")
        what = "tokens one after the other"
        if file.format == "megatron":
            index = _index_of(file)
            follow = np.diff(index.offsets) == index.sizes[:-1].astype(np.int64) * kind.itemsize
            if not (follow.all() and (index.offsets[:1] == 0).all()):
                return "", f"{file.path} does not have its sequences {what.partition(' ')[2]}"
        elif file.format != "raw":
            return "", f"{file.path} does not have {what}"
        if kind.newbyteorder("<") != kind or kind.str[1:] not in ("u1", "u2", "u4", "i4"):
            return "", f"{file.path} has tokens of {kind.str}"
        if kind.newbyteorder("=") != np.dtype(given[0].stored).newbyteorder("="):
            return "", f"{given[0].path} and {file.path} have tokens of two types"
    if not given:
        return "", ""
    kind = np.dtype(given[0].stored)
    too_small = vocab > 1 << 8 * kind.itemsize
    return ("", f"{given[0].path} has tokens of {kind.name}") if too_small else (kind.name, "")


@lru_cache(maxsize=1)
def read_index(path: Path, nbytes: int) -> MegatronIndex:
    """Read a Megatron index.

    Args:
        path: the .idx file.
        nbytes: the size of the .bin file.

    Raises:
        DataError: it is not an index, or does not belong to that .bin file.
    """
    damaged = DataError(f"{path} is not a Megatron index of its .bin file", "copy both files again")
    with path.open("rb") as file:
        header = file.read(HEADER.size)
        if len(header) < HEADER.size:
            raise damaged
        magic, version, code, count, entries = HEADER.unpack(header)
        if magic != MAGIC or version != 1 or code not in CODES or not entries:
            raise damaged
        if path.stat().st_size < HEADER.size + 12 * count + 8 * entries:
            raise damaged
        sizes = np.fromfile(file, "<i4", count)
        offsets = np.fromfile(file, "<i8", count)
        documents = np.fromfile(file, "<i8", entries)
    width = np.dtype(CODES[code]).itemsize
    ascending = (np.diff(documents) >= 0).all() and documents[0] == 0 and documents[-1] == count
    if not ascending or (sizes < 0).any() or (offsets < 0).any():
        raise damaged
    if count and int((offsets + sizes.astype(np.int64) * width).max()) > nbytes:
        raise damaged
    ends = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64) * width])
    return MegatronIndex(CODES[code], sizes, offsets, documents, ends[documents[1:]])


def _arrow_files(folder: Path) -> list[InputFile]:
    import_pyarrow()
    state = folder / "state.json"
    if not state.is_file():
        raise DataError(
            f"{folder} is not a dataset that save_to_disk has written (no state.json)",
            "give the folder of one split",
        )
    try:
        tree = json.loads(state.read_text(encoding="utf-8"))
        names = [one["filename"] for one in tree["_data_files"]]
    except (ValueError, KeyError, TypeError):
        raise DataError(f"{state} is damaged", "save the dataset again") from None
    if tree.get("_indices_data_files"):
        raise DataError(f"{folder} has an order of its own", "save it after flatten_indices()")
    return [_listed(folder / name, "arrow") for name in names]


def cut_tokens(file: InputFile, position: int) -> int:
    """The place at which a raw or Megatron file may be cut, at or soon behind a position."""
    if file.format in ("raw", "hdf5"):
        width = np.dtype(file.stored).itemsize
        return -(-position // width) * width
    ends = _index_of(file).ends
    return int(ends[np.searchsorted(ends, position)])


def _index_of(file: InputFile) -> MegatronIndex:
    with reading_from(file.path):
        return read_index(Path(file.path).with_suffix(".idx"), file.size)


def read_tokens(
    part: InputPart, recipe: TokenRecipe, tell: Tell
) -> Iterator[tuple[np.ndarray, bool]]:
    """The tokens of a part of a token file. No token is added or changed.

    Args:
        part: the part.
        recipe: the tokens' vocabulary, and an Arrow file's column.
        tell: is called with the numbers of bytes of the stream that have been read.

    Yields:
        Tokens (N,) of the recipe's type, and whether a document begins with them.

    Raises:
        DataError: the file cannot be read, has changed, or has a token outside of the vocabulary.
        SetupError: the `pyarrow` library is needed and missing.
    """
    read = {"raw": _raw, "megatron": _megatron, "arrow": _arrow, "hdf5": _hdf5}[part.file.format]
    for tokens, first, nbytes in read(part, recipe):
        if tokens.size and not 0 <= int(tokens.min()) <= int(tokens.max()) < recipe.vocab:
            wrong = int(tokens.max()) if tokens.max() >= recipe.vocab else int(tokens.min())
            raise DataError(
                f"{part.file.path} has the token {wrong}, but the vocabulary has {recipe.vocab}",
                "give the vocabulary of its tokenizer, or the type of raw tokens by --stored",
            )
        yield tokens.astype(recipe.dtype, copy=False), first
        tell(nbytes)


def _raw(part: InputPart, recipe: TokenRecipe) -> Iterator[tuple[np.ndarray, bool, int]]:
    stored, first = np.dtype(part.file.stored), part.first
    with opened_input(part.file) as file:
        file.seek(part.file.offset + part.begin)
        left = part.nbytes // stored.itemsize
        while left:
            tokens = np.fromfile(file, stored, min(left, READ_TOKENS))
            if not len(tokens):
                break
            left -= len(tokens)
            yield tokens, first, tokens.nbytes
            first = False


def _hdf5(part: InputPart, recipe: TokenRecipe) -> Iterator[tuple[np.ndarray, bool, int]]:
    index, stored, first = _hdf5_index(part.file.path, recipe.key), np.dtype(part.file.stored), True
    with opened_input(part.file), closing(BoxReader([index])) as reader:
        begin, end = part.begin // stored.itemsize, part.end // stored.itemsize
        for place in range(begin, end, READ_TOKENS):
            tokens = np.empty(min(READ_TOKENS, end - place), stored)
            reader.read(0, recipe.key, (place,), tokens)
            yield tokens, first and part.first, tokens.nbytes
            first = False


def _megatron(part: InputPart, recipe: TokenRecipe) -> Iterator[tuple[np.ndarray, bool, int]]:
    index, stored = _index_of(part.file), np.dtype(part.file.stored)
    begin, end = (np.searchsorted(index.ends, place, "right") for place in (part.begin, part.end))
    with opened_input(part.file) as file:
        for document in range(begin, end):
            first = True
            for number in range(index.documents[document], index.documents[document + 1]):
                file.seek(int(index.offsets[number]))
                tokens = np.frombuffer(
                    file.read(int(index.sizes[number]) * stored.itemsize), stored
                )
                yield tokens, first, tokens.nbytes
                first = False


def _arrow(part: InputPart, recipe: TokenRecipe) -> Iterator[tuple[np.ndarray, bool, int]]:
    pa = import_pyarrow()
    with opened_input(part.file) as file:
        told = 0
        try:
            batches = pa.ipc.open_stream(file)
            if recipe.key not in batches.schema.names:
                raise DataError(
                    f"{part.file.path} has no column {recipe.key}, but "
                    f"{', '.join(batches.schema.names)}",
                    "name the column of the tokens by --column",
                )
            for batch in batches:
                column: Any = batch.column(recipe.key)
                kind = getattr(column.type, "value_type", column.type)
                if kind is column.type or column.null_count or not pa.types.is_integer(kind):
                    raise DataError(
                        f"{part.file.path}: column {recipe.key} has other things than tokens",
                        "name the column of the tokens by --column",
                    )
                ends = np.cumsum(pa.compute.list_value_length(column).to_numpy())
                rows = np.split(column.flatten().to_numpy(), ends[:-1])
                if not len(column):
                    continue
                now = file.tell()
                nbytes = [0] * (len(rows) - 1) + [now - told]
                told = now
                yield from zip(rows, [True] * len(rows), nbytes, strict=True)
        except pa.ArrowException as error:
            raise DataError(
                f"{part.file.path} is damaged ({error})", "copy it again, or leave it out"
            ) from None


def import_pyarrow() -> Any:
    """The library that reads Arrow files.

    Raises:
        SetupError: it is missing.
    """
    try:
        import pyarrow as pa
        import pyarrow.compute
        import pyarrow.ipc
    except ImportError:
        raise SetupError(
            "the pyarrow library is missing", "`pip install 'hpc_train[arrow]'`"
        ) from None
    return pa
