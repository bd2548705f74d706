"""Finds the git commit of a folder in git's own files, without starting a process."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path


def commit_of(folder: Path) -> str:
    """The commit that is checked out where a folder lies; "" if there is no repository.

    Files that were changed since are not looked at.
    """
    with suppress(OSError, UnicodeDecodeError):
        for place in (folder, *folder.parents):
            if (place / ".git").exists():
                return _head(place / ".git")
    return ""


def _head(git: Path) -> str:
    if git.is_file():  # a worktree or a submodule: the file says where its repository is
        git = git.parent / git.read_text(encoding="utf-8").removeprefix("gitdir:").strip()
    head = (git / "HEAD").read_text(encoding="utf-8").strip()
    if not head.startswith("ref: "):
        return head
    name = head.removeprefix("ref: ")
    common = (
        git / (git / "commondir").read_text(encoding="utf-8").strip()
        if (git / "commondir").exists()
        else git
    )
    for place in (git, common):
        if (place / name).is_file():
            return (place / name).read_text(encoding="utf-8").strip()
    for line in (common / "packed-refs").read_text(encoding="utf-8").splitlines():
        commit, _, packed = line.partition(" ")
        if packed == name:
            return commit
    return ""
