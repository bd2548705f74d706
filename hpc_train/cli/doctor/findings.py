"""What a check has found, and the report of all findings."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

OK, WARNING, ERROR = "ok", "warning", "error"


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Args:
        topic: the subject of the check.
        status: "ok"; "warning": the main job runs, but not as well as it could; "error": it cannot
            run.
        text: what was found.
        remedy: for warnings and errors, what to do.
    """

    topic: str
    status: str
    text: str
    remedy: str = ""


def report(
    findings: list[Finding], ranks: list[dict[str, Any]], *, as_json: bool, where: str = "here"
) -> str:
    """The findings as text or as JSON.

    Args:
        findings: the findings.
        ranks: what each rank says of itself.
        as_json: whether to give JSON.
        where: where the main job would run.
    """
    if as_json:
        tree = {
            "ok": runs(findings),
            "findings": [asdict(finding) for finding in findings],
            "ranks": ranks,
        }
        return json.dumps(tree, indent=1)
    lines = []
    for finding in findings:
        lines.append(f"{finding.status:8}{finding.topic:16}{finding.text}")
        if finding.remedy:
            lines.append(f"{'':8}{'':16}-> {finding.remedy}")
    lines.append(f"the main job {'runs' if runs(findings) else 'cannot run'} {where}")
    return "\n".join(lines)


def runs(findings: list[Finding]) -> bool:
    """Whether the main job can run."""
    return all(finding.status != ERROR for finding in findings)
