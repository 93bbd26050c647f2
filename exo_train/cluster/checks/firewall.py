"""The firewall of this device: which kind, whether it is on, and how to let exo-train in.

Owns the tools that are asked on each system, the reading of their answers and the commands of
the fix. Pure: `tools.py` runs the tools.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from exo_train.cluster.checks.finding import Finding
from exo_train.cluster.checks.network import MDNS_PORT
from exo_train.cluster.checks.tools import ToolAnswer
from exo_train.shell import command_line

_MACOS_TOOL = "/usr/libexec/ApplicationFirewall/socketfilterfw"
_LINK_LOCAL = "fe80::/10"

# Only what can be read without root; ufw's own command cannot, its file can.
TOOLS: dict[str, dict[str, tuple[str, ...]]] = {
    "linux": {
        "ufw.conf": ("cat", "/etc/ufw/ufw.conf"),
        "ufw": ("ufw", "status"),
        "firewalld": ("firewall-cmd", "--state"),
        "firewalld rules": ("firewall-cmd", "--list-all"),
        "nft": ("nft", "list", "ruleset"),
        "iptables": ("iptables", "-S", "INPUT"),
    },
    "darwin": {
        "state": (_MACOS_TOOL, "--getglobalstate"),
        "block all": (_MACOS_TOOL, "--getblockall"),
        "stealth": (_MACOS_TOOL, "--getstealthmode"),
    },
    "win32": {"profile": ("netsh", "advfirewall", "show", "currentprofile")},
}


@dataclass(frozen=True, slots=True)
class Firewall:
    kind: str  # "ufw", "firewalld", "nftables", "iptables", "macOS", "Windows"; "" when none
    is_on: bool | None  # None: it could not be found out
    lets_in: bool | None = None  # None: its rules could not be read
    detail: str = ""


def read_firewall(platform: str, answers: Mapping[str, ToolAnswer], port: int) -> Firewall:
    """Read what the tools of TOOLS[platform] answered."""
    if platform == "darwin":
        return _read_macos(answers)
    if platform == "win32":
        return _read_windows(answers)
    return _read_linux(answers, port)


def check_firewall(
    firewall: Firewall,
    *,
    reached_by: Sequence[str],
    missed_by: Sequence[str],
    open_lines: str,
) -> list[Finding]:
    """Judge it by what is proven first (who could connect to this device), then by its rules."""
    kind, detail = firewall.kind, firewall.detail and f" ({firewall.detail})"
    if firewall.is_on is None:
        said = "whether a firewall is on could not be read without administrator rights"
        if missed_by:
            said += f"; {', '.join(missed_by)} cannot connect to this device, so look there"
            return [Finding("firewall", "note", said, open_lines)]
        return [Finding("firewall", "unknown", said)]
    if not firewall.is_on:
        return [Finding("firewall", "ok", "no firewall is on" + (detail or ""))]
    named = f"the {kind} firewall is on{detail}"
    if reached_by:
        return [Finding("firewall", "ok", f"{named} and lets {', '.join(reached_by)} in")]
    if firewall.lets_in:
        return [Finding("firewall", "ok", f"{named}; its rules let exo-train in")]
    if missed_by:
        said = f"{named}, and {', '.join(missed_by)} cannot connect to this device"
        return [Finding("firewall", "wrong", said, open_lines)]
    if firewall.lets_in is False:
        said = f"{named} and keeps other devices out"
        return [Finding("firewall", "wrong", said, open_lines)]
    said = f"{named}; its rules could not be read. If others do not reach this device, let them in"
    return [Finding("firewall", "note", said, open_lines)]


def commands_to_open(
    firewall: Firewall, platform: str, *, port: int, networks: Sequence[str], python: str
) -> str:
    """Give the commands that let the home network in: the port, UDP 5353, and a run's own ports.

    Training opens further ports, chosen by the system; so devices are let in, not ports, wherever
    the home's network is known.
    """
    if platform == "darwin":
        lines = [command_line("sudo", _MACOS_TOOL, *words) for words in _macos_words(python)]
        if "blocks all" in firewall.detail:
            lines.insert(0, command_line("sudo", _MACOS_TOOL, "--setblockall", "off"))
        return "\n".join(lines)
    if platform == "win32":
        rule = "netsh advfirewall firewall add rule name=exo-train dir=in action=allow"
        return f'{rule} profile=private,domain program="{python}"'
    if platform != "linux":
        return f"let TCP port {port or '(the one join prints)'} and UDP {MDNS_PORT} in"
    sources = [n for n in networks if not n.startswith("fe80")]
    if networks:
        sources.append(_LINK_LOCAL)
    if firewall.kind == "firewalld":
        return "\n".join(_firewalld_lines(port, sources))
    if firewall.kind == "nftables":
        return "\n".join(_nft_lines(port, sources))
    if firewall.kind == "iptables":
        return "\n".join(_iptables_lines(port, sources))
    if sources:
        return "\n".join(f"sudo ufw allow from {source}" for source in sources)
    return "\n".join(f"sudo ufw allow {p}" for p in _port_words(port))


def _macos_words(python: str) -> tuple[tuple[str, str], tuple[str, str]]:
    return ("--add", python), ("--unblockapp", python)


def _port_words(port: int) -> list[str]:
    return [*([f"{port}/tcp"] if port else []), f"{MDNS_PORT}/udp"]


def _firewalld_lines(port: int, sources: Sequence[str]) -> list[str]:
    permanent = "sudo firewall-cmd --permanent"
    lines = [f"{permanent} --zone=trusted --add-source={source}" for source in sources]
    if not sources:
        lines = [f"{permanent} --add-port={p}" for p in _port_words(port)]
    return [*lines, "sudo firewall-cmd --reload"]


def _nft_lines(port: int, sources: Sequence[str]) -> list[str]:
    rule = "sudo nft insert rule inet filter input"
    if not sources:
        return [
            f"{rule} {p.split('/')[1]} dport {p.split('/')[0]} accept" for p in _port_words(port)
        ]
    return [f"{rule} {'ip6' if ':' in s else 'ip'} saddr {s} accept" for s in sources]


def _iptables_lines(port: int, sources: Sequence[str]) -> list[str]:
    if not sources:
        pairs = [p.split("/") for p in _port_words(port)]
        return [f"sudo iptables -I INPUT -p {kind} --dport {n} -j ACCEPT" for n, kind in pairs]
    return [
        f"sudo {'ip6tables' if ':' in source else 'iptables'} -I INPUT -s {source} -j ACCEPT"
        for source in sources
    ]


def _read_macos(answers: Mapping[str, ToolAnswer]) -> Firewall:
    state = re.search(r"State = (\d)", answers["state"].text)
    if not state:
        return Firewall("macOS", None)
    if state[1] == "0":
        return Firewall("macOS", False)
    # Two wordings are about: "Block all ENABLED!" and "… block all state set to enabled."
    blocks_all = state[1] == "2" or "enabled" in answers["block all"].text.lower()
    stealth = answers["stealth"].text.lower()
    details = ["blocks all incoming connections"] if blocks_all else []
    if re.search(r"enabled|is on\b", stealth):
        details.append("stealth mode: a closed port times out instead of refusing")
    # Programs are let in one by one, and only the system knows which.
    return Firewall("macOS", True, False if blocks_all else None, ", ".join(details))


def _read_windows(answers: Mapping[str, ToolAnswer]) -> Firewall:
    """Read netsh's table; on a system in another language its words are not known: None."""
    text = answers["profile"].text
    state = re.search(r"^State\s+(ON|OFF)\s*$", text, re.M)
    if not state:
        return Firewall("Windows", None)
    if state[1] == "OFF":
        return Firewall("Windows", False)
    profile = re.search(r"^(\w+) Profile Settings", text, re.M)
    name = profile[1].lower() if profile else ""
    detail = f"{name} network" if name else ""
    if name == "public":
        detail += "; make it a private one in Settings → Network & internet"
    # "BlockInboundAlways" ignores all allowing rules.
    blocks_all = "BlockInboundAlways" in text
    if blocks_all:
        detail += ", blocks all incoming connections"
    return Firewall("Windows", True, False if blocks_all else None, detail)


def _read_linux(answers: Mapping[str, ToolAnswer], port: int) -> Firewall:
    ufw_status = answers["ufw"]
    if ufw_status.is_answer and "Status: active" in ufw_status.text:
        return Firewall("ufw", True, _ufw_lets_in(ufw_status.text, port))
    if re.search(r"^\s*ENABLED=yes", answers["ufw.conf"].text, re.M):
        return Firewall("ufw", True)
    if answers["firewalld"].text.strip() == "running":
        rules = answers["firewalld rules"]
        lets_in = _firewalld_lets_in(rules.text, port) if rules.is_answer else None
        return Firewall("firewalld", True, lets_in)
    for kind, tool, read in (
        ("nftables", "nft", _nft_drops),
        ("iptables", "iptables", _iptables_drops),
    ):
        if answers[tool].is_answer and read(answers[tool].text):
            return Firewall(kind, True, _accepts(answers[tool].text, port))
    if any(answers[tool].is_answer for tool in ("nft", "iptables")):
        return Firewall("", False)
    if all(answers[tool].outcome == "missing" for tool in ("ufw", "firewalld", "nft", "iptables")):
        return Firewall("", False, detail="no firewall's tools are installed")
    return Firewall("", None)


def _ufw_lets_in(text: str, port: int) -> bool:
    """Look for `To  ALLOW  From` lines of the port, or of everything from some network."""
    allowed = re.findall(r"^(\S+)(?: \(v6\))?\s+ALLOW", text, re.M)
    return "Anywhere" in allowed or bool({f"{port}/tcp", str(port)} & set(allowed))


def _firewalld_lets_in(text: str, port: int) -> bool:
    if re.search(r"^\s*target: ACCEPT", text, re.M):
        return True
    ports = re.search(r"^\s*ports: (.*)$", text, re.M)
    for low, high in re.findall(r"(\d+)(?:-(\d+))?/tcp", ports[1] if ports else ""):
        if port and int(low) <= port <= int(high or low):
            return True
    return False


def _nft_drops(text: str) -> bool:
    """Look for an input chain that ends in dropping; `ct state invalid drop` is in many."""
    for chain in re.split(r"^\s*chain ", text, flags=re.M)[1:]:
        if "hook input" in chain and re.search(
            r"policy drop|^\s*(counter [^\n]*)?(drop|reject\b)", chain, re.M
        ):
            return True
    return False


def _iptables_drops(text: str) -> bool:
    return bool(re.search(r"^-P INPUT DROP|^-A INPUT (?!.*-p ).*-j (DROP|REJECT)", text, re.M))


def _accepts(text: str, port: int) -> bool | None:
    """Tell whether a rule names the port; other rules may let it in, too: then None."""
    named = re.search(rf"(--dport|tcp dport) (\{{[^}}]*\b)?{port}\b.*(ACCEPT|accept)", text)
    return True if port and named else None
