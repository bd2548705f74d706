"""The samples that a split of prepared texts has."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Literal

import numpy as np

from hpc_train.config import DataSection, RunConfig
from hpc_train.data.block_cache import BlockCache
from hpc_train.data.manifest import Manifest
from hpc_train.data.mixture import Mixture
from hpc_train.data.packing import DocumentWindows, PackedDataset
from hpc_train.data.shard_files import ShardFiles
from hpc_train.data.shards import TokenDataset, has_one_sample
from hpc_train.errors import DataError, plural
from hpc_train.mpi.agreement import agreed
from hpc_train.mpi.group import Group

logger = logging.getLogger(__name__)

Samples = TokenDataset | PackedDataset


@contextmanager
def node_caches(
    section: DataSection, digests: Mapping[Path, str], group: Group
) -> Iterator[dict[Path, BlockCache]]:
    """The caches of `data.cache` on this node, by data folder, until the block ends. Collective.

    Args:
        section: the section `data` of the configuration.
        digests: the digests of the folders' manifests.
        group: all ranks of the job.

    Raises:
        ConfigError: a cache cannot be made; on all ranks.
    """
    with ExitStack() as stack:
        caches = {}
        if section.cache is not None:
            with agreed(group):
                limit = int(section.cache_gb * 1e9) // len(digests)
                for directory, digest in digests.items():
                    caches[directory] = BlockCache(Path(section.cache), digest, limit)
                    stack.callback(caches[directory].close)
        yield caches


def samples_of(
    config: RunConfig,
    found: Mapping[Path, Manifest],
    split: str,
    group: Group,
    caches: Mapping[Path, BlockCache],
) -> Samples | Mixture | None:
    """The samples of a split of the data folders, a mixture if several have it. Collective.

    Args:
        config: the configuration.
        found: the manifests of the folders, in the order of `data.path`.
        split: "train" or "validation".
        group: all ranks of the job.
        caches: the caches of the folders on this node.

    Returns:
        The samples; None if no folder has held-out ones.

    Raises:
        DataError: a folder has no whole sample to train on, or a shard cannot be read or is
            damaged; on all ranks.
        ConfigError: a folder's weight is too small; on all ranks.
    """
    sequence, crossing = config.model.sequence, config.data.across_documents
    assert sequence is not None  # a language model has one
    parts: list[tuple[Samples, float]] = []
    for (directory, manifest), weight in zip(
        found.items(), config.data.folders.values(), strict=True
    ):
        samples = open_samples(
            directory,
            manifest,
            split,
            sequence,
            across_documents=crossing,
            damaged=config.data.damaged,
            cache=caches.get(directory),
            group=group,
        )
        if samples is not None:  # each held-out sample is read once, whatever the weights are
            parts.append((samples, weight if split == "train" else 1.0))
    if len(parts) > 1:
        with agreed(group):
            return Mixture(parts)
    return parts[0][0] if parts else None


def tokens_in(samples: Samples | Mixture) -> float:
    """The tokens of a sample, on average, without padding."""
    if isinstance(samples, Mixture):
        own = [tokens_in(dataset) for dataset in samples.datasets]
        return float(np.average(own, weights=samples.quotas))
    if isinstance(samples, PackedDataset):
        return samples.targets / len(samples)
    return samples.sequence


def open_samples(
    directory: Path,
    manifest: Manifest,
    split: str,
    sequence: int,
    *,
    across_documents: bool,
    damaged: Literal["raise", "substitute"] = "raise",
    cache: BlockCache | None = None,
    group: Group,
) -> Samples | None:
    """Open the samples of a split. Collective.

    The ranks divide the packing of documents among them.

    Args:
        directory: the data folder.
        manifest: its manifest.
        split: "train", or "validation", which may have no samples.
        sequence: tokens per sample, T.
        across_documents: the value of data.across_documents.
        damaged: the value of data.damaged; without across_documents it is "raise".
        cache: the cache of the folder's blocks on this node.
        group: all ranks of the job.

    Returns:
        The data set; None if there is no sample in the split "validation".

    Raises:
        DataError: there is no sample in the split "train", or a shard cannot be read or is damaged;
            on all ranks.
    """
    if across_documents:
        with agreed(group):
            if split == "validation" and not has_one_sample(manifest, split, sequence):
                return None
            return TokenDataset(directory, manifest, split, sequence, cache, damaged)
    with agreed(group):
        windows = DocumentWindows(ShardFiles(directory, manifest, split, cache), sequence)
        edges = [len(windows) * rank // group.size for rank in (group.rank, group.rank + 1)]
        mine = windows.count(range(*edges))
    counts = np.concatenate(group.gathered(mine, "the number of samples of packed documents"))
    packed = PackedDataset(windows, counts)
    if len(packed):
        if group.rank == 0:
            share = 1 - packed.targets / (len(packed) * sequence)
            logger.info(
                "%s: %s of whole documents, %.1f %% of them padding",
                split,
                plural(len(packed), "sample"),
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
