"""What is said about other devices, from what a running agent knows of them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from exo_train.cluster.checks.finding import Finding, exit_code, sorted_findings
from exo_train.cluster.checks.peers import (
    DialBack,
    DialFailure,
    Duplicate,
    LinkLine,
    MemberFacts,
    NotAnnounced,
    NotMet,
    check_access_point,
    check_clock,
    check_duplicates,
    check_links,
    check_members,
    check_not_announced,
    check_not_met,
    check_reachable,
    check_strangers,
    check_versions,
)

ADDRESS = "192.168.1.7:52415"


def verdicts(findings: Sequence[Finding]) -> list[str]:
    return [finding.verdict for finding in findings]


def member(name: str, **given: object) -> MemberFacts:
    facts: dict[str, object] = {"node_id": f"{name:0<32}", "version": "0.3.0", "state": "alive"}
    return MemberFacts(name=name, **{**facts, **given})  # type: ignore[arg-type]


def not_met(failure: DialFailure, device: str = "den-pc") -> NotMet:
    return NotMet(device=device, address=ADDRESS, failure=failure)


def test_refused_timed_out_and_not_announced_are_three_sentences() -> None:
    [refused] = check_not_met([not_met("refused")], is_running=True)
    [silent] = check_not_met([not_met("timed out")], is_running=True)
    [unannounced] = check_not_announced([NotAnnounced(member="den-pc", address=ADDRESS)], ["eth0"])
    sentences = [refused.said, silent.said, unannounced.said]
    assert len(set(sentences)) == 3
    for said in sentences:
        assert "den-pc" in said
        assert "52415" in said
    assert "refuses" in refused.said
    assert "timed out" in silent.said
    assert "not announced" in unannounced.said
    assert "5353" in unannounced.said
    assert f"--peer {ADDRESS}" in unannounced.fix
    assert verdicts([refused, silent, unannounced]) == ["wrong", "wrong", "note"]
    assert exit_code([refused]) == 3


def test_others_that_do_not_answer_are_no_fault_while_nothing_runs_here() -> None:
    found = check_not_met([not_met("refused"), not_met("timed out")], is_running=False)
    assert verdicts(found) == ["note", "note"]
    assert exit_code(found) == 0


def test_a_device_that_is_only_remembered_may_be_switched_off() -> None:
    away = NotMet(device="laptop", address=ADDRESS, failure="timed out", is_expected=False)
    [finding] = check_not_met([away], is_running=True)
    assert finding.verdict == "note"
    assert "it sleeps or is off" in finding.said


def test_a_stranger_at_an_address_is_told() -> None:
    [finding] = check_not_met([not_met("foreign")], is_running=True)
    assert "is not den-pc of this cluster" in finding.said


def test_no_route_is_left_to_the_check_that_knows_the_routes() -> None:
    assert check_not_met([not_met("no route")], is_running=True) == []


def access_point(
    failures: Sequence[NotMet], *, met: int = 0, heard: int = 30, wifi: Sequence[str] = ("wlan0",)
) -> list[Finding]:
    return check_access_point(
        failures, num_met=met, num_heard=heard, wifi_interfaces=wifi, is_running=True
    )


def test_an_access_point_that_keeps_devices_apart() -> None:
    both = [not_met("timed out"), not_met("no route", "laptop")]
    [finding] = access_point(both)
    assert finding.verdict == "wrong"
    assert "none of 2 known devices" in finding.said
    assert "isolation" in finding.fix


@pytest.mark.parametrize(
    "case",
    [
        {"met": 1},
        {"heard": 0},
        {"wifi": ()},
        {"failures": [not_met("timed out"), not_met("refused", "laptop")]},
        {"failures": []},
    ],
)
def test_what_is_not_isolation(case: dict[str, object]) -> None:
    given: dict[str, object] = {"failures": [not_met("timed out")], **case}
    assert access_point(**given) == []  # type: ignore[arg-type]


def test_dial_back_that_nobody_managed_is_wrong_with_each_address() -> None:
    outcomes = [
        DialBack(member="den-pc", address="192.168.1.5:52415", outcome="timed out"),
        DialBack(member="den-pc", address="[fd00::5]:52415", outcome="refused"),
    ]
    [finding] = check_reachable(outcomes, "sudo ufw allow from 192.168.1.0/24")
    assert finding.verdict == "wrong"
    assert "192.168.1.5:52415 (timed out), [fd00::5]:52415 (refused)" in finding.said
    assert finding.fix == "sudo ufw allow from 192.168.1.0/24"


def test_one_address_that_works_is_enough_and_the_others_are_told() -> None:
    outcomes = [
        DialBack(member="den-pc", address="192.168.1.5:52415", outcome="connected"),
        DialBack(member="den-pc", address="10.9.0.5:52415", outcome="no route"),
    ]
    [finding] = check_reachable(outcomes, "")
    assert finding.verdict == "ok"
    assert "not at 10.9.0.5:52415 (no route)" in finding.said
    assert verdicts(check_reachable([], "")) == ["unknown"]


def test_each_member_that_cannot_connect_is_wrong() -> None:
    outcomes = [
        DialBack(member="den-pc", address="192.168.1.5:52415", outcome="connected"),
        DialBack(member="laptop", address="192.168.1.5:52415", outcome="timed out"),
    ]
    assert verdicts(check_reachable(outcomes, "open")) == ["ok", "wrong"]


def test_members_that_cannot_be_called_or_share_a_name() -> None:
    own = member("studio", is_self=True)
    found = check_members(
        [
            own,
            member("wsl", is_unreachable=True),
            member("raspberrypi", node_id="a" * 32),
            member("raspberrypi", node_id="b" * 32),
            member("gone", state="dead", is_unreachable=True),
        ]
    )
    assert verdicts(found) == ["wrong", "note", "ok"]
    assert "wsl" in found[0].said
    assert found[0].fix == "run `exo-train doctor` on wsl"
    assert "aaaaaaaa, bbbbbbbb" in found[1].said
    assert "gone" not in found[2].said
    assert verdicts(check_members([own])) == ["note"]


def test_a_copied_home_folder_is_wrong_configuration() -> None:
    copy = Duplicate(node_id="c" * 32, addresses=("192.168.1.9:52415",), is_self=True)
    [finding] = check_duplicates([copy])
    assert finding.verdict == "wrong"
    assert "this device's identity (cccccccc)" in finding.said
    assert "192.168.1.9:52415" in finding.said
    assert exit_code([finding]) == 2
    [other] = check_duplicates([Duplicate(node_id="d" * 32, addresses=(), is_self=False)])
    assert "this device's" not in other.said


def test_other_versions_are_wrong_with_both_numbers() -> None:
    own = member("studio", is_self=True)
    found = check_versions([own, member("den-pc", version="0.10.0")], "0.3.0")
    assert verdicts(found) == ["wrong"]
    assert "den-pc has exo-train 0.10.0, this device 0.3.0" in found[0].said
    assert "exo-train==0.10.0" in found[0].fix, "0.10 is newer than 0.3"
    assert verdicts(
        check_versions([own, member("old", version="0.2.0", state="left")], "0.3.0")
    ) == ["ok"]


def test_an_agent_from_before_an_upgrade_is_wrong() -> None:
    [finding] = check_versions([member("studio", is_self=True, version="0.2.9")], "0.3.0")
    assert finding.verdict == "wrong"
    assert "0.2.9" in finding.said
    assert "0.3.0" in finding.said


def test_clocks_are_a_note_with_the_number_and_never_wrong() -> None:
    found = check_clock({"den-pc": 5.0, "laptop": -7200.4, "studio": 6.0})
    assert verdicts(found) == ["note", "note"]
    assert "the clock of laptop is 7200 s behind" in found[0].said
    assert "6 s ahead" in found[1].said
    [fine] = check_clock({"den-pc": -1.25})
    assert (fine.verdict, fine.said) == ("ok", "all clocks agree within 1.2 s")
    assert check_clock({}) == []


def test_links_with_trouble_are_wrong() -> None:
    found = check_links(
        [
            LinkLine(said="studio ⇄ laptop  Thunderbolt  1.9 GB/s  0.4 ms", trouble=""),
            LinkLine(said="studio ⇄ den-pc", trouble="packets over 1400 bytes vanish"),
        ]
    )
    assert verdicts(found) == ["ok", "wrong"]
    assert found[1].said == "studio ⇄ den-pc: packets over 1400 bytes vanish"
    assert found[1].fix
    [told] = check_links([LinkLine(said="studio ⇄ den-pc  (slow)", trouble="slow")])
    assert told.said == "studio ⇄ den-pc  (slow)", "once is enough"


def test_strangers_are_counted() -> None:
    found = check_strangers(2, {"without a certificate": 7, "unknown certificate": 0})
    assert verdicts(found) == ["note", "note"]
    assert found[0].said.startswith("2 other clusters")
    assert "7 × without a certificate" in found[1].said
    assert "unknown" not in found[1].said
    assert check_strangers(0, {}) == []
    assert check_strangers(1, {})[0].said.startswith("1 other cluster ")


def test_order_and_exit_code() -> None:
    ok = Finding("a", "ok", "fine")
    note = Finding("b", "note", "so so")
    unknown = Finding("c", "unknown", "not asked")
    wrongs = {
        area: Finding(area, "wrong", "bad", area=area)
        for area in ("configuration", "memory", "network")
    }
    assert sorted_findings([ok, unknown, note, wrongs["memory"]]) == [
        wrongs["memory"],
        note,
        unknown,
        ok,
    ]
    assert exit_code([ok, note, unknown]) == 0
    assert exit_code([wrongs["configuration"]]) == 2
    assert exit_code([wrongs["configuration"], wrongs["memory"]]) == 4
    assert exit_code([wrongs["configuration"], wrongs["memory"], wrongs["network"]]) == 3
