"""Hosts of a LAN as network namespaces on a bridge. For tests only; needs root on Linux.

Owns everything it makes: the switch is a namespace too, so that nothing appears among this
machine's own interfaces and removing the namespaces removes all.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys

SUBNET = "10.56.0"


def why_not() -> str:
    """Say what is missing to make namespaces here; empty when nothing is."""
    if sys.platform != "linux":
        return "network namespaces are Linux's"
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [program for program in ("ip", "bridge", "unshare") if not shutil.which(program)]
    if missing:
        return f"{' and '.join(missing)} not installed here"
    probe = f"xt{secrets.token_hex(3)}"
    made = subprocess.run(
        ["ip", "netns", "add", probe], capture_output=True, text=True, check=False
    )
    if made.returncode != 0:
        return f"no network namespace can be made here: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", probe], check=False)
    return ""


def call(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr.strip()}"


class Lan:
    """Context manager; `add_host` gives the number of a new host with `lan0` up."""

    def __init__(self) -> None:
        self._prefix = f"xt{secrets.token_hex(3)}"
        self._switch = f"{self._prefix}sw"
        self._made: list[str] = []

    def __enter__(self) -> Lan:
        try:
            self._add_namespace(self._switch)
            call("ip", "-n", self._switch, "link", "add", "br0", "type", "bridge")
            self.switch("ip", "link", "set", "br0", "type", "bridge", "mcast_snooping", "0")
            self.switch("ip", "link", "set", "br0", "up")
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.close()

    def close(self) -> None:
        while self._made:
            subprocess.run(["ip", "netns", "del", self._made.pop()], check=False)

    def add_host(self, number: int, *, with_address: bool = True) -> int:
        host = self._host(number)
        self._add_namespace(host)
        ends = ["name", self.port(number), "netns", self._switch]
        call("ip", "link", "add", *ends, "type", "veth", "peer", "name", "lan0", "netns", host)
        self.switch("ip", "link", "set", self.port(number), "master", "br0", "up")
        self.on(number, "ip", "link", "set", "lo", "up")
        self.on(number, "ip", "link", "set", "lan0", "up")
        if with_address:
            self.give_address(number, f"{SUBNET}.{number}")
        return number

    def give_address(self, number: int, host: str) -> None:
        self.on(number, "ip", "addr", "add", f"{host}/24", "dev", "lan0")
        self.on(number, "ip", "route", "replace", "224.0.0.0/4", "dev", "lan0")

    def add_docker_bridge(self, number: int) -> None:
        """Give the host what a container runtime gives every host: the same address again."""
        self.on(number, "ip", "link", "add", "docker0", "type", "bridge")
        self.on(number, "ip", "addr", "add", "172.17.0.1/16", "dev", "docker0")
        self.on(number, "ip", "link", "set", "docker0", "up")

    def set_multicast(self, number: int, *, passes: bool) -> None:
        flag = "on" if passes else "off"
        self.switch("bridge", "link", "set", "dev", self.port(number), "mcast_flood", flag)

    def cut(self, number: int) -> None:
        """Take the host off the switch without its noticing."""
        self.switch("ip", "link", "set", self.port(number), "nomaster")

    def mend(self, number: int) -> None:
        self.switch("ip", "link", "set", self.port(number), "master", "br0")

    def switch(self, *command: str) -> None:
        call("ip", "netns", "exec", self._switch, *command)

    def on(self, number: int, *command: str) -> None:
        call("ip", "netns", "exec", self._host(number), *command)

    def shell_prefix(self, number: int, hostname: str) -> tuple[str, ...]:
        """Give what to put before a command so that it runs there, under that host name."""
        script = 'echo "$1" > /proc/sys/kernel/hostname; shift; exec "$@"'
        return (
            *("ip", "netns", "exec", self._host(number), "unshare", "--uts"),
            *("sh", "-c", script, "sh", hostname),
        )

    def port(self, number: int) -> str:
        return f"p{number}"

    def _host(self, number: int) -> str:
        return f"{self._prefix}h{number}"

    def _add_namespace(self, name: str) -> None:
        call("ip", "netns", "add", name)
        self._made.append(name)
