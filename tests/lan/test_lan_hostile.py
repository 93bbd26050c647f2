"""A stranger on the LAN sends rubbish: two members go on, growing neither in memory nor files."""

from __future__ import annotations

import contextlib
import importlib
import pkgutil
import random
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass

import grpc
import pytest
from google.protobuf.descriptor import FileDescriptor
from zeroconf import DNSAddress, DNSOutgoing, DNSPointer, DNSService, DNSText

import exo_train.wire.pb
from exo_train.cluster.discovery import SERVICE_TYPE
from tests.agent.running_agents import wait_until
from tests.lan.inside import door
from tests.lan.lan_agents import LanAgent, LanAgents, host, wait_all_see
from tests.lan.namespaces import Lan

pytestmark = [pytest.mark.lan, pytest.mark.processes, pytest.mark.xdist_group("lan")]

STRANGER = 3
MDNS_GROUP = ("224.0.0.251", 5353)
RESPONSE = 0x8400
CLASS_IN = 1
PACKETS_PER_S, GARBAGE_S = 1000, 5
MAX_GROWTH_BYTES = 24_000_000
MAX_BUSY_SHARE = 0.6  # of a core, at 1000 malformed packets a second
MAX_NEW_LINES = 20
NUM_SILENT = 300
NUM_CLOSED = 500
CLOSED_WITHIN_S = 15.0
OPENINGS = (
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    bytes.fromhex("1603010200010001fc0303") + bytes(64),  # the head of a TLS hello
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(100),
    b"\x80\x04\x95" + bytes(40),  # as pickles begin
    b"",
)
REFUSED = {
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.UNAVAILABLE,  # the connection was not accepted
    grpc.StatusCode.UNIMPLEMENTED,  # another service's port
}


@dataclass
class Pair:
    lan: Lan
    one: LanAgent
    two: LanAgent

    def assert_undisturbed(self) -> None:
        for agent, other in ((self.one, self.two), (self.two, self.one)):
            assert agent.sees(other), agent.output
            assert agent.members()[other.id]["state"] == "alive"
            assert "Traceback" not in agent.output


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with Lan() as lan, LanAgents(lan, tmp_path_factory.mktemp("hostile")) as launch:
        for number in (1, 2, STRANGER):
            lan.add_host(number)
        agents = launch(1, 2)
        wait_all_see(agents)
        yield Pair(lan, *agents)


def test_garbage_on_the_mdns_port_is_borne(pair: Pair) -> None:
    """L27."""
    process = pair.one.running()
    before, lines_before = process.memory_info().rss, len(pair.one.output.splitlines())
    cpu_before = process.cpu_times()
    start_s = time.monotonic()
    with _mdns_sender(pair.lan) as sender:
        for index, packet in enumerate(_garbage()):
            sender.sendto(packet, MDNS_GROUP)
            if index % 20 == 0:
                due_s = start_s + index / PACKETS_PER_S
                time.sleep(max(0.0, due_s - time.monotonic()))
    took_s = time.monotonic() - start_s
    cpu = process.cpu_times()
    busy_s = cpu.user + cpu.system - cpu_before.user - cpu_before.system
    assert busy_s / took_s < MAX_BUSY_SHARE
    assert process.memory_info().rss - before < MAX_GROWTH_BYTES
    assert len(pair.one.output.splitlines()) - lines_before < MAX_NEW_LINES
    pair.assert_undisturbed()


def test_false_records_make_no_member(pair: Pair) -> None:
    """L27: port 0, an endless text, bytes that are no UTF-8, no address, our own id."""
    with _mdns_sender(pair.lan) as sender:
        for index in range(20):
            for packet in _false_record(index, pair.one.id):
                sender.sendto(packet, MDNS_GROUP)
    time.sleep(4.0)  # longer than a look-up may take
    assert set(pair.one.members()) == {pair.one.id, pair.two.id}
    pair.assert_undisturbed()


def test_many_connections_that_say_nothing_or_rubbish_are_borne(pair: Pair) -> None:
    """L44, and port scanners and browsers."""
    with contextlib.ExitStack() as stack:
        for index in range(NUM_SILENT):
            opened = stack.enter_context(_connect(pair))
            with contextlib.suppress(OSError):
                opened.sendall(OPENINGS[index % len(OPENINGS)])
        start_s = time.monotonic()
        pair.assert_undisturbed()
        assert time.monotonic() - start_s < 2.0, "two looks at status, each under a second"
        time.sleep(3.0)
        pair.assert_undisturbed()


def test_connections_that_say_nothing_are_closed_and_cost_no_files(pair: Pair) -> None:
    """L44: files are flat, one line tells who it is, and doctor counts them."""
    files_before = pair.one.running().num_fds()
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(_connect(pair)) for _ in range(NUM_CLOSED)]
        end_s = time.monotonic() + CLOSED_WITHIN_S
        for opened in silent:
            opened.settimeout(max(0.1, end_s - time.monotonic()))
            while opened.recv(4096):
                pass  # HTTP/2 servers introduce themselves; only the end counts
        wait_until(
            lambda: pair.one.running().num_fds() <= files_before + 4,
            2.0,
            lambda: f"{pair.one.running().num_fds()} files, {files_before} before",
        )
    pair.assert_undisturbed()
    line = f"{host(STRANGER)}, which is no member, connects to port {pair.one.port}"
    assert pair.one.output.count(line) == 1
    counted = pair.one.examine()["refused_calls"]
    assert counted[f"connections from {host(STRANGER)}"] >= NUM_CLOSED / 2
    _, found = pair.one.doctor()
    assert any(f"connections from {host(STRANGER)}" in finding["said"] for finding in found)


def test_no_call_of_a_stranger_is_answered(pair: Pair) -> None:
    """L93: all methods of all services, on all ports that the host has open to others."""
    answered = []
    for port in _open_ports(pair):
        with (
            door(pair.lan.namespace(STRANGER), host(1), port) as way,
            grpc.insecure_channel(f"ipv4:127.0.0.1:{way}") as channel,
        ):
            for method in _all_methods():
                try:
                    channel.unary_unary(method)(b"", timeout=2.0)
                    answered.append(f"{port}{method}")
                except grpc.RpcError as error:
                    if error.code() not in REFUSED:
                        answered.append(f"{port}{method}: {error.code()}")
    assert not answered
    pair.assert_undisturbed()


def test_the_commands_port_is_open_to_this_host_only(pair: Pair) -> None:
    """L93."""
    endpoint = pair.one.home.agent()
    assert endpoint is not None
    with pair.lan.inside(STRANGER), socket.socket() as caller:
        caller.settimeout(1.0)
        with pytest.raises(ConnectionRefusedError):
            caller.connect((host(1), endpoint.local_port))


def _garbage() -> Iterator[bytes]:
    chance = random.Random(27)
    head = bytes.fromhex("000084000000000100000000")
    pointer_loop = head + b"\xc0\x0c\x00\x0c\x00\x01" + bytes(40)
    chained = head + b"".join(bytes([0xC0, 12 + 2 * i]) for i in range(100)) + bytes(20)
    for _ in range(PACKETS_PER_S * GARBAGE_S // 5):
        yield chance.randbytes(chance.randrange(1, 600))
        yield b"hello there, is this the printer?\r\n"
        yield head + chance.randbytes(1400)
        yield pointer_loop
        yield chained
    for _ in range(20):
        yield head + chance.randbytes(8988)


def _false_record(index: int, own_id: str) -> list[bytes]:
    node_id = own_id if index % 5 == 4 else f"{index:032x}"
    name, server = f"{node_id}.{SERVICE_TYPE}", f"{node_id}.local."
    port = 0 if index % 2 else 9
    text = (
        b"\x05id=\xff\xfe",
        b"".join(b"\xfa" + b"memory=" + b"9" * 243 for _ in range(30)),
        b"\x23id=" + node_id.encode() + b"\x0ccluster=home\x03v=1",
    )[index % 3]
    answer = DNSOutgoing(RESPONSE)
    answer.add_answer_at_time(DNSPointer(SERVICE_TYPE, 12, CLASS_IN, 120, name), 0)
    answer.add_answer_at_time(DNSService(name, 33, CLASS_IN, 120, 0, 0, port, server), 0)
    answer.add_answer_at_time(DNSText(name, 16, CLASS_IN, 120, text), 0)
    if index % 4:
        packed = socket.inet_aton(host(STRANGER))
        answer.add_answer_at_time(DNSAddress(server, 1, CLASS_IN, 120, packed), 0)
    return answer.packets()


@contextlib.contextmanager
def _mdns_sender(lan: Lan) -> Iterator[socket.socket]:
    with lan.inside(STRANGER):
        sender = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    with sender:
        sender.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_TTL, 255)
        sender.bind((host(STRANGER), MDNS_GROUP[1]))
        yield sender


def _connect(pair: Pair) -> socket.socket:
    with pair.lan.inside(STRANGER):
        caller = socket.socket()
    caller.settimeout(2.0)
    caller.connect((host(1), pair.one.port))
    return caller


def _open_ports(pair: Pair) -> list[int]:
    """Find what listens on host 1 by asking it, and try each from the stranger's host."""
    shown = pair.lan.on(1, "ss", "-Hltn")
    ports = {int(line.split()[3].rpartition(":")[2]) for line in shown.splitlines()}
    found = []
    for port in sorted(ports):
        with pair.lan.inside(STRANGER), socket.socket() as caller:
            caller.settimeout(1.0)
            if caller.connect_ex((host(1), port)) == 0:
                found.append(port)
    assert pair.one.port in found
    return found


def _all_methods() -> list[str]:
    methods = []
    for module in pkgutil.iter_modules(exo_train.wire.pb.__path__):
        if module.name.endswith("_pb2"):
            loaded = importlib.import_module(f"exo_train.wire.pb.{module.name}")
            descriptor: FileDescriptor = loaded.DESCRIPTOR
            for service in descriptor.services_by_name.values():
                methods += [f"/{service.full_name}/{method.name}" for method in service.methods]
    assert len(methods) >= 8
    return methods
