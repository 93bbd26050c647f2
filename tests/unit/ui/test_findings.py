"""What the doctor found, as lines of text."""

from __future__ import annotations

from exo_train.cluster.checks.finding import Finding
from exo_train.ui.findings import finding_lines

FOUND = [
    Finding("firewall", "wrong", "ufw keeps others out", "sudo ufw allow from 10.0.0.0/8\nsudo b"),
    Finding("clock", "note", "7 s ahead"),
    Finding("agent", "unknown", "none runs", "exo-train join"),
    Finding("disk", "ok", "90 GB are free"),
]


def lines(encoding: str) -> list[str]:
    return [text for text, _ in finding_lines(FOUND, encoding=encoding)]


def test_marks_have_words_and_fixes_have_lines_of_their_own() -> None:
    text = lines("utf-8")
    assert text[0].split() == ["✗", "wrong", "firewall:", "ufw", "keeps", "others", "out"]
    assert text[1:3] == ["    sudo ufw allow from 10.0.0.0/8", "    sudo b"]
    assert text[3].startswith("! note")
    assert text[4].startswith("· not checked")
    assert text[5].strip() == "exo-train join"
    assert text[6].startswith("✓ ok")
    assert text[-1] == "1 wrong; 1 to note, 1 not checked, 1 in order"


def test_a_terminal_without_the_marks_gets_plain_ones() -> None:
    text = lines("cp1252")
    assert text[0].startswith("x wrong")
    assert text[6].startswith("+ ok")
    assert all(line.encode("ascii") for line in lines("ascii"))


def test_all_well_says_so() -> None:
    *_, (last, _) = finding_lines(FOUND[3:], encoding="utf-8")
    assert last == "nothing is wrong; 0 to note, 0 not checked, 1 in order"
