"""Tables for commands that report: members, verification. Draws what it is given."""

from __future__ import annotations

from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text


def status_screen(status: dict[str, Any]) -> RenderableType:
    """Draw `status --json`: members, the links between them, the run, and what needs a word."""
    parts: list[RenderableType] = [_members_table(status)]
    parts += [Text(link["line"]) for link in status["links"]]
    runs = status.get("runs") or [run for run in (status["run"],) if run is not None]
    run_lines = [line for run in runs for line in _run_lines(run)]
    parts += [Text(line) for line in (*run_lines, *_notes(status))]
    return Group(*parts)


def _members_table(status: dict[str, Any]) -> Table:
    table = Table(title=f"cluster {status['cluster'][:8]}, view {status['view_hash']}")
    for heading in ("device", "state", "for", "backend", "chip", "usable memory", "address"):
        table.add_column(heading, overflow="fold")
    for member in status["members"]:
        own = " (this one)" if member["id"] == status["self"] else ""
        usable, free, all_ = (
            member[f"{kind}memory_bytes"] / 1e9 for kind in ("usable_", "free_", "")
        )
        _add_row(
            table,
            f"{member['name']}{own}\n{member['id'][:8]}",
            "alive, slow" if member["slow"] else member["state"],
            _age(member["since_s"]),
            f"{member['backend']}/{member['device']}" if member["backend"] else "",
            member["chip"],
            f"{usable:.1f} GB\n({free:.1f} of {all_:.1f} free)" if all_ else "",
            member["addresses"][0] if member["addresses"] else "",
        )
    return table


def _run_lines(run: dict[str, Any]) -> list[str]:
    lines = [f"run {run['id']}:"]
    for rank in run["ranks"]:
        left = rank["phase_left_s"]
        until = "" if left is None else f", for {left:.0f} s at most"
        since = f" (since {_age(rank['phase_age_s'])}{until})"
        lines.append(f"  {rank['name']} (rank {rank['rank']}): {rank['phase']}{since}")
    return lines


def _notes(status: dict[str, Any]) -> list[str]:
    lines = []
    for member in status["members"]:
        if member["waiting"]:
            lines.append(f"{member['name']}: {member['waiting']}")
        if member["unreachable"]:
            lines.append(
                f"{member['name']}: others cannot connect to it, so it gets no place in a ring; "
                f"run `exo-train doctor` there"
            )
        if member["state"] == "away":
            lines.append(
                f"{member['name']}: a member, but not met since this agent started; if there is "
                f"no such device, run `exo-train remove {member['id'][:8]}`"
            )
    lines += status.get("takeovers", ())
    if status["other_clusters"]:
        lines.append(f"{status['other_clusters']} other cluster(s) seen on this network")
    return lines


def verify_table(report: dict[str, Any]) -> Table:
    """Draw `verify --json`'s stages."""
    ring, one = _number(report["loss_ring"], ".7f"), _number(report["loss_one"], ".7f")
    table = Table(title=f"ring loss {ring}, one device {one}")
    for heading in ("rank", "device", "backend", "layers", "largest gradient error", "verdict"):
        table.add_column(heading, overflow="fold")
    for stage in report["stages"]:
        _add_row(
            table,
            str(stage["rank"]),
            stage["name"],
            stage["backend"],
            f"{stage['layers'][0]}–{stage['layers'][1] - 1}",
            _number(stage["gradient_error"], ".2e"),
            "wrong" if stage["wrong"] else "ok",
        )
    return table


def _add_row(table: Table, *cells: str) -> None:
    """Add cells as they are: a device's name may look like rich's markup."""
    table.add_row(*(Text(cell) for cell in cells))


def _number(value: float | None, form: str) -> str:
    """Format a number; None stands for one that JSON cannot hold."""
    return "not finite" if value is None else format(value, form)


def _age(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def evaluation_screen(report: dict[str, Any]) -> RenderableType:
    """Draw `eval --json`: losses of base and adapter, then answers side by side."""
    facts = Text(
        f"{report['data']}: {report['rows']} rows, {report['tokens']:,} tokens, "
        f"{report['supervised_tokens']:,} of them supervised, at most "
        f"{report['max_seq_length']} a row"
    )
    table = Table()
    names = [name for name in report["base"] if name != "loss"]
    for heading in ("", "loss", *(name.replace("_", " ") for name in names)):
        table.add_column(heading, justify="right" if heading else "left")
    for name in ("base", "tuned"):
        if measured := report[name]:
            shown = (
                "too large" if measured[other] is None else f"{measured[other]:.4g}"
                for other in names
            )
            table.add_row(name, f"{measured['loss']:.4f}", *shown)
    adapter = Text(f"adapter: {report['adapter'] or 'none'}")
    return Group(adapter, facts, table, *map(_sample_table, report["samples"]))


def _sample_table(sample: dict[str, Any]) -> Table:
    table = Table(show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name in ("prompt", "expected", "base", "tuned"):
        if sample[name] is not None:
            table.add_row(name, Text(sample[name].strip()))
    return table
