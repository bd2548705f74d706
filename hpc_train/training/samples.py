"""The samples that a split of prepared text has."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np

from hpc_train.data.manifest import Manifest
from hpc_train.data.packing import DocumentWindows, PackedDataset
from hpc_train.data.shard_files import ShardFiles
from hpc_train.data.shards import TokenDataset
from hpc_train.errors import DataError
from hpc_train.mpi.agreement import agreed
from hpc_train.mpi.group import Group

logger = logging.getLogger(__name__)


def open_samples(
    directory: Path,
    manifest: Manifest,
    split: str,
    sequence: int,
    *,
    across_documents: bool,
    group: Group,
) -> TokenDataset | PackedDataset | None:
    """Open the samples of a split. Collective.

    The ranks divide the packing of documents among them.

    Args:
        directory: the data folder.
        manifest: its manifest.
        split: "train", or "validation", which may have no samples.
        sequence: tokens per sample, T.
        across_documents: the value of data.across_documents.
        group: all ranks of the job.

    Returns:
        The data set; None if there is no sample in the split "validation".

    Raises:
        DataError: there is no sample in the split "train", or a shard cannot be read or is damaged;
            on all ranks.
    """
    if across_documents:
        with agreed(group):
            if split == "validation" and manifest.tokens(split) <= sequence:
                return None
            return TokenDataset(directory, manifest, split, sequence)
    with agreed(group):
        windows = DocumentWindows(ShardFiles(directory, manifest, split), sequence)
        edges = [len(windows) * rank // group.size for rank in (group.rank, group.rank + 1)]
        mine = windows.count(range(*edges))
    counts = np.concatenate(group.gathered(mine, "the number of samples of packed documents"))
    packed = PackedDataset(windows, counts)
    if len(packed):
        if group.rank == 0:
            share = 1 - packed.targets / (len(packed) * sequence)
            logger.info(
                "%s: %d samples of whole documents, %.1f %% of them padding",
                split,
                len(packed),
                100 * share,
            )
        return packed
    if split == "validation":
        return None
    error = DataError(
        f"split {split} of {directory} has no document of two tokens",
        "prepare more text, or leave data.across_documents out",
    )
    error.agreed = True
    raise error
