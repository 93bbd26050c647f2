"""Tables for commands that report: members, verification. Draws what it is given."""

from __future__ import annotations

from typing import Any

from rich.table import Table


def status_table(status: dict[str, Any]) -> Table:
    """Draw `status --json`'s members, oneself marked."""
    table = Table(title=f"cluster {status['cluster']}, view {status['view_hash']}")
    for heading in ("device", "state", "for", "backend", "chip", "usable memory", "addresses"):
        table.add_column(heading, overflow="fold")
    for member in status["members"]:
        own = " (this one)" if member["id"] == status["self"] else ""
        table.add_row(
            f"{member['name']}{own}\n{member['id'][:8]}",
            member["state"],
            _age(member["since_s"]),
            f"{member['backend']}/{member['device']}",
            member["chip"],
            f"{member['usable_memory_bytes'] / 1e9:.1f} of {member['memory_bytes'] / 1e9:.1f} GB",
            "\n".join(member["addresses"]),
        )
    return table


def verify_table(report: dict[str, Any]) -> Table:
    """Draw `verify --json`'s stages."""
    ring, one = _number(report["loss_ring"], ".7f"), _number(report["loss_one"], ".7f")
    table = Table(title=f"ring loss {ring}, one device {one}")
    for heading in ("rank", "device", "backend", "layers", "largest gradient error", "verdict"):
        table.add_column(heading, overflow="fold")
    for stage in report["stages"]:
        table.add_row(
            str(stage["rank"]),
            stage["name"],
            stage["backend"],
            f"{stage['layers'][0]}–{stage['layers'][1] - 1}",
            _number(stage["gradient_error"], ".2e"),
            "wrong" if stage["wrong"] else "ok",
        )
    return table


def _number(value: float | None, form: str) -> str:
    """Format a number; None stands for one that JSON cannot hold."""
    return "not finite" if value is None else format(value, form)


def _age(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
