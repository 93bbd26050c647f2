"""What `validate` prints: files, bad rows, token counts, and a sample with what is learnt marked.

Draws `validate --json` and nothing else. Must not reckon anything that is not in there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

LEARNT_STYLE = "bold green"
MARKS = ("[[", "]]")  # around what is learnt, where there is no colour
MAX_LISTED = 10


def validation_screen(report: Mapping[str, Any], *, has_colour: bool) -> RenderableType:
    """Draw the report; without colour the learnt text of the sample stands in brackets."""
    parts: list[RenderableType] = [_files_table(report)]
    if report["bad"]:
        parts.append(_bad_table(report))
    parts += [Text(line) for line in _lines(report)]
    if report["sample"]:
        parts.append(_sample(report["sample"], has_colour=has_colour))
    return Group(*parts)


def _files_table(report: Mapping[str, Any]) -> Table:
    table = Table("file", "part", "rows", "usable", "times an epoch")
    for file in report["files"]:
        times = f"{file['weight']:g}" if file["split"] == "train" else ""
        table.add_row(
            Text(file["file"]), file["split"], str(file["rows"]), str(file["usable"]), times
        )
    return table


def _bad_table(report: Mapping[str, Any]) -> Table:
    table = Table("bad row", "reason")
    for row in report["bad"][:MAX_LISTED]:
        table.add_row(Text(f"{row['file']}, {row['place']}"), Text(row["reason"]))
    if report["num_bad"] > MAX_LISTED:
        table.add_row(f"… and {report['num_bad'] - MAX_LISTED} more", "")
    return table


def _lines(report: Mapping[str, Any]) -> Iterator[str]:
    kinds = ", ".join(f"{count} {form}" for form, count in report["formats"].items())
    yield f"{report['usable']} usable of {report['rows']} rows" + (f": {kinds}" if kinds else "")
    if len(report["reasons"]) > 1 or report["num_bad"] > MAX_LISTED:
        yield "left out: " + ", ".join(
            f"{count} × {reason}" for reason, count in report["reasons"].items()
        )
    if report["duplicates"]:
        yield f"{report['duplicates']} training rows say what an earlier one says"
    if report["held_out_seen"]:
        yield f"{report['held_out_seen']} held-out rows are trained on, too"
    yield from report["notes"]
    if report["tokens"]:
        share = report["supervised_tokens"] / report["tokens"]
        yield (
            f"{report['sequences']} sequences, {report['tokens']} tokens, {share:.0%} of them "
            f"supervised"
        )
        places = ", ".join(f"{key}: {value}" for key, value in _percentiles(report))
        yield f"tokens of a sequence: {places}"
        yield (
            f"{report['over_long']} of {report['sequences']} sequences are longer than "
            f"{report['max_seq_length']} tokens"
        )


def _percentiles(report: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    for key, value in report["percentiles"].items():
        yield ("longest" if key == "max" else f"{key} % have at most"), value


def _sample(sample: Mapping[str, Any], *, has_colour: bool) -> Text:
    """Show the first row as the model sees it."""
    opening, closing = ("", "") if has_colour else MARKS
    how = "in colour" if has_colour else f"in {opening} {closing}"
    text = Text(f"\n{sample['where']}, what is learnt {how}:\n", style="")
    for part in sample["parts"]:
        if part["supervised"]:
            text.append(f"{opening}{part['text']}{closing}", style=LEARNT_STYLE)
        else:
            text.append(part["text"])
    return text
