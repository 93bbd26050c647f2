"""Which way is measured when, which one is pinned, and what people read about it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from exo_train.cluster.link_facts import (
    MAX_LINKS,
    LinkFacts,
    PairLink,
    from_message,
    from_messages,
    speed_text,
    to_message,
)
from exo_train.cluster.links import (
    AGAIN_S,
    CHANGED_AGAIN_S,
    CONFIRM_S,
    MAX_FAILURES,
    MAX_WAYS,
    MEET_SPREAD_S,
    RETRY_S,
    TROUBLE_AGAIN_S,
    LinkTable,
    Way,
)
from exo_train.errors import ProtocolError
from exo_train.peer import Address, NodeId
from exo_train.wire.pb import control_pb2 as pb

LOW, MIDDLE, HIGH = NodeId("1" * 32), NodeId("5" * 32), NodeId("a" * 32)
CABLE = Way(
    address=Address("192.168.1.7", 5000),
    local_host="192.168.1.2",
    interface="eth0",
    kind="Ethernet",
)
AIR = Way(address=Address("10.0.0.7", 5000), local_host="10.0.0.2", interface="wlan0", kind="Wi-Fi")
BOLT = Way(
    address=Address("fe80::7%en5", 5000),
    local_host="fe80::2%en5",
    interface="en5",
    kind="Thunderbolt",
)
MET_S = MEET_SPREAD_S  # by then every first measurement is due
MB = 1e6


def result(
    way: Way,
    bytes_per_s: float,
    *,
    rtt_s: float = 0.001,
    back_bytes_per_s: float | None = None,
    trouble: str = "",
    peer_id: NodeId = HIGH,
) -> LinkFacts:
    return way.facts(
        peer_id,
        rtt_s=rtt_s,
        jitter_s=rtt_s / 10,
        to_peer_bytes_per_s=bytes_per_s,
        from_peer_bytes_per_s=bytes_per_s if back_bytes_per_s is None else back_bytes_per_s,
        trouble=trouble,
    )


def due(table: LinkTable, now_s: float, *, is_running: bool = False) -> tuple[NodeId, Way] | None:
    return table.next_due(now_s=now_s, is_running=is_running)


def measured_table(*results: tuple[Way, LinkFacts]) -> LinkTable:
    """Give the table of LOW, who met HIGH at 0 s and measured each way at MET_S."""
    table = LinkTable(LOW)
    table.follow(HIGH, [way for way, _ in results], now_s=0.0)
    for way, link in results:
        table.measured(HIGH, way, link, now_s=MET_S)
    return table


def test_the_smaller_id_measures_each_way_once_wired_first_one_at_a_time() -> None:
    table = LinkTable(LOW)
    table.follow(HIGH, [AIR, CABLE], now_s=0.0)
    assert due(table, MET_S) == (HIGH, CABLE)
    assert due(table, MET_S) is None, "the first is still being measured"
    table.measured(HIGH, CABLE, result(CABLE, 100 * MB), now_s=MET_S)
    assert due(table, MET_S) == (HIGH, AIR)
    table.failed(HIGH, AIR, now_s=MET_S)
    assert due(table, MET_S) is None

    other = LinkTable(HIGH)
    other.follow(LOW, [AIR, CABLE], now_s=0.0)
    assert due(other, 10 * AGAIN_S) is None


def test_five_devices_that_meet_at_once_do_not_start_at_once() -> None:
    ids = [NodeId(f"{number:032x}") for number in range(5)]
    starts_s = []
    for own in ids:
        for other in ids:
            if own < other:
                table = LinkTable(own)
                table.follow(other, [CABLE], now_s=0.0)
                tries = (n * 0.01 for n in range(int(MEET_SPREAD_S * 100) + 1))
                starts_s.append(next(now_s for now_s in tries if due(table, now_s)))
    assert len(set(starts_s)) >= 8, "ten pairs spread over the time"
    assert max(starts_s) - min(starts_s) > MEET_SPREAD_S / 2


def test_it_is_measured_again_after_ten_minutes_and_after_trouble_sooner() -> None:
    table = measured_table((CABLE, result(CABLE, 100 * MB)), (AIR, result(AIR, MB, trouble="x")))
    assert due(table, MET_S + TROUBLE_AGAIN_S - 1) is None
    assert due(table, MET_S + TROUBLE_AGAIN_S) == (HIGH, AIR)
    table.measured(HIGH, AIR, result(AIR, MB), now_s=MET_S + TROUBLE_AGAIN_S)
    assert due(table, MET_S + 0.85 * AGAIN_S) is None
    assert due(table, MET_S + 1.15 * AGAIN_S) == (HIGH, CABLE)


def test_during_a_run_only_a_way_never_tried_is_measured() -> None:
    table = measured_table((CABLE, result(CABLE, 100 * MB)))
    assert due(table, 10 * AGAIN_S, is_running=True) is None
    table.follow(HIGH, [CABLE, AIR], now_s=10 * AGAIN_S)
    assert due(table, 10 * AGAIN_S + MET_S, is_running=True) == (HIGH, AIR)
    table.failed(HIGH, AIR, now_s=10 * AGAIN_S)
    assert due(table, 20 * AGAIN_S, is_running=True) is None
    assert due(table, 20 * AGAIN_S) is not None


def test_a_change_at_either_end_makes_all_due_but_flapping_does_not_repeat_it() -> None:
    table = measured_table((CABLE, result(CABLE, 100 * MB)))
    table.follow(HIGH, [CABLE], now_s=MET_S + 1)
    assert due(table, MET_S + 60) is None, "nothing changed"
    moved = replace(AIR, local_host="10.0.0.99")
    for flap in range(6):
        table.follow(HIGH, [CABLE, moved] if flap % 2 else [CABLE, AIR], now_s=MET_S + 1)
    assert due(table, MET_S + 1 + MEET_SPREAD_S) == (HIGH, moved)
    table.measured(HIGH, moved, result(moved, MB), now_s=MET_S + 4)
    assert due(table, MET_S + CHANGED_AGAIN_S - 1) is None
    assert due(table, MET_S + CHANGED_AGAIN_S) == (HIGH, CABLE)


def test_a_way_that_fails_is_tried_again_ever_later_and_loses_its_result() -> None:
    table = measured_table((CABLE, result(CABLE, 100 * MB)), (AIR, result(AIR, 10 * MB)))
    now_s = MET_S
    table.failed(HIGH, CABLE, now_s=now_s)
    assert table.pinned_host(HIGH) == CABLE.address.host, "one failure may be chance"
    assert due(table, now_s + RETRY_S - 1) is None
    assert due(table, now_s + RETRY_S) == (HIGH, CABLE)
    table.failed(HIGH, CABLE, now_s=now_s)
    assert MAX_FAILURES == 2
    assert table.pinned_host(HIGH) == AIR.address.host
    assert due(table, now_s + 2 * RETRY_S - 1) is None
    for _ in range(40):
        table.failed(HIGH, CABLE, now_s=now_s)
    assert due(table, now_s + AGAIN_S) == (HIGH, CABLE), "never given up"


@pytest.mark.parametrize(
    ("cable", "air", "best"),
    [
        (result(CABLE, 10 * MB), result(AIR, 60 * MB), AIR),  # a 100 Mbit/s cable, Wi-Fi 6
        (result(CABLE, 110 * MB), result(AIR, 60 * MB), CABLE),
        (result(CABLE, 100 * MB, back_bytes_per_s=MB), result(AIR, 60 * MB), AIR),
        (result(CABLE, 100 * MB, rtt_s=0.02), result(AIR, 90 * MB, rtt_s=0.002), AIR),
        (result(CABLE, 100 * MB, rtt_s=0.02), result(AIR, 75 * MB, rtt_s=0.002), CABLE),
        (result(CABLE, 90 * MB), result(AIR, 100 * MB), CABLE),  # alike: wired
        (result(CABLE, 900 * MB, trouble="holes"), result(AIR, MB), AIR),
        (result(CABLE, 9 * MB, trouble="a"), result(AIR, MB, trouble="b"), CABLE),
    ],
)
def test_the_best_way_is_pinned(cable: LinkFacts, air: LinkFacts, best: Way) -> None:
    table = measured_table((CABLE, cable), (AIR, air))
    assert table.pinned_host(HIGH) == best.address.host
    assert [link.interface for link in table.own()] == [best.interface]


def test_a_pinned_way_is_left_only_for_one_a_quarter_faster_twice() -> None:
    table = measured_table((CABLE, result(CABLE, 100 * MB)), (AIR, result(AIR, 90 * MB)))

    def see(bytes_per_s: float) -> str | None:
        table.measured(HIGH, AIR, result(AIR, bytes_per_s), now_s=1000.0)
        return table.pinned_host(HIGH)

    cable, air = CABLE.address.host, AIR.address.host
    assert [see(124 * MB) for _ in range(3)] == [cable] * 3, "not enough"
    assert [see(130 * MB), see(110 * MB), see(130 * MB)] == [cable] * 3, "not in a row"
    assert see(130 * MB) == air
    for seen in (air, cable):
        table.measured(HIGH, CABLE, result(CABLE, 170 * MB), now_s=1000.0)
        assert table.pinned_host(HIGH) == seen, "the same the other way round"


def test_a_better_way_is_looked_at_again_soon_beside_the_pinned_one() -> None:
    table = measured_table((CABLE, result(CABLE, 100 * MB)))
    table.follow(HIGH, [CABLE, BOLT], now_s=100.0)
    table.measured(HIGH, CABLE, result(CABLE, 100 * MB), now_s=104.0)
    table.measured(HIGH, BOLT, result(BOLT, 1900 * MB), now_s=105.0)
    assert table.pinned_host(HIGH) == CABLE.address.host
    assert due(table, 105.0 + CONFIRM_S - 1) is None
    for way, speed in ((CABLE, 100 * MB), (BOLT, 1900 * MB)):
        assert due(table, 105.0 + CONFIRM_S) == (HIGH, way)
        table.measured(HIGH, way, result(way, speed), now_s=110.0)
    assert table.pinned_host(HIGH) == "fe80::7%en5"


def test_trouble_and_a_lost_address_move_the_pin_at_once() -> None:
    table = measured_table((CABLE, result(CABLE, 100 * MB)), (AIR, result(AIR, MB)))
    table.measured(HIGH, CABLE, result(CABLE, 100 * MB, trouble="holes"), now_s=700.0)
    assert table.pinned_host(HIGH) == AIR.address.host
    table.follow(HIGH, [CABLE], now_s=800.0)
    assert table.pinned_host(HIGH) == CABLE.address.host, "better than none"
    table.follow(HIGH, [], now_s=900.0)
    assert table.pinned_host(HIGH) is None
    assert table.own() == ()


def test_both_ends_use_the_link_that_the_measurer_chose() -> None:
    measurer = measured_table((CABLE, result(CABLE, 100 * MB)), (BOLT, result(BOLT, 900 * MB)))
    told = from_messages([to_message(link) for link in measurer.own()])
    other, third = LinkTable(HIGH), LinkTable(MIDDLE)
    other.heard(LOW, told)
    third.heard(LOW, told)
    assert measurer.pinned_host(HIGH) == "fe80::7%en5"
    assert other.pinned_host(LOW) == "fe80::2", "zones are nobody else's business"
    assert third.pinned_host(LOW) is None
    live = {LOW, MIDDLE, HIGH}
    assert measurer.listing(live) == other.listing(live) == third.listing(live)
    assert [pair.link.kind for pair in third.listing(live)] == ["Thunderbolt"]
    assert third.listing({LOW, MIDDLE}) == [], "not of a device that is gone"
    other.forget(LOW)
    assert other.pinned_host(LOW) is None


def test_what_is_not_a_members_own_to_measure_is_left_out() -> None:
    table = LinkTable(LOW)
    table.heard(HIGH, [result(CABLE, MB, peer_id=LOW), result(CABLE, MB, peer_id=MIDDLE)])
    table.heard(LOW, [result(CABLE, MB, peer_id=HIGH)])
    assert table.pinned_host(HIGH) is None
    assert table.listing({LOW, MIDDLE, HIGH}) == []
    table.heard(MIDDLE, [result(CABLE, MB), result(AIR, 2 * MB), result(BOLT, 3 * MB)])
    assert [pair.link.interface for pair in table.listing({MIDDLE, HIGH})] == ["eth0"]


def test_the_listing_has_each_pair_once_in_the_order_of_ids() -> None:
    table = measured_table((CABLE, result(CABLE, 100 * MB)))
    table.follow(MIDDLE, [AIR], now_s=0.0)
    table.measured(MIDDLE, AIR, result(AIR, MB, peer_id=MIDDLE), now_s=MET_S)
    table.heard(MIDDLE, [result(BOLT, 900 * MB)])
    ends = [(pair.measurer_id, pair.link.peer_id) for pair in table.listing({LOW, MIDDLE, HIGH})]
    assert ends == [(LOW, MIDDLE), (LOW, HIGH), (MIDDLE, HIGH)]


def test_a_link_reads_as_one_line() -> None:
    pair = PairLink(measurer_id=LOW, link=result(BOLT, 1.9e9, rtt_s=0.0004, back_bytes_per_s=2e9))
    names = {LOW: "studio", HIGH: "laptop"}
    assert pair.line(names) == "studio ⇄ laptop  Thunderbolt  1.9 GB/s  0.4 ms"
    assert pair.line({}) == "11111111 ⇄ aaaaaaaa  Thunderbolt  1.9 GB/s  0.4 ms"
    troubled = replace(pair, link=replace(pair.link, trouble="large packets are lost"))
    assert troubled.line(names).endswith("0.4 ms  (large packets are lost)")


@pytest.mark.parametrize(
    ("bytes_per_s", "text"),
    [
        (0.0, "0 B/s"),
        (37_500.0, "38 kB/s"),
        (9.94e6, "9.9 MB/s"),
        (9.96e6, "10 MB/s"),
        (117.5e6, "118 MB/s"),
        (999.6e6, "1.0 GB/s"),
        (12e12, "12000 GB/s"),
    ],
)
def test_speeds_are_written_in_decimal_units(bytes_per_s: float, text: str) -> None:
    assert speed_text(bytes_per_s) == text


GOOD = to_message(result(BOLT, 1.9e9))


def changed(**values: object) -> pb.LinkFacts:
    message = pb.LinkFacts()
    message.CopyFrom(GOOD)
    for name, value in values.items():
        setattr(message, name, value)
    return message


def test_facts_come_back_as_they_were_sent() -> None:
    assert from_message(GOOD) == result(BOLT, 1.9e9)
    stalled = changed(to_peer_bytes_per_s=0.0, trouble="large packets are lost")
    assert from_message(stalled).bytes_per_s == 0


@pytest.mark.parametrize(
    "values",
    [
        {"peer_id": "A" * 32},
        {"peer_id": "a" * 31},
        {"local_host": "studio.local"},
        {"remote_host": ""},
        {"remote_host": "fe80::1%en0"},
        {"interface": "e" * 201},
        {"interface": "en0\x1b[2J"},
        {"kind": "Wi-Fi\n"},
        {"trouble": "t" * 401},
        {"rtt_s": 0.0},
        {"rtt_s": float("nan")},
        {"rtt_s": 61.0},
        {"jitter_s": -0.1},
        {"jitter_s": float("inf")},
        {"to_peer_bytes_per_s": float("inf")},
        {"to_peer_bytes_per_s": float("nan")},
        {"from_peer_bytes_per_s": -1.0},
        {"from_peer_bytes_per_s": 0.0},
    ],
    ids=str,
)
def test_facts_that_make_no_sense_are_refused(values: dict[str, object]) -> None:
    with pytest.raises(ProtocolError, match="make no sense"):
        from_message(changed(**values))


def test_counts_from_the_network_are_bounded() -> None:
    with pytest.raises(ProtocolError, match=rf"{MAX_LINKS + 1} links \(limit {MAX_LINKS}\)"):
        from_messages([GOOD] * (MAX_LINKS + 1))
    table = LinkTable(LOW)
    table.follow(
        HIGH,
        [replace(CABLE, address=Address(f"10.0.0.{n}", 5000)) for n in range(100)],
        now_s=0.0,
    )
    num_due = 0
    while found := due(table, MET_S):
        table.failed(*found, now_s=MET_S)
        num_due += 1
    assert num_due == MAX_WAYS


def test_a_pinned_way_by_which_a_call_failed_is_looked_at_again_at_once() -> None:
    table = LinkTable(LOW)
    table.follow(HIGH, [BOLT, AIR], now_s=0.0)
    for _ in range(2):
        due = table.next_due(now_s=MET_S, is_running=False)
        assert due is not None
        table.measured(HIGH, due[1], result(due[1], (9 if due[1] == BOLT else 1) * MB), now_s=MET_S)
    later_s = MET_S + 60.0
    assert table.next_due(now_s=later_s, is_running=False) is None
    table.doubt(HIGH, AIR.address, now_s=later_s)
    assert table.next_due(now_s=later_s, is_running=False) is None, "only the pinned one matters"
    table.doubt(HIGH, BOLT.address, now_s=later_s)
    assert table.next_due(now_s=later_s, is_running=False) == (HIGH, BOLT)


def test_a_busy_other_end_is_no_failure_of_the_way() -> None:
    table = LinkTable(LOW)
    table.follow(HIGH, [BOLT], now_s=0.0)
    assert table.next_due(now_s=MET_S, is_running=False) == (HIGH, BOLT)
    table.postpone(HIGH, BOLT, now_s=MET_S)
    assert table.next_due(now_s=MET_S + 1.0, is_running=False) is None
    assert table.next_due(now_s=MET_S + 6.0, is_running=False) == (HIGH, BOLT)
