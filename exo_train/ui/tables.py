"""Tables for commands that report: members, verification. Draws what it is given."""

from __future__ import annotations

from typing import Any

from rich.table import Table

BAR_CELLS = 24


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


def plan_table(report: dict[str, Any]) -> Table:
    """Draw `plan --json`'s stages with a bar for each one's share of the period."""
    table = Table(title=f"{report['model']}, {report['dtype']}: {report['strategy']}")
    for heading in ("device", "layers", "memory", "time per microbatch", "busy"):
        table.add_column(heading, overflow="fold")
    for stage in report["stages"]:
        start, end = stage["layers"]
        ends = [word for word in ("embedding", "head") if stage[word]]
        share = stage["time_s"] / report["period_s"] if report["period_s"] else 0.0
        needed, usable = stage["memory_bytes"] / 1e9, stage["usable_memory_bytes"] / 1e9
        table.add_row(
            stage["device"],
            ", ".join([f"{start}–{end - 1}", *ends]),
            f"{needed:.1f} of {usable:.1f} GB",
            f"{'█' * round(BAR_CELLS * min(share, 1.0))} {stage['time_s'] * 1000:.0f} ms",
            f"{stage['busy_share']:.0%}",
        )
    return table


def candidates_table(report: dict[str, Any]) -> Table:
    """Draw all ways that were compared, the fastest first."""
    table = Table(title="compared")
    for heading in ("strategy", "devices", "step", "note"):
        table.add_column(heading, overflow="fold")
    for candidate in report["candidates"]:
        step_s = candidate["step_s"]
        table.add_row(
            candidate["strategy"],
            ", ".join(candidate["devices"]),
            "does not fit" if step_s is None else f"{step_s:.2f} s",
            candidate["note"].split(";")[0],
        )
    return table


def _number(value: float | None, form: str) -> str:
    """Format a number; None stands for one that JSON cannot hold."""
    return "not finite" if value is None else format(value, form)


def _age(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
