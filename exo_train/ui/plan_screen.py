"""What `plan` prints: the split, memory by kind, the ways compared, and the sentences below.

Draws `plan --json` and nothing else. Must not reckon anything that is not in there.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

BAR_CELLS = 24
KINDS = {
    "process_bytes": "process",
    "weights_bytes": "weights",
    "adapters_bytes": "adapters, optimizer",
    "activations_bytes": "activations",
    "workspace_bytes": "workspace",
    "logits_bytes": "logits",
}


def plan_screen(report: dict[str, Any]) -> RenderableType:
    """Draw tables, then one line for each thing a person asks next."""
    lines = [Text(line) for line in _lines(report)]
    return Group(_split_table(report), _memory_table(report), _candidates_table(report), *lines)


def _split_table(report: dict[str, Any]) -> Table:
    """Draw stages with a bar for each one's share of the period."""
    table = _table(
        f"{report['model']}, {report['dtype']}: {report['strategy']}",
        ("device", "layers", "memory", "time per microbatch", "busy"),
    )
    for stage in report["stages"]:
        start, end = stage["layers"]
        ends = [word for word in ("embedding", "head") if stage[word]]
        share = stage["time_s"] / report["period_s"] if report["period_s"] else 0.0
        bar = "█" * round(BAR_CELLS * min(share, 1.0))
        _add_row(
            table,
            stage["device"],
            ", ".join([f"{start}–{end - 1}", *ends]),
            f"{_gb(stage['memory_bytes'])} of {_gb(stage['usable_memory_bytes'])} GB",
            f"{bar} {_seconds(stage['time_s'])}",
            f"{stage['busy_share']:.0%}",
        )
    return table


def _memory_table(report: dict[str, Any]) -> Table:
    table = _table("memory by kind, GB", ("device", *KINDS.values(), "needed", "usable"))
    for column in table.columns[1:]:
        column.justify = "right"
    for stage in report["stages"]:
        _add_row(
            table,
            stage["device"],
            *[_gb(stage["memory_by_kind"][kind]) for kind in KINDS],
            _gb(stage["memory_bytes"]),
            _gb(stage["usable_memory_bytes"]),
        )
    return table


def _candidates_table(report: dict[str, Any]) -> Table:
    """Draw all ways that were compared, the fastest first."""
    table = _table("compared", ("strategy", "devices", "step", "note"))
    for candidate in report["candidates"]:
        step_s = candidate["step_s"]
        _add_row(
            table,
            candidate["strategy"],
            ", ".join(candidate["devices"]),
            "does not fit" if step_s is None else _seconds(step_s),
            candidate["note"].split(";")[0] if step_s is not None else "",
        )
    return table


def _lines(report: dict[str, Any]) -> Iterator[str]:
    yield f"verdict: {report['verdict']}"
    runner_up = report["runner_up"]
    if runner_up:
        names = " > ".join(runner_up["devices"])
        yield (
            f"runner-up: {runner_up['strategy']}, {names}: {_seconds(runner_up['step_s'])} a step"
        )
    else:
        yield "runner-up: none, nothing else fits"
    size, count = report["microbatch_size"], report["num_microbatches"]
    chosen = "chosen" if report["microbatch_size_chosen"] else "as given"
    yield f"microbatches: {count} of {size} sequence{'s' if size > 1 else ''} ({chosen})"
    for link in report["links"]:
        yield (
            f"link {link['from']} → {link['to']}: {link['bytes_per_step'] / 1e6:.1f} MB a step, "
            f"{_seconds(link['time_s'])} a message"
        )
    yield (
        f"predicted: {_seconds(report['step_s'])} a step of {report['step_positions']} positions, "
        f"{report['tokens_per_s']:.0f} tokens/s"
    )
    if report["data"]:
        yield from _epoch_lines(report["data"], report["epoch_s"])


def _epoch_lines(data: dict[str, Any], epoch_s: float | None) -> Iterator[str]:
    yield from data["notes"]
    begin = f"epoch: {data['num_rows']} rows, {data['num_steps']} steps"
    if epoch_s is None:
        yield begin
        return
    padding = 1 - data["tokens"] / data["positions"]
    yield (
        f"{begin}, {data['tokens']} tokens and {padding:.0%} padding: about {_duration(epoch_s)}"
    )


def _table(title: str, headings: tuple[str, ...]) -> Table:
    table = Table(title=Text(title))
    for heading in headings:
        table.add_column(heading, overflow="fold")
    return table


def _add_row(table: Table, *cells: str) -> None:
    """Add cells as they are: a device's name may look like rich's markup."""
    table.add_row(*(Text(cell) for cell in cells))


def _gb(num_bytes: int) -> str:
    """Give GB to a tenth, smaller amounts to a hundredth."""
    return (
        f"{num_bytes / 1e9:.1f}" if num_bytes >= 1e8 or not num_bytes else f"{num_bytes / 1e9:.2f}"
    )


def _seconds(time_s: float) -> str:
    if time_s < 1:
        return f"{time_s * 1000:.0f} ms" if time_s >= 0.01 else f"{time_s * 1000:.2f} ms"
    return f"{time_s:.1f} s" if time_s < 100 else f"{time_s:.0f} s"


def _duration(time_s: float) -> str:
    if time_s < 120:
        return _seconds(time_s)
    return f"{time_s / 60:.0f} min" if time_s < 7200 else f"{time_s / 3600:.1f} h"
