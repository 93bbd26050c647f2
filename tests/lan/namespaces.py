"""Hosts of a LAN as network namespaces on a bridge. For tests only; needs root on Linux.

Owns everything it makes: the switch is a namespace too, so that nothing appears among this
machine's own interfaces and removing the namespaces removes all.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import subprocess
import sys
from contextlib import AbstractContextManager
from pathlib import Path

from tests.lan.hub import Hub
from tests.lan.inside import NETNS, inside

SUBNET = "10.56.0"
SECOND_SUBNET = "10.57.0"  # of br1
ETC_NETNS = Path("/etc/netns")
OURS = re.compile(r"xt(?P<pid>\d+)x[0-9a-f]{6}(sw|r|h\d+)?")  # with the process that made it
OWN_TABLE = 100
CALL_TIMEOUT_S = 20.0


def why_not() -> str:
    """Say what is missing to make namespaces here; empty when nothing is."""
    if sys.platform != "linux":
        return "network namespaces are Linux's"
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [p for p in ("ip", "bridge", "tc", "unshare") if not shutil.which(p)]
    if missing:
        return f"{' and '.join(missing)} not installed here"
    probe = _new_prefix()
    made = subprocess.run(
        ["ip", "netns", "add", probe], capture_output=True, text=True, check=False
    )
    if made.returncode != 0:
        return f"no network namespace can be made here: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", probe], check=False)
    return ""


def why_no_hub() -> str:
    """Say what is missing for the hub, besides namespaces."""
    return "" if os.access("/dev/net/tun", os.R_OK | os.W_OK) else "there is no /dev/net/tun here"


def call(*command: str) -> str:
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=CALL_TIMEOUT_S, check=False
    )
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr.strip()}"
    return done.stdout


def remove_left_over() -> list[str]:
    """Remove what killed runs left behind: the process in the name is no more."""
    removed = []
    for path in NETNS.glob("xt*"):
        match = OURS.fullmatch(path.name)
        if match and not Path("/proc", match["pid"]).exists():
            _remove_namespace(path.name)
            removed.append(path.name)
    return removed


class Lan:
    """Context manager; hosts have `lan0`, on the bridge br0 or on the hub.

    The bridge is the kernel's: fast, no delays or losses. The hub has rules (hub.py).
    """

    def __init__(self) -> None:
        self._prefix = _new_prefix()
        self._switch = f"{self._prefix}sw"
        self._made: list[str] = []
        self._hub: Hub | None = None

    def __enter__(self) -> Lan:
        remove_left_over()
        try:
            self._add_namespace(self._switch)
            self._add_bridge("br0")
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.close()

    def close(self) -> None:
        if self._hub is not None:
            self._hub.close()
        while self._made:
            _remove_namespace(self._made.pop())

    @property
    def hub(self) -> Hub:
        """Give the hub, started at the first use."""
        if self._hub is None:
            self._hub = Hub()
        return self._hub

    def add_host(self, number: int, *, with_address: bool = True, on_hub: bool = False) -> int:
        """Give the number of a new host with `lan0` up."""
        host = self.namespace(number)
        self._add_namespace(host)
        self.on(number, "ip", "link", "set", "lo", "up")
        if on_hub:
            self.hub.plug(number, host, "lan0")
        else:
            self._plug(host, "lan0", self.port(number), "br0")
        # Duplicate address detection would keep IPv6 addresses unusable for seconds.
        self.set_sysctl(number, "net.ipv6.conf.lan0.accept_dad", "0")
        self.on(number, "ip", "link", "set", "lan0", "up")
        if with_address:
            self.give_address(number, f"{SUBNET}.{number}")
        return number

    def add_network(self, number: int, interface: str, *, rate: str = "") -> None:
        """Give the host a second network: br1, with an address, and slower if a rate is said."""
        if "br1" not in call("ip", "-n", self._switch, "-brief", "link"):
            self._add_bridge("br1")
        port = f"{self.port(number)}b"
        self._plug(self.namespace(number), interface, port, "br1")
        self.on(number, "ip", "link", "set", interface, "up")
        self.give_address(number, f"{SECOND_SUBNET}.{number}", interface=interface)
        if rate:
            self.limit_rate(number, rate, port=port)
            self.on(number, *_shaped(interface, rate))

    def add_router(self, *, inner_host: int) -> None:
        """Put a router between br0 (.254) and br1, where `inner_host` alone is moved to."""
        router = f"{self._prefix}r"
        self._add_namespace(router)
        self._add_bridge("br1")
        for interface, bridge, host in (("in0", "br0", SUBNET), ("in1", "br1", SECOND_SUBNET)):
            self._plug(router, interface, f"r{interface}", bridge)
            call("ip", "-n", router, "addr", "add", f"{host}.254/24", "dev", interface)
            call("ip", "-n", router, "link", "set", interface, "up")
        call("ip", "netns", "exec", router, "sysctl", "-qw", "net.ipv4.ip_forward=1")
        self.switch("ip", "link", "set", self.port(inner_host), "master", "br1")
        self.take_address(inner_host, f"{SUBNET}.{inner_host}")
        self.give_address(inner_host, f"{SECOND_SUBNET}.{inner_host}")

    def route_via_router(self, number: int, subnet: str) -> None:
        self.on(number, "ip", "route", "replace", "default", "via", f"{subnet}.254")

    def add_spare(self, number: int, interface: str, *addresses: str, routed: bool = False) -> None:
        """Give the host an interface that is up and leads nowhere, as utun4, awdl0 or tun0 do."""
        host, other_end = self.namespace(number), f"n{secrets.token_hex(3)}"
        ends = ("name", interface, "netns", host, "type", "veth", "peer", "name", other_end)
        call("ip", "link", "add", *ends, "netns", self._switch)
        self.switch("ip", "link", "set", other_end, "up")
        for address in addresses:
            self.on(number, "ip", "addr", "add", address, "dev", interface)
        self.on(number, "ip", "link", "set", interface, "up")
        if routed:
            self.on(number, "ip", "route", "replace", "default", "dev", interface)

    def add_docker_bridge(self, number: int) -> None:
        """Give the host what a container runtime gives every host: the same address again."""
        self.on(number, "ip", "link", "add", "docker0", "type", "bridge")
        self.on(number, "ip", "addr", "add", "172.17.0.1/16", "dev", "docker0")
        self.on(number, "ip", "link", "set", "docker0", "up")

    def give_address(self, number: int, host: str, *, interface: str = "lan0") -> None:
        length = "64" if ":" in host else "24"
        self.on(number, "ip", "addr", "add", f"{host}/{length}", "dev", interface)
        if ":" not in host and interface == "lan0":
            self.on(number, "ip", "route", "replace", "224.0.0.0/4", "dev", interface)

    def take_address(self, number: int, host: str, *, interface: str = "lan0") -> None:
        length = "64" if ":" in host else "24"
        self.on(number, "ip", "addr", "del", f"{host}/{length}", "dev", interface)

    def set_sysctl(self, number: int, name: str, value: str) -> None:
        self.on(number, "sysctl", "-qw", f"{name}={value}")

    def set_etc(self, number: int, name: str, content: str) -> None:
        """Give the host an /etc/NAME of its own; processes started before don't see it."""
        folder = ETC_NETNS / self.namespace(number)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content, "utf-8")

    def set_multicast(self, number: int, *, passes: bool) -> None:
        flag = "on" if passes else "off"
        self.switch("bridge", "link", "set", "dev", self.port(number), "mcast_flood", flag)

    def isolate(self, *numbers: int) -> None:
        """Keep these hosts from reaching each other, as access points do with guests."""
        for number in numbers:
            self.switch("bridge", "link", "set", "dev", self.port(number), "isolated", "on")

    def limit_rate(self, number: int, rate: str, *, port: str = "") -> None:
        """Shape what goes to the host (tc's words, like 300mbit)."""
        self.switch(*_shaped(port or self.port(number), rate))

    def drop_route(self, number: int, host: str, kind: str = "unreachable") -> None:
        """Make a host unreachable (with an error) or blackhole (without) from this one."""
        self.on(number, "ip", "route", "replace", kind, f"{host}/32")

    def close_firewall(self, number: int, protocol: str, port: int) -> None:
        """Drop what comes in for the port, silently: a routing rule looks before the host does."""
        rules = call("ip", "-n", self.namespace(number), "rule")
        if f"{OWN_TABLE}:" not in rules:
            self.on(number, "ip", "rule", "add", "pref", f"{OWN_TABLE}", "table", "local")
            self.on(number, "ip", "rule", "del", "pref", "0")
        where = ("iif", "lan0", "ipproto", protocol, "dport", f"{port}")
        self.on(number, "ip", "rule", "add", "pref", "10", *where, "blackhole")

    def cut(self, number: int) -> None:
        """Take the host off the switch without its noticing."""
        self.switch("ip", "link", "set", self.port(number), "nomaster")

    def mend(self, number: int) -> None:
        self.switch("ip", "link", "set", self.port(number), "master", "br0")

    def pull_cable(self, number: int) -> None:
        """Take the carrier away: the host notices."""
        self.switch("ip", "link", "set", self.port(number), "down")

    def plug_cable(self, number: int) -> None:
        self.switch("ip", "link", "set", self.port(number), "up")

    def switch(self, *command: str) -> None:
        call("ip", "netns", "exec", self._switch, *command)

    def on(self, number: int, *command: str) -> str:
        return call("ip", "netns", "exec", self.namespace(number), *command)

    def inside(self, number: int) -> AbstractContextManager[None]:
        """Put this thread into the host's network (inside.py)."""
        return inside(self.namespace(number))

    def inside_switch(self) -> AbstractContextManager[None]:
        return inside(self._switch)

    def shell_prefix(self, number: int, hostname: str) -> tuple[str, ...]:
        """Give what to put before a command so that it runs there, under that host name."""
        script = 'printf %s "$1" > /proc/sys/kernel/hostname; shift; exec "$@"'
        return (
            *("ip", "netns", "exec", self.namespace(number), "unshare", "--uts"),
            *("sh", "-c", script, "sh", hostname),
        )

    def port(self, number: int) -> str:
        return f"p{number}"

    def namespace(self, number: int) -> str:
        return f"{self._prefix}h{number}"

    def _add_bridge(self, name: str) -> None:
        call("ip", "-n", self._switch, "link", "add", name, "type", "bridge")
        self.switch("ip", "link", "set", name, "type", "bridge", "mcast_snooping", "0")
        self.switch("ip", "link", "set", name, "up")

    def _plug(self, namespace: str, interface: str, port: str, bridge: str) -> None:
        ends = ("name", port, "netns", self._switch, "type", "veth", "peer", "name", interface)
        call("ip", "link", "add", *ends, "netns", namespace)
        self.switch("ip", "link", "set", port, "master", bridge, "up")

    def _add_namespace(self, name: str) -> None:
        call("ip", "netns", "add", name)
        self._made.append(name)


def _new_prefix() -> str:
    return f"xt{os.getpid()}x{secrets.token_hex(3)}"


def _shaped(interface: str, rate: str) -> tuple[str, ...]:
    kind = ("tbf", "rate", rate, "burst", "64kb", "latency", "50ms")
    return ("tc", "qdisc", "replace", "dev", interface, "root", *kind)


def _remove_namespace(name: str) -> None:
    subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
    shutil.rmtree(ETC_NETNS / name, ignore_errors=True)
    if not any(ETC_NETNS.iterdir() if ETC_NETNS.exists() else (True,)):
        ETC_NETNS.rmdir()
