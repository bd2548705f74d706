"""What the pages tell of the code: the picture of the plan, and the walks."""

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parent.parent / "docs"
WALKS = DOCS / "explanation" / "walks.md"


def test_the_picture_of_the_plan_shows_the_imports_as_they_are():
    pytest.importorskip("grimp", reason="import-linter is not installed")
    from docs import plan

    if plan.PICTURE.read_text() != plan.draw():
        pytest.fail("docs/plan.svg is out of date: run `python -m docs.plan`", pytrace=False)


def test_the_walks_name_what_their_files_have():
    lines = [line for line in WALKS.read_text().splitlines() if line[:1].isdigit()]
    for line in lines:
        # A file's names stand behind it in parentheses.
        for name, path, names in re.findall(r"\[([^]]+)\]\(([^)]+)\)(?: \(([^)]+)\))?", line):
            text = (WALKS.parent / path).read_text()
            assert path.endswith(name)
            wanted = [word.rpartition(".")[2] for word in re.findall(r"`([^`]+)`", names)]
            for word in wanted:
                assert re.search(rf"(def|class) {word}\b", text), f"{path} has no {word}"


def test_no_page_sends_signals_by_name():
    """A name may also be that of an editor, or of another user's job."""
    pages = [*DOCS.rglob("*.md"), DOCS.parent / "README.md", *DOCS.parent.glob("jobscripts/*")]
    wrong = [
        page.name
        for page in pages
        if page.is_file() and re.search("pkill|killall", page.read_text())
    ]
    assert not wrong
