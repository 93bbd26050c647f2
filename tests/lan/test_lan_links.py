"""The probe over real packets: shaped links give their speed, a hole for large packets is named."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tests.lan.namespaces import SUBNET, Lan, why_not

pytestmark = [pytest.mark.lan, pytest.mark.processes, pytest.mark.xdist_group("lan")]

BUDGET_S = 2.0
ANSWERING, MEASURING = 1, 2  # hosts
END_TIMEOUT_S = 10
SERVE = f"""
import sys
from exo_train.transport.channel import bind, new_server
from exo_train.transport.probe import probe_handler
server = new_server(max_workers=4, handlers=[probe_handler()])
print(bind(server, "{SUBNET}.{ANSWERING}"), flush=True)
server.start()
sys.stdin.read()
server.stop(0).wait()
"""
MEASURE = f"""
import dataclasses, json, sys, time
from exo_train.peer import Address
from exo_train.transport.probe import measure
start_s = time.monotonic()
result = measure(Address("{SUBNET}.{ANSWERING}", int(sys.argv[1])), budget_s={BUDGET_S})
print(json.dumps(dataclasses.asdict(result) | {{"took_s": time.monotonic() - start_s}}))
"""


@pytest.fixture
def lan() -> Iterator[Lan]:
    missing = why_not()
    if missing:
        pytest.skip(missing)
    with Lan() as lan:
        lan.add_host(ANSWERING)
        lan.add_host(MEASURING)
        yield lan


@contextlib.contextmanager
def serving(lan: Lan) -> Iterator[str]:
    """Run the answering end on its host; gives its port."""
    command = (*lan.shell_prefix(ANSWERING, "answering"), sys.executable, "-c", SERVE)
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        try:
            assert server.stdout is not None
            yield server.stdout.readline().strip()
        finally:
            server.communicate(timeout=END_TIMEOUT_S)  # closes its input, which ends it


def measured(lan: Lan) -> dict[str, Any]:
    with serving(lan) as port:
        command = (*lan.shell_prefix(MEASURING, "measuring"), sys.executable, "-c", MEASURE, port)
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=END_TIMEOUT_S, check=False
        )
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def shape(lan: Lan, host: int, *options: str) -> None:
    """Limit what the host sends."""
    lan.on(host, "tc", "qdisc", "add", "dev", "lan0", "root", "tbf", *options)


def test_each_direction_of_a_fast_link_gives_its_own_speed(lan: Lan) -> None:
    shape(lan, MEASURING, "rate", "300mbit", "burst", "64kb", "latency", "50ms")
    shape(lan, ANSWERING, "rate", "100mbit", "burst", "64kb", "latency", "50ms")
    result = measured(lan)
    assert result["to_peer_bytes_per_s"] == pytest.approx(300e6 / 8, rel=0.15)
    assert result["from_peer_bytes_per_s"] == pytest.approx(100e6 / 8, rel=0.15)
    assert 0 < result["rtt_s"] < 0.02
    assert result["took_s"] < 1.5
    assert result["trouble"] == ""


@pytest.mark.parametrize(
    ("rate", "burst", "bytes_per_s", "tolerance"),
    [
        ("2mbit", "6kb", 2e6 / 8, 0.25),
        ("2mbit", "64kb", 2e6 / 8, 0.25),  # what the shaper had saved up does not count
        ("300kbit", "6kb", 300e3 / 8, 0.35),
    ],
)
def test_a_slow_link_ends_within_the_budget_and_with_its_speed(
    lan: Lan, rate: str, burst: str, bytes_per_s: float, tolerance: float
) -> None:
    for host in (ANSWERING, MEASURING):
        shape(lan, host, "rate", rate, "burst", burst, "latency", "1s")
    result = measured(lan)
    assert result["to_peer_bytes_per_s"] == pytest.approx(bytes_per_s, rel=tolerance)
    assert result["from_peer_bytes_per_s"] == pytest.approx(bytes_per_s, rel=tolerance)
    assert result["took_s"] <= BUDGET_S + 0.1
    assert result["trouble"] == ""


@pytest.mark.parametrize(
    ("narrow", "direction", "passes"),
    [
        (MEASURING, "to the peer", "from_peer_bytes_per_s"),
        (ANSWERING, "from the peer", "to_peer_bytes_per_s"),
    ],
)
def test_packets_that_are_lost_for_their_size_are_named(
    lan: Lan, narrow: int, direction: str, passes: str
) -> None:
    """The switch's end of one host's cable takes no frame of full size, and tells nobody."""
    lan.on(narrow, "ip", "link", "set", "lan0", "gso_max_segs", "1")
    lan.switch("ip", "link", "set", lan.port(narrow), "mtu", "1300")
    result = measured(lan)
    # On a machine that is busy with other things the better direction may seem to stall, too.
    said = result["trouble"]
    assert f"do not pass {direction} within" in said or "do not pass either way" in said
    assert "MTU" in result["trouble"]
    stalled = "to_peer_bytes_per_s" if direction == "to the peer" else "from_peer_bytes_per_s"
    assert result[stalled] == 0
    assert result[passes] > 10e6 or "either way" in said
    assert result["took_s"] <= BUDGET_S + 0.1
