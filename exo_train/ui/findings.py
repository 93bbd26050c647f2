"""What `exo-train doctor` found, as text. Draws what it is given.

The fix stands on lines of its own, whole, so that a command can be copied; marks have words beside
them, for terminals without colour.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from exo_train.cluster.checks.finding import Finding, Verdict

_MARKS: dict[Verdict, tuple[str, str, str]] = {
    "wrong": ("✗", "wrong", "bold red"),
    "note": ("!", "note", "yellow"),
    "unknown": ("·", "not checked", "dim"),
    "ok": ("✓", "ok", "green"),
}
_PLAIN = {"✗": "x", "·": "-", "✓": "+"}
_WORD_CHARS = max(len(word) for _, word, _ in _MARKS.values())


def finding_lines(findings: Sequence[Finding], *, encoding: str) -> Iterator[tuple[str, str]]:
    """Yield (text, style) for each line; marks are replaced where `encoding` has none."""
    for finding in findings:
        mark, word, style = _MARKS[finding.verdict]
        text = f"{mark} {word:<{_WORD_CHARS}}  {finding.check}: {finding.said}"
        yield _encodable(text, encoding), style
        if finding.fix:
            for line in finding.fix.splitlines():
                yield _encodable(f"    {line}", encoding), ""
    yield _encodable(_summary(findings), encoding), ""


def _summary(findings: Sequence[Finding]) -> str:
    counts = {
        verdict: sum(finding.verdict == verdict for finding in findings) for verdict in _MARKS
    }
    said = f"{counts['wrong']} wrong" if counts["wrong"] else "nothing is wrong"
    return (
        f"{said}; {counts['note']} to note, {counts['unknown']} not checked, "
        f"{counts['ok']} in order"
    )


def _encodable(text: str, encoding: str) -> str:
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        for mark, plain in _PLAIN.items():
            text = text.replace(mark, plain)
        text = text.encode(encoding, "replace").decode(encoding)
    return text
