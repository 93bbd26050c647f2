"""What `status` draws: who is in, how fast the links are, what runs, and what needs a word."""

from __future__ import annotations

import io
import re
from typing import Any

import pytest
from rich.console import Console

from exo_train.ui.tables import status_screen

GB = 10**9


def member(name: str, digit: str, **given: Any) -> dict[str, Any]:
    return {
        "id": digit * 32,
        "name": name,
        "state": "alive",
        "since_s": 65.0,
        "slow": False,
        "unreachable": False,
        "waiting": "",
        "backend": "mlx",
        "device": "gpu",
        "chip": "Apple M2",
        "memory_bytes": 16 * GB,
        "free_memory_bytes": 9 * GB,
        "usable_memory_bytes": 7.5 * GB,
        "addresses": ["192.168.1.5:52415", "[fe80::1]:52415"],
        **given,
    }


def drawn(*members: dict[str, Any], width: int = 160, **given: Any) -> str:
    status = {
        "self": "a" * 32,
        "cluster": "0123456789abcdef",
        "view_hash": "feedfacecafe0123",
        "members": list(members),
        "links": [],
        "run": None,
        "other_clusters": 0,
        **given,
    }
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(status_screen(status))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_each_device_has_its_row_with_memory_in_gb() -> None:
    text = drawn(member("studio", "a"), member("den", "b", state="dead", since_s=7300.0))
    assert "cluster 01234567, view feedfacecafe0123" in text
    assert "studio (this one)" in text
    assert "den (this one)" not in text
    assert "7.5 GB" in text
    assert "(9.0 of 16.0 free)" in text
    assert "192.168.1.5:52415" in text
    assert "fe80::1" not in text, "one address is enough here; --json has all"
    assert "65 s" in text
    assert "2.0 h" in text
    assert "dead" in text


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"slow": True}, "alive, slow"),
        (
            {"state": "suspect", "waiting": "silent for 8 s; taken as gone in 7 s"},
            "den: silent for 8 s; taken as gone in 7 s",
        ),
        (
            {"unreachable": True},
            "den: others cannot connect to it, so it gets no place in a ring; run `exo-train "
            "doctor` there",
        ),
        ({"addresses": []}, "den"),
    ],
)
def test_what_needs_a_word_gets_one(given: dict[str, Any], said: str) -> None:
    assert said in drawn(member("studio", "a"), member("den", "b", **given))
    assert said == "den" or said not in drawn(member("studio", "a"), member("den", "b"))


def test_links_are_lines_and_their_brackets_are_no_markup() -> None:
    lines = ["studio ⇄ den  Thunderbolt  1.9 GB/s  0.4 ms", "a[b] ⇄ [red]den  Wi-Fi  4 MB/s  9 ms"]
    text = drawn(member("studio", "a"), links=[{"line": line} for line in lines])
    for line in lines:
        assert line in text


def test_a_run_is_shown_with_what_each_rank_waits_for_and_until_when() -> None:
    ranks = [
        {
            "name": "studio",
            "rank": 0,
            "phase": "step 3: waiting for gradient 1 from den",
            "phase_age_s": 12.3,
            "phase_left_s": 587.7,
        },
        {
            "name": "den",
            "rank": 1,
            "phase": "loading tensors",
            "phase_age_s": 240.0,
            "phase_left_s": None,
        },
    ]
    text = drawn(member("studio", "a"), run={"id": "cafe", "ranks": ranks})
    assert "run cafe:" in text
    assert (
        "  studio (rank 0): step 3: waiting for gradient 1 from den (since 12 s, for 588 s at most)"
        in text
    )
    assert "  den (rank 1): loading tensors (since 4 min)" in text
    assert "run" not in drawn(member("studio", "a"))


def test_what_was_done_about_a_run_without_a_coordinator_is_shown() -> None:
    said = "attic, which led run cafe, is gone: this device goes on with it in /x; see /log"
    assert said in drawn(member("studio", "a"), takeovers=[said])


def test_all_runs_are_shown_if_there_are_several() -> None:
    runs: list[dict[str, Any]] = [
        {
            "id": run_id,
            "ranks": [
                {"name": name, "rank": 0, "phase": "x", "phase_age_s": 1.0, "phase_left_s": None}
            ],
        }
        for run_id, name in (("cafe", "den"), ("beef", "studio"))
    ]
    text = drawn(member("studio", "a"), run=runs[0], runs=runs)
    for run_id, name in (("cafe", "den"), ("beef", "studio")):
        assert f"run {run_id}:\n  {name} (rank 0): x" in re.sub(r" +\n", "\n", text)
    assert text.count("run cafe:") == 1


def test_a_member_that_was_never_met_has_a_row_without_numbers_and_the_way_to_remove_it() -> None:
    unknown = {"backend": "", "device": "", "chip": "", "addresses": []}
    memory = {"memory_bytes": 0, "free_memory_bytes": 0, "usable_memory_bytes": 0}
    away = member("bbbbbbbb", "b", state="away", **unknown, **memory)
    text = drawn(member("studio", "a"), away)
    rows = [line.split() for line in text.splitlines() if "bbbbbbbb" in line]
    assert [word for word in rows[0] if word != "│"] == ["bbbbbbbb", "away", "65", "s"]
    assert "0.0" not in text
    assert "bbbbbbbb: a member, but not met since this agent started" in text
    assert "run `exo-train remove bbbbbbbb`" in text
    assert "not met" not in drawn(member("studio", "a"), member("den", "b", state="dead"))


def test_other_clusters_are_counted_only_if_there_are_any() -> None:
    assert "2 other cluster(s) seen" in drawn(member("studio", "a"), other_clusters=2)
    assert "other cluster" not in drawn(member("studio", "a"))


def test_a_long_name_is_folded_and_not_cut() -> None:
    text = drawn(member("ü" * 60, "a"), width=80)
    assert text.count("ü") == 60


@pytest.mark.parametrize("name", ["[red]den", "den[/]", "[link=http://x]", "[b]", ":skull:"])
def test_a_name_that_looks_like_markup_is_shown_as_it_is(name: str) -> None:
    """`[/]` alone would be an error of the screen."""
    text = drawn(member(name, "a", chip="M2 [max]", waiting=f"{name} waits"))
    assert f"{name} (this one)" in text
    assert "M2 [max]" in text
