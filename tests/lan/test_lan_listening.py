"""Which addresses a host offers, and by which its servers are reached, as processes see it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from exo_train.cluster.interfaces import (
    without_zone,
)
from tests.lan.namespaces import SUBNET, Lan

pytestmark = [pytest.mark.lan, pytest.mark.xdist_group("lan")]

LISTEN = """
import json, sys
sys.path.insert(0, sys.argv[1])
import grpc
from exo_train.cluster.interfaces import listen_hosts, local_addresses
from exo_train.peer import Address
from exo_train.transport.channel import bind, new_server
def answers(target):
    with grpc.insecure_channel(target) as channel:
        call = channel.unary_unary("/a/b", request_serializer=bytes, response_deserializer=bytes)
        try:
            call(b"", timeout=3)
        except grpc.RpcError as error:
            return error.code() is grpc.StatusCode.UNIMPLEMENTED
hosts = listen_hosts(*sys.argv[2:3])
server = new_server(max_workers=2)
port = bind(server, hosts[0])
for host in hosts[1:]:
    bind(server, host, port)
server.start()
own = [a for a in local_addresses() if a.is_usable]
targets = {a.host: f"ipv4:{Address(a.host, port)}" if a.is_ipv4 else
           f"ipv6:{str(Address(a.host, port)).replace('%', '%25')}" for a in own}
print(json.dumps([hosts, {host: bool(answers(t)) for host, t in targets.items()}]))
server.stop(0)
"""


def listen(lan: Lan, number: int, *interface: str) -> tuple[list[str], dict[str, bool]]:
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        [*lan.shell_prefix(number, "x"), sys.executable, "-c", LISTEN, root, *interface],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    hosts, reached = json.loads(done.stdout)
    return hosts, {without_zone(host): ok for host, ok in reached.items()}


def test_servers_are_reached_in_every_family_that_there_is(lan: Lan) -> None:
    lan.add_host(1)
    lan.add_host(2, with_address=False)
    lan.add_host(3)
    lan.set_sysctl(3, "net.ipv6.conf.all.disable_ipv6", "1")
    hosts, reached = listen(lan, 1)
    assert hosts == ["::"]
    assert reached.pop(f"{SUBNET}.1"), "IPv4 callers reach the IPv6 socket"
    assert list(reached.values()) == [True]
    hosts, reached = listen(lan, 2)
    assert hosts == ["::"]
    assert list(reached.values()) == [True]
    hosts, reached = listen(lan, 3)
    assert (hosts, reached) == (["0.0.0.0"], {f"{SUBNET}.3": True})
    hosts, reached = listen(lan, 1, "lan0")
    assert len(hosts) == 2
    assert all(reached.values()), reached


def test_a_link_that_is_down_is_not_offered(lan: Lan) -> None:
    lan.add_host(1)
    lan.add_spare(1, "eth7", "10.9.7.1/24")
    lan.on(1, "ip", "link", "set", "eth7", "down")
    script = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from exo_train.cluster.interfaces import local_addresses\n"
        "print(*(f'{a.interface}|{a.is_usable}|{a.reason}' for a in local_addresses()), sep='\\n')"
    )
    root = str(Path(__file__).parents[2])
    said = lan.on(1, sys.executable, "-c", script, root)
    assert "lan0|True|" in said
    assert "eth7|False|it is down: no cable, or not connected" in said
