"""Samples of whole documents: which documents share a sample, and where a sample is found.

Documents are packed inside windows of consecutive documents, by best-fit decreasing: Ding et al.,
"Fewer truncations improve language modeling", https://arxiv.org/abs/2404.10830. How a window is
packed follows from its lengths alone, so only the number of samples of each window is kept.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from hpc_train.data.manifest import PREPARE_AGAIN, Shard
from hpc_train.data.shard_files import Renewed, ShardFiles
from hpc_train.errors import DataError

PACKED_TOGETHER = 4096  # documents that are packed together
WINDOWS_PER_BLOCK = 8  # whose samples stay neighbours when the order of samples is shuffled
BLOCKS_TOGETHER = 16  # whose samples are shuffled together
# Windows that are kept packed. All that a rank reads from at a time are among them: blocks do not
# begin where windows do. Each takes up to 164 kB.
KEPT_WINDOWS = BLOCKS_TOGETHER * (WINDOWS_PER_BLOCK + 2)
PADDING_TARGET = -100  # the target of padding, as in torch
ITEM = np.dtype("<i8")


def best_fit(sizes: np.ndarray, capacity: int) -> tuple[np.ndarray, int]:
    """Pack items into bins by best-fit decreasing.

    The largest item comes first. Each goes into the bin with the least space in which it fits.

    Args:
        sizes: sizes of the items, from 1 to `capacity`, int64 (N,).
        capacity: the size of each bin.

    Returns:
        The number of each item's bin, int64 (N,), and the number of bins.
    """
    bins = np.empty(len(sizes), np.int64)
    order = np.argsort(-sizes, kind="stable")
    with_space: dict[int, list[int]] = {}  # bins by the space that they have left
    spaces = 0  # has bit s if there is a bin with space s
    count = 0
    for item, size in zip(order.tolist(), sizes[order].tolist(), strict=True):
        fitting = spaces >> size
        if fitting:
            space = size + (fitting & -fitting).bit_length() - 1
            stack = with_space[space]
            number = stack.pop()
            if not stack:
                spaces ^= 1 << space
        else:
            number, space = count, capacity
            count += 1
        bins[item] = number
        if left := space - size:
            with_space.setdefault(left, []).append(number)
            spaces |= 1 << left
    return bins, count


@dataclass(frozen=True, eq=False)
class Packed:
    """The samples of a window: first those of one piece that fills them, then those of several.

    A piece is given by its first token in the shard and by its number of targets.

    Args:
        sequence: targets per sample, T.
        begins: the first tokens of the documents, int64 (D,).
        wholes: the number of full pieces of each document and all before it, int64 (D,).
        firsts, sizes: the pieces that are not full, in the order of the samples, int64 (P,).
        bounds: the first of these pieces of each sample that has them, and P, int64.
    """

    sequence: int
    begins: np.ndarray
    wholes: np.ndarray
    firsts: np.ndarray
    sizes: np.ndarray
    bounds: np.ndarray

    @classmethod
    def of(cls, edges: np.ndarray, sequence: int) -> Packed:
        """Pack documents.

        Args:
            edges: their first tokens, and the end of the last one, int64 (D + 1,).
            sequence: targets per sample, T.
        """
        begins, targets = edges[:-1], np.diff(edges) - 1
        some = targets > 0
        begins, targets = begins[some], targets[some]
        wholes, rest = np.divmod(targets, sequence)
        firsts, sizes = (begins + wholes * sequence)[rest > 0], rest[rest > 0]
        bins, count = best_fit(sizes, sequence)
        order = np.argsort(bins, kind="stable")  # in a sample, documents keep their order
        bounds = np.searchsorted(bins[order], np.arange(count + 1))
        return cls(sequence, begins, wholes.cumsum(), firsts[order], sizes[order], bounds)

    def __len__(self) -> int:
        return self._filled + len(self.bounds) - 1

    @property
    def _filled(self) -> int:
        return int(self.wholes[-1]) if len(self.wholes) else 0

    @property
    def targets(self) -> int:
        """Number of targets in all samples."""
        return self._filled * self.sequence + int(self.sizes.sum())

    def pieces(self, sample: int) -> tuple[np.ndarray, np.ndarray]:
        """The pieces of a sample: their first tokens, and their numbers of targets."""
        if sample >= self._filled:
            number = sample - self._filled
            part = slice(self.bounds[number], self.bounds[number + 1])
            return self.firsts[part], self.sizes[part]
        document = int(self.wholes.searchsorted(sample, "right"))
        before = int(self.wholes[document - 1]) if document else 0
        first = self.begins[document] + (sample - before) * self.sequence
        return np.array([first]), np.array([self.sequence])


class DocumentWindows:
    """The windows of a split's documents. A window has at most PACKED_TOGETHER ones of one shard.

    Args:
        files: the shards.
        sequence: targets per sample, T.
    """

    def __init__(self, files: ShardFiles[Shard], sequence: int) -> None:
        self.files, self.sequence = files, sequence
        documents = np.array([shard.documents for shard in files.shards], np.int64)
        # A shard in which no document begins has the middle of one.
        counts = np.maximum(1, -(-documents // PACKED_TOGETHER))
        self.ends = counts.cumsum()
        self.skipped = self.ends - counts  # windows of the shards before

    def __len__(self) -> int:
        return int(self.ends[-1]) if len(self.ends) else 0

    def count(self, numbers: Iterable[int]) -> np.ndarray:
        """Pack windows, and count their samples and targets, int64 (windows, 2).

        Raises:
            DataError: as `packed`.
        """
        found = [(len(packed), packed.targets) for packed in map(self.packed, numbers)]
        return np.array(found, np.int64).reshape(-1, 2)

    def shard_of(self, window: int) -> int:
        """The number of the shard whose documents a window has."""
        return int(self.ends.searchsorted(window, "right"))

    def packed(self, window: int) -> Packed:
        """Read the lengths of a window's documents, and pack them.

        Raises:
            DataError: the shard cannot be read or is damaged.
        """
        return Packed.of(self._edges(window), self.sequence)

    def _edges(self, window: int) -> np.ndarray:
        """Where the documents of a window begin, and where the last one ends."""
        number = self.shard_of(window)
        shard = self.files.shards[number]
        first = (window - int(self.skipped[number])) * PACKED_TOGETHER
        edges = np.empty(min(PACKED_TOGETHER + 1, shard.documents - first), ITEM)
        if edges.size:
            place = np.array([first * ITEM.itemsize])
            memory = edges.view(np.uint8).data
            self.files.read(np.array([number]), place, edges.nbytes, [[memory]], "documents")
        if first == 0 and (not edges.size or edges[0] > 0):  # a document of the shard before
            edges = np.insert(edges, 0, 0)
        if first + PACKED_TOGETHER >= shard.documents:
            edges = np.append(edges, shard.tokens)
        if edges[0] < 0 or edges[-1] > shard.tokens or (np.diff(edges) < 0).any():
            raise DataError(
                f"shard {self.files.directory / shard.name} has documents that begin outside of "
                "their place",
                PREPARE_AGAIN,
            )
        return edges


class PackedDataset(Renewed):
    """Samples of whole documents, read from the shards by file offset.

    A sample has T tokens, and as targets the token that follows each of them in its document. The
    positions of each document start at 0. Its last token is a target only, because none follows it.
    A document of more than T + 1 tokens is cut into pieces. A piece begins with the token that was
    the last target of the piece before. Padding fills up a sample. A document that two
    shards share is cut there. Several threads may call `fetch`.

    Args:
        windows: the windows of the split.
        counts: what their `count` returns for all windows.

    The attributes `samples_per_block` and `samples_together` are for `SampleOrder`.
    """

    draws_random_numbers: ClassVar[bool] = False  # see `Reader.may_draw`
    fresh = ("_packed", "_lock")

    def __init__(self, windows: DocumentWindows, counts: np.ndarray) -> None:
        self.windows, self.files = windows, windows.files
        self.ends = counts[:, 0].cumsum()
        self.targets = int(counts[:, 1].sum())
        per_window = -(-len(self) // max(1, len(windows)))
        self.samples_per_block = max(1, WINDOWS_PER_BLOCK * per_window)
        self.samples_together = BLOCKS_TOGETHER * self.samples_per_block
        self._renew()

    def _renew(self) -> None:
        self._packed: OrderedDict[int, Packed] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return int(self.ends[-1]) if len(self.ends) else 0

    def fetch(self, indices: Sequence[int] | np.ndarray) -> tuple[Tensor, Tensor, Tensor]:
        """Read samples.

        Returns:
            Tokens, targets and positions, int64 of shape (len(indices), T) each. Padding has the
            token 0, the target -100 and positions that start at 0.

        Raises:
            DataError: a shard cannot be read, ends early or is damaged, or a token is not in the
                vocabulary.
        """
        wanted = np.asarray(indices, np.int64)
        owners = self.ends.searchsorted(wanted, "right")
        inside = wanted - np.where(owners > 0, self.ends[owners - 1], 0)
        with self._lock:
            pieces = [
                self._window(window).pieces(sample)
                for window, sample in zip(owners.tolist(), inside.tolist(), strict=True)
            ]
        counts = np.array([len(sizes) for _, sizes in pieces], np.int64)
        firsts = np.concatenate([first for first, _ in pieces])
        sizes = np.concatenate([size for _, size in pieces])
        shards = self.windows.ends.searchsorted(owners, "right").repeat(counts)
        stored, starts = self._read(shards, firsts, sizes)
        rows = np.arange(len(wanted)).repeat(counts)
        used = np.bincount(rows, sizes, len(wanted)).astype(np.int64)
        T = self.windows.sequence
        # Pieces lie one behind the other in their rows.
        columns = sizes.cumsum() - sizes - (used.cumsum() - used).repeat(counts)
        within = np.arange(sizes.sum()) - (sizes.cumsum() - sizes).repeat(sizes)
        source, place = starts.repeat(sizes) + within, (rows * T + columns).repeat(sizes) + within
        tokens = np.zeros((len(wanted), T), np.int64)
        targets = np.full_like(tokens, PADDING_TARGET)
        positions = np.arange(T) - used[:, None]
        tokens.flat[place], targets.flat[place] = stored[source], stored[source + 1]
        positions.flat[place] = within
        return torch.from_numpy(tokens), torch.from_numpy(targets), torch.from_numpy(positions)

    def _window(self, number: int) -> Packed:
        """A window, which is kept packed for the next call."""
        if number in self._packed:
            self._packed.move_to_end(number)
            return self._packed[number]
        if len(self._packed) == KEPT_WINDOWS:
            self._packed.popitem(last=False)
        self._packed[number] = self.windows.packed(number)
        return self._packed[number]

    def _read(
        self, shards: np.ndarray, firsts: np.ndarray, sizes: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Read the tokens of pieces. Returns them one behind the other, and where each begins."""
        files, order = self.files, np.lexsort((firsts, shards))
        width = files.dtype.itemsize
        ends = (sizes + 1).cumsum()
        starts = ends - sizes - 1
        stored = np.empty(int(ends[-1]) if len(ends) else 0, files.dtype)
        memory = stored.view(np.uint8).data
        bounds = np.stack([starts, ends], 1)[order] * width
        memories = [[memory[begin:end]] for begin, end in bounds.tolist()]
        if memories:
            nbytes = bounds[:, 1] - bounds[:, 0]
            files.read(shards[order], firsts[order] * width, nbytes, memories)
        return stored, starts

    def close(self) -> None:
        """Close the shards."""
        self.files.close()
