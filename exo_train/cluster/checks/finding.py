"""What a check found: its verdict, one sentence, and the fix.

Owns the order in which findings are told and the exit code they add up to. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Verdict = Literal["ok", "note", "wrong", "unknown"]
Area = Literal["network", "memory", "configuration"]

# Worst first. "unknown": it could not be checked, and the sentence says why.
VERDICTS: tuple[Verdict, ...] = ("wrong", "note", "unknown", "ok")
# The documented exit codes; where several areas are wrong the first one here decides.
EXIT_CODES: dict[Area, int] = {"network": 3, "memory": 4, "configuration": 2}


@dataclass(frozen=True, slots=True)
class Finding:
    """`fix` is commands, one a line, or a sentence; empty when nothing is to be done."""

    check: str
    verdict: Verdict
    said: str
    fix: str = ""
    area: Area = "network"


def sorted_findings(findings: Iterable[Finding]) -> list[Finding]:
    """Put what is wrong first; checks keep their order within a verdict."""
    return sorted(findings, key=lambda finding: VERDICTS.index(finding.verdict))


def exit_code(findings: Iterable[Finding]) -> int:
    """Give 0 unless something is wrong; notes and what could not be checked are no failure."""
    wrong = {finding.area for finding in findings if finding.verdict == "wrong"}
    return next((code for area, code in EXIT_CODES.items() if area in wrong), 0)
