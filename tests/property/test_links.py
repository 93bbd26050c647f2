"""The choice of links: the same at both ends, in any order of results, calm under noise."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from exo_train.cluster.link_facts import LinkFacts, from_messages, to_message
from exo_train.cluster.links import MAX_PEERS, MAX_WAYS, LinkTable, Way
from exo_train.peer import Address, NodeId

MEASURER, OTHER = NodeId("0" * 32), NodeId("f" * 32)
NOISE = 0.1
KINDS = ("Thunderbolt", "Ethernet", "Wi-Fi", "network", "VPN or tunnel")

hosts = st.one_of(
    st.integers(1, 250).map(lambda n: f"10.0.0.{n}"),
    st.integers(1, 250).map(lambda n: f"fe80::{n:x}%en{n % 3}"),
)
ways = st.builds(
    Way,
    address=st.builds(Address, host=hosts, port=st.just(5000)),
    local_host=hosts,
    interface=st.sampled_from(["en0", "en1", "wlan0"]),
    kind=st.sampled_from(KINDS),
)
speeds = st.floats(1e4, 1e10)
round_trips = st.floats(1e-5, 1.0)


@st.composite
def results(draw: st.DrawFn) -> dict[Way, LinkFacts]:
    """Draw ways of one pair, each with its result; speeds near each other are likely."""
    chosen = draw(st.lists(ways, min_size=1, max_size=5, unique=True))
    base = draw(speeds)
    near = st.one_of(st.floats(0.7 * base, 1.4 * base), speeds)
    return {
        way: way.facts(
            OTHER,
            rtt_s=draw(round_trips),
            jitter_s=draw(round_trips),
            to_peer_bytes_per_s=draw(near),
            from_peer_bytes_per_s=draw(near),
            trouble=draw(st.sampled_from(["", "", "large packets are lost"])),
        )
        for way in chosen
    }


def measure_all(table: LinkTable, links: dict[Way, LinkFacts], order: list[Way]) -> None:
    table.follow(OTHER, order, now_s=0.0)
    for way in order:
        table.measured(OTHER, way, links[way], now_s=10.0)


@given(results(), st.randoms(use_true_random=False))
def test_the_order_of_results_does_not_matter(
    links: dict[Way, LinkFacts], shuffler: random.Random
) -> None:
    orders = [list(links), list(links)]
    shuffler.shuffle(orders[1])
    tables = [LinkTable(MEASURER), LinkTable(MEASURER)]
    for table, order in zip(tables, orders, strict=True):
        measure_all(table, links, order)
    assert tables[0].own() == tables[1].own()
    assert tables[0].pinned_host(OTHER) == tables[1].pinned_host(OTHER)


@given(results())
def test_both_ends_and_everyone_else_take_the_same_link(links: dict[Way, LinkFacts]) -> None:
    measurer, other = LinkTable(MEASURER), LinkTable(OTHER)
    measure_all(measurer, links, list(links))
    other.heard(MEASURER, from_messages([to_message(link) for link in measurer.own()]))
    (link,) = measurer.own()
    dialled = measurer.pinned_host(OTHER)
    assert dialled is not None
    assert dialled.partition("%")[0] == link.remote_host
    assert other.pinned_host(MEASURER) == link.local_host
    assert measurer.listing({MEASURER, OTHER}) == other.listing({MEASURER, OTHER})


@given(results())
def test_no_untroubled_link_is_far_faster_than_the_pinned_one(links: dict[Way, LinkFacts]) -> None:
    table = LinkTable(MEASURER)
    measure_all(table, links, list(links))
    (pinned,) = table.own()
    good = [link for link in links.values() if not link.trouble]
    assert bool(pinned.trouble) == (not good)
    assert all(pinned.bytes_per_s >= 0.8 * link.bytes_per_s for link in good)


@settings(max_examples=60)
@given(results(), st.data())
def test_noise_of_a_tenth_never_brings_back_a_way_that_was_left(
    links: dict[Way, LinkFacts], data: st.DataObject
) -> None:
    """A switch needs a truly faster way, so the pinned ones are ever faster ones."""
    factor = st.floats(1 - NOISE, 1 + NOISE)

    def noisy(way: Way) -> LinkFacts:
        share = data.draw(factor)
        return way.facts(
            OTHER,
            rtt_s=links[way].rtt_s * data.draw(factor),
            jitter_s=links[way].jitter_s,
            to_peer_bytes_per_s=links[way].to_peer_bytes_per_s * share,
            from_peer_bytes_per_s=links[way].from_peer_bytes_per_s * share,
        )

    table = LinkTable(MEASURER)
    measure_all(table, {way: noisy(way) for way in links}, list(links))
    history = [table.own()[0]]
    for _ in range(4 * len(links)):
        way = data.draw(st.sampled_from(list(links)))
        table.measured(OTHER, way, noisy(way), now_s=20.0)
        (link,) = table.own()
        if (link.remote_host, link.local_host, link.interface) != (
            history[-1].remote_host,
            history[-1].local_host,
            history[-1].interface,
        ):
            history.append(link)
    assert len(history) <= len(links)


@settings(max_examples=5)
@given(st.integers(0, 2**32))
def test_no_amount_of_peers_and_addresses_makes_it_grow(seed: int) -> None:
    chance = random.Random(seed)
    table = LinkTable(MEASURER)
    link = Way(address=Address("10.0.0.1", 1), local_host="10.0.0.2", interface="e", kind="k")
    facts = [
        link.facts(
            NodeId(f"{2**100 + n:032x}"),
            rtt_s=1.0,
            jitter_s=0.0,
            to_peer_bytes_per_s=1.0,
            from_peer_bytes_per_s=1.0,
        )
        for n in range(2 * MAX_PEERS)
    ]
    ids = [NodeId(f"{1 + n:032x}") for n in range(3 * MAX_PEERS)]
    for node_id in chance.sample(ids, len(ids)):
        addresses = (Address(f"10.0.{chance.randrange(256)}.{n}", 5000) for n in range(20))
        candidates = [
            Way(address=a, local_host="10.0.0.2", interface="en0", kind="Ethernet")
            for a in addresses
        ]
        table.follow(node_id, candidates, now_s=0.0)
        table.heard(node_id, facts)
    num_due = 0
    while (found := table.next_due(now_s=1e3, is_running=False)) is not None:
        peer_id, way = found
        table.measured(peer_id, way, facts[0], now_s=1e3)
        num_due += 1
    assert num_due == MAX_PEERS * MAX_WAYS
    everyone = {MEASURER, *ids, *(f.peer_id for f in facts)}
    assert len(table.listing(everyone)) <= MAX_PEERS * (MAX_PEERS + 1)
    for node_id in ids:
        table.forget(node_id)
    assert table.listing(everyone) == []
    assert table.own() == ()
