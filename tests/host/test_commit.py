"""The commit as git's own files have it."""

from __future__ import annotations

import pytest

from hpc_train.host.commit import commit_of

COMMIT = "4f1d5c0b7a9e4f1d5c0b7a9e4f1d5c0b7a9e4f1d"


@pytest.fixture
def repository(tmp_path):
    (tmp_path / "code" / ".git" / "refs" / "heads").mkdir(parents=True)
    (tmp_path / "code" / "inside").mkdir()
    return tmp_path / "code"


def test_a_branch_is_followed_from_a_folder_inside(repository):
    (repository / ".git" / "HEAD").write_text("ref: refs/heads/main\n")
    (repository / ".git" / "refs" / "heads" / "main").write_text(f"{COMMIT}\n")
    assert commit_of(repository / "inside") == COMMIT


def test_a_packed_branch_and_a_commit_without_branch(repository):
    head = repository / ".git" / "HEAD"
    head.write_text("ref: refs/heads/main\n")
    packed = f"# pack-refs with: peeled\n{'0' * 40} refs/heads/other\n{COMMIT} refs/heads/main\n"
    (repository / ".git" / "packed-refs").write_text(packed)
    assert commit_of(repository) == COMMIT
    head.write_text("a" * 40 + "\n")
    assert commit_of(repository) == "a" * 40


def test_a_worktree_has_its_own_head_and_the_branches_of_its_repository(repository):
    own = repository / ".git" / "worktrees" / "side"
    own.mkdir(parents=True)
    (own / "HEAD").write_text("ref: refs/heads/side\n")
    (own / "commondir").write_text("../..\n")
    (repository / ".git" / "refs" / "heads" / "side").write_text(f"{COMMIT}\n")
    side = repository.parent / "side"
    side.mkdir()
    (side / ".git").write_text(f"gitdir: {own}\n")
    assert commit_of(side) == COMMIT


def test_without_a_repository_or_with_an_empty_one_there_is_none(repository):
    assert commit_of(repository) == ""
    (repository / ".git" / "HEAD").write_text("ref: refs/heads/main\n")
    assert commit_of(repository) == ""
