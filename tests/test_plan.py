"""What the pages tell of the code: the picture of the plan, the walks, the sites."""

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


def test_the_page_of_the_sites_shows_what_submit_writes():
    from docs import sites

    if sites.PAGE.read_text() != sites.page():
        pytest.fail(
            "docs/reference/sites.md is out of date: run `python -m docs.sites`", pytrace=False
        )


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


def errors_of_ours():
    """The errors of this package in the manual, as fragments of text between what differs."""
    page = (DOCS / "how-to" / "errors.md").read_text()
    for text in re.findall(r"`hpc-train: error: ([^`]+)`", page):
        yield [fragment.strip() for fragment in text.split("...") if fragment.strip()]


def test_our_errors_in_the_manual_have_the_words_of_the_code():
    sources = [path.read_text() for path in (DOCS.parent / "hpc_train").rglob("*.py")]
    plain = [re.sub(r'"\s*\n\s*f?"', "", source) for source in sources]
    found = list(errors_of_ours())
    assert len(found) >= 5
    for fragments in found:
        words = [re.sub(r"\d+", ".*", re.escape(fragment)) for fragment in fragments]
        pattern = ".{0,80}".join(words)
        assert any(re.search(pattern, text) for text in plain), fragments


@pytest.mark.parametrize(
    "text",
    [
        "GPU_SUPPORT_ENABLED is requested, but GTL library is not linked",
        "OMPI was not built with SLURM's PMI support",
        "Found no NVIDIA driver on your system",
        "Disk quota exceeded",
        "Some of the step tasks have been OOM Killed",
        "Killed",
        "Network is unreachable",
        "NET/Socket : Using",
        "GLIBC_2.34' not found (required by",
        "No space left on device",
        "cannot load MPI library",
    ],
)
def test_an_error_is_found_by_its_text_as_a_heading(text):
    headings = re.findall(r"(?m)^### `(.+)`$", (DOCS / "how-to" / "errors.md").read_text())
    assert any(text in heading for heading in headings)


def test_every_vendor_has_its_line_for_torch_and_every_mpi_its_line_for_mpi4py():
    from hpc_train.mpi.gpus import AMD, INTEL, NVIDIA

    page = (DOCS / "how-to" / "cluster.md").read_text()
    for vendor in (NVIDIA, AMD, INTEL):
        assert re.search(rf"(?m)^\| {vendor.name} \| {vendor.build} \| `pip install torch", page)
    for line in ("MPICC=mpicc pip install", "MPICC=mpiicx pip install", 'MPICC="cc -shared" pip'):
        assert re.search(rf"(?m)^\|.*`{re.escape(line)}", page)
