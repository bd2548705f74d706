"""Durable files: what has been reported as written survives a crash of the machine."""

from __future__ import annotations

import os
from pathlib import Path


def sync(path: Path) -> None:
    """Bring a file's content, or a folder's entries, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def rename(source: Path, target: Path) -> None:
    """Rename a file or folder within its folder; it is durable when this returns."""
    source.rename(target)
    sync(target.parent)


def write_text(path: Path, text: str) -> None:
    """Write a small file so that its readers see the old or the new one, never a part."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    partial.write_text(text)
    sync(partial)
    rename(partial, path)
