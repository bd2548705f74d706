"""Writes docs/reference/sites.md: what `submit` asks for at each site, beside the site's example.

    python -m docs.sites

The examples are in site_examples.yaml. What `submit` writes comes from the profiles.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import yaml

from hpc_train.launch import compose
from hpc_train.launch.request import SubmitRequest
from hpc_train.launch.schedulers import scheduler_of
from hpc_train.launch.sites import load_site, names

DOCS = Path(__file__).parent
PAGE = DOCS / "reference" / "sites.md"
EXAMPLES = yaml.safe_load((DOCS / "site_examples.yaml").read_text())
# Options that differ between jobs, and not between sites.
USUAL = ("--job-name", "--output", "--open-mode", "--requeue", "--signal", "-N", "-o", "-j", "-r")
LONG = {
    "-A": "--account",
    "-C": "--constraint",
    "-J": "--job-name",
    "-N": "--nodes",
    "-e": "--error",
    "-o": "--output",
    "-p": "--partition",
    "-q": "--qos",
    "-t": "--time",
}
HEAD = """\
# Sites

These are the profiles of `hpc-train submit --site NAME`. None of them was run at its site. Each was
written from the documentation that it names. The tables put a job of two nodes for one hour beside
an example of the site's own documentation: the options that both have, then the options that one of
them has. An ellipsis stands for a value that is the job's own. {doc}`../how-to/jobs` tells how to
write a profile.
"""


def directives(site: str) -> list[str]:
    """The directives of a job of two nodes for one hour."""
    batch = job(site)
    return [
        *scheduler_of(batch.scheduler).directives(batch),
        *batch.resources.directives,
    ]


def job(site: str) -> compose.BatchJob:
    """A job of two nodes for one hour."""
    profile = load_site(site)
    return compose.make(
        SubmitRequest(
            command=["python", "my_loop.py"],
            options=["--run.dir", "runs/my"],
            site=site,
            nodes=2,
            account="PROJECT",
            queue="acc_debug" if "queue" in profile.needs else None,
            directive=[f"{begin}..." for begin in profile.needs_directives],
            dry_run=True,
        )
    )


def key_of(directive: str, *, slurm: bool) -> str:
    """The option that a directive sets, in its long form; of PBS's -l the resource's name."""
    option, _, value = directive.replace("=", " ", 1).partition(" ")
    if option == "-l":
        return f"-l {value.partition('=')[0].split()[0]}"
    return LONG.get(option, option) if slurm else option


def table(site: str) -> list[str]:
    """The rows of a site's table."""
    example, batch = EXAMPLES[site], job(site)
    slurm = batch.scheduler == "slurm"
    theirs = {key_of(text, slurm=slurm): text for text in example["directives"]}
    ours = {key_of(text, slurm=slurm): text for text in directives(site)}
    unusual = [key for key in [*theirs, *ours] if key not in USUAL]
    both = [key for key in dict.fromkeys(unusual) if key in theirs and key in ours]
    one = [key for key in dict.fromkeys(unusual) if key not in both]
    rows = [(theirs.get(key, ""), ours.get(key, "")) for key in [*both, *one]]
    rows.append((example["launcher"], shlex.join(launcher(batch))))
    own = load_site(site).setup
    rows.append(("; ".join(example.get("setup", [])), "; ".join(own)))
    variables = [f"{name}={value}" for name, value in batch.environ.items()]
    rows.append((", ".join(example["variables"]), ", ".join(variables)))
    return [f"| {code(left)} | {code(right)} |" for left, right in rows if left or right]


def launcher(batch: compose.BatchJob) -> list[str]:
    """The launcher's words, without the path of this Python."""
    words = list(batch.launcher)
    return ["hpc-train", *words[3:]] if words[0] == sys.executable else words


def code(text: str) -> str:
    """A cell of a table."""
    return f"`{text.replace('|', chr(92) + '|')}`" if text else ""


def page() -> str:
    """The text of the page."""
    parts = [HEAD]
    for site in names():
        lines = (DOCS.parent / "jobscripts/sites" / f"{site}.yaml").read_text().splitlines()
        about = " ".join(line[2:] for line in lines if line.startswith("# "))
        notes = EXAMPLES[site]["notes"]
        parts.append(
            "\n".join(
                [
                    f"## {site}",
                    "",
                    about,
                    "",
                    f"| the example: {EXAMPLES[site]['source']} | submit |",
                    "|---|---|",
                    *table(site),
                    *(["", notes] if notes else []),
                    "",
                ]
            )
        )
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page())
    print(f"{PAGE} is written")
