"""Reads this device's state for the checks: disk, memory, limits, libraries, routes.

Owns the questions to the operating system. Never raises: what cannot be read is None or empty,
and every question ends within its time.
"""

from __future__ import annotations

import importlib.metadata
import ipaddress
import re
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import ifaddr
import psutil

from exo_train.cluster.cgroup import read_memory_limit
from exo_train.cluster.checks.machine import DiskFacts, MemoryFacts, OpenFilesFacts
from exo_train.cluster.checks.network import InterfaceFacts
from exo_train.cluster.checks.software import CHECKED_LIBRARIES, LibraryFacts
from exo_train.cluster.checks.tools import TOOL_TIMEOUT_S, ToolAnswer
from exo_train.cluster.interfaces import local_addresses, usable_addresses, without_zone

PACKAGE = "exo-train"
ROUTE_TOOLS: dict[str, tuple[str, ...]] = {
    "linux": ("ip", "route"),
    "darwin": ("netstat", "-rn", "-f", "inet"),
    "win32": ("route", "print", "-4"),
}
MACOS_PRESSURE_TOOL = ("sysctl", "-n", "kern.memorystatus_vm_pressure_level")
MACOS_TRANSLATED_TOOL = ("sysctl", "-n", "sysctl.proc_translated")
# What terminals call themselves in TERM_PROGRAM → the name in macOS' settings.
_TERMINALS = {
    "Apple_Terminal": "Terminal",
    "iTerm.app": "iTerm",
    "vscode": "Visual Studio Code",
    "WarpTerminal": "Warp",
    "ghostty": "Ghostty",
    "WezTerm": "WezTerm",
}

Result = TypeVar("Result")


def within(read: Callable[[], Result], otherwise: Result, *, timeout_s: float) -> Result:
    """Give what `read` gives, or `otherwise` when it takes too long: a disk may hang for ever."""
    results: list[Result] = []
    thread = threading.Thread(target=lambda: results.append(read()), daemon=True)
    thread.start()
    thread.join(timeout_s)
    return results[0] if results else otherwise


def read_disk(home: Path) -> DiskFacts:
    """Ask for free space, and try to write, where the home is or will be."""
    unknown = DiskFacts(home=str(home), free_bytes=None)
    return within(lambda: _read_disk(home), unknown, timeout_s=TOOL_TIMEOUT_S)


def _read_disk(home: Path) -> DiskFacts:
    try:
        folder = next((p for p in (home, *home.parents) if p.exists()), home)
        free_bytes = shutil.disk_usage(folder).free
    except OSError:
        return DiskFacts(home=str(home), free_bytes=None)
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        reason = error.strerror or str(error)
        return DiskFacts(home=str(home), free_bytes=free_bytes, write_error=reason)
    return DiskFacts(home=str(home), free_bytes=free_bytes)


def read_memory(macos_pressure: ToolAnswer, root: Path = Path("/")) -> MemoryFacts:
    """Ask for memory, its limits and pressure; `root` holds proc and sys."""
    memory = psutil.virtual_memory()
    limit = read_memory_limit(root) if sys.platform == "linux" else None
    level = macos_pressure.text.strip()
    return MemoryFacts(
        total_bytes=memory.total,
        available_bytes=memory.available,
        limit_bytes=limit.limit_bytes if limit else None,
        limit_free_bytes=limit.free_bytes if limit else 0,
        pressure_percent=read_pressure(root / "proc/pressure/memory"),
        macos_pressure=int(level) if level.isdecimal() else None,
    )


def read_pressure(path: Path) -> float | None:
    """Read the share of the last minute of Linux' pressure file; None where there is none."""
    try:
        match = re.search(r"^some .*?avg60=([0-9.]+)", path.read_text("utf-8", "replace"), re.M)
    except OSError:
        return None
    return float(match[1]) if match else None


def read_open_files(open_by_agent: int | None, agent_limit: int | None) -> OpenFilesFacts:
    """Prefer the agent's own numbers: it may have been started with others than this shell's."""
    if sys.platform == "win32":
        return OpenFilesFacts(limit=None)
    if agent_limit is not None:
        return OpenFilesFacts(limit=agent_limit, open_by_agent=open_by_agent)
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return OpenFilesFacts(limit=None if soft == resource.RLIM_INFINITY else soft)


def read_libraries() -> list[LibraryFacts]:
    """List what this copy of exo-train asks for; empty when it was not installed by pip."""
    try:
        requirements = importlib.metadata.requires(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        return []
    found = []
    for requirement in requirements:
        match = re.fullmatch(r"([A-Za-z0-9._-]+)\s*\(?([^;()]*)\)?\s*", requirement)
        if match and match[1] in CHECKED_LIBRARIES:  # one with a marker is an option
            wanted = match[2].replace(" ", "")
            found.append(LibraryFacts(name=match[1], wanted=wanted, installed=_installed(match[1])))
    return found


def read_wanted_python() -> str:
    try:
        return str(importlib.metadata.metadata(PACKAGE)["Requires-Python"] or "")
    except (importlib.metadata.PackageNotFoundError, KeyError):
        return ""


def _installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def terminal_name(environment: Mapping[str, str]) -> str:
    """Name the program whose permissions count on macOS."""
    program = environment.get("TERM_PROGRAM", "")
    return _TERMINALS.get(program, program.removesuffix(".app") or "your terminal program")


def read_interfaces(
    *,
    adapters: Sequence[ifaddr.Adapter] | None = None,
    mtus_bytes: Mapping[str, int] | None = None,
) -> list[InterfaceFacts]:
    """List this device's addresses, and which of them others may dial.

    Adapters, and MTUs by the system's names of them, are this device's, unless given.
    """
    try:
        addresses = local_addresses(adapters=adapters)
        networks = dict(_networks(ifaddr.get_adapters() if adapters is None else adapters))
    except (OSError, ValueError):
        return []
    usable = {a.host: a for a in usable_addresses(among=addresses)}
    mtus_bytes = _mtus_bytes() if mtus_bytes is None else mtus_bytes
    return [
        InterfaceFacts(
            interface=address.interface,
            host=address.host,
            kind=address.kind,
            is_used=address.host in usable,
            reason=usable.get(address.host, address).reason,
            network=networks.get(without_zone(address.host), ""),
            mtu_bytes=mtus_bytes.get(address.system_name, 0),
        )
        for address in addresses
    ]


def _networks(adapters: Iterable[ifaddr.Adapter]) -> Iterator[tuple[str, str]]:
    """Give (host without zone, its subnet)."""
    for adapter in adapters:
        for entry in adapter.ips:
            host = without_zone(entry.ip if isinstance(entry.ip, str) else entry.ip[0])
            prefix = f"{host}/{entry.network_prefix}"
            yield host, str(ipaddress.ip_network(prefix, strict=False))


def _mtus_bytes() -> dict[str, int]:
    try:
        return {name: stats.mtu for name, stats in psutil.net_if_stats().items()}
    except (OSError, psutil.Error):
        return {}
