"""What kind of network interface a name stands for: a cable, Wi-Fi, a tunnel, a container's.

Owns the reading of each system's own description. Must not judge addresses: `interfaces` does.
"""

from __future__ import annotations

import functools
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

THUNDERBOLT = "Thunderbolt"
ETHERNET = "Ethernet"
WI_FI = "Wi-Fi"
NETWORK = "network"  # it carries addresses, and nothing more is known
LOOPBACK = "loopback"
VPN = "VPN or tunnel"
VIRTUAL = "container or virtual"
AIRDROP = "AirDrop family"

# Best first: what a tensor should rather take.
RANKS = (THUNDERBOLT, ETHERNET, WI_FI, NETWORK, VPN, VIRTUAL, AIRDROP, LOOPBACK)

# Names that say enough by themselves, on every system: their addresses lead nowhere for another
# device, or (docker0 has the same one everywhere) back to that device itself.
NAME_PATTERNS = (
    (AIRDROP, re.compile(r"(awdl|llw|p2p)\d")),
    (VPN, re.compile(r"(utun|tun|tap|wg|ppp|ipsec|gif|stf|sit|gre|feth)[\d_-]")),
    (VPN, re.compile(r"(zt\w{8}|tailscale|nordlynx|proton|wireguard)")),
    (
        VIRTUAL,
        re.compile(
            r"(docker|podman|br-|veth|virbr|vmnet|vmenet|vboxnet|cni|flannel|cali|lxcbr|lxdbr|vnet)"
        ),
    ),
)

# linux/if_arp.h: PPP, tunnels (IP in IP, IP6, SIT, GRE), and "none", which WireGuard and TUN have.
TUNNEL_TYPES = ("512", "768", "769", "776", "778", "823", "65534")
LOOPBACK_TYPE = "772"
IFF_TUN = 0x0001  # linux/if_tun.h; a TAP (0x0002) carries Ethernet frames, like a cable

# Apple's bridges for shared connections and virtual machines begin at 100, its own parts' links
# are anpi and ap.
MACOS_VIRTUAL = re.compile(r"(bridge[1-9]\d\d|anpi|ap\d)")
NETWORKSETUP = ("/usr/sbin/networksetup", "-listallhardwareports")
NETWORKSETUP_TIMEOUT_S = 3.0
MAX_PORTS = 64

# Windows describes an adapter in words; the first that fits counts.
WINDOWS_WORDS = (
    (LOOPBACK, ("loopback",)),
    (VIRTUAL, ("vethernet", "hyper-v", "virtualbox", "vmware", "bluetooth", "wi-fi direct")),
    (VPN, ("tap-", "wintun", "wireguard", "openvpn", "tailscale", "zerotier", "vpn", "tunnel")),
    (VPN, ("wan miniport", "teredo", "isatap", "6to4", "anyconnect", "fortinet")),
    (THUNDERBOLT, ("thunderbolt", "usb4")),
    (WI_FI, ("wi-fi", "wifi", "wireless", "wlan", "802.11")),
    (ETHERNET, ("ethernet", "gbe", "gigabit", "lan", "pcie")),
)


def kind_of(name: str, *, system: str = sys.platform, sysfs: Path = Path("/sys/class/net")) -> str:
    """Give the kind of the interface called `name` here; "network" when nothing tells more."""
    if system == "win32":
        return windows_kind(name)
    if system == "darwin":
        return macos_kind(name, hardware_ports(name))
    return linux_kind(name, sysfs)


def linux_kind(name: str, sysfs: Path) -> str:
    """Read /sys/class/net; a name that is not there (another namespace's) goes by itself."""
    device = sysfs / name
    if name == "lo" or _read(device / "type") == LOOPBACK_TYPE:
        return LOOPBACK
    if (device / "bridge").is_dir():
        ports = [port.name for port in _entries(device / "brif")]
        return ETHERNET if any(_is_hardware(sysfs / port) for port in ports) else VIRTUAL
    kind = _kind_by_name(name)
    if kind:
        return kind
    if (device / "wireless").exists() or (device / "phy80211").exists():
        return WI_FI
    if _is_tun(device) or _read(device / "type") in TUNNEL_TYPES:
        return VPN
    if name.startswith("thunderbolt"):
        return THUNDERBOLT
    # A VLAN or a bond is as good as the card below it.
    below = [entry for entry in _entries(device) if entry.name.startswith("lower_")]
    is_hardware = _is_hardware(device) or any(_is_hardware(entry) for entry in below)
    return ETHERNET if is_hardware else NETWORK


def macos_kind(name: str, ports: Mapping[str, str]) -> str:
    """Judge by the hardware port of that device name ("en0" → "Wi-Fi"), else by the name."""
    if name.startswith("lo"):
        return LOOPBACK
    port = ports.get(name, "").lower()
    if "thunderbolt bridge" in port or (not port and name == "bridge0"):
        return THUNDERBOLT
    kind = _kind_by_name(name) or (VIRTUAL if MACOS_VIRTUAL.match(name) else "")
    if kind:
        return kind
    if "wi-fi" in port or "airport" in port:
        return WI_FI
    if "bluetooth" in port:
        return VIRTUAL
    # The name of an adapter plugged into Thunderbolt tells an Ethernet card from a bare cable.
    if "ethernet" in port or "lan" in port:
        return ETHERNET
    return THUNDERBOLT if "thunderbolt" in port else NETWORK


def windows_kind(description: str) -> str:
    lower = description.lower()
    for kind, words in WINDOWS_WORDS:
        if any(word in lower for word in words):
            return kind
    return NETWORK


def parse_hardware_ports(text: str) -> dict[str, str]:
    """Read `networksetup -listallhardwareports`: device name → hardware port."""
    ports: dict[str, str] = {}
    port = ""
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "Hardware Port":
            port = value.strip()
        elif key.strip() == "Device" and port and len(ports) < MAX_PORTS:
            ports[value.strip()] = port
            port = ""
    return ports


@functools.lru_cache(maxsize=MAX_PORTS)
def hardware_ports(name: str) -> dict[str, str]:
    """Ask macOS for its hardware ports, once for each new interface name; empty if it does not say.

    `name` is the key of the cache alone: asking costs a tenth of a second.
    """
    try:
        done = subprocess.run(
            NETWORKSETUP,
            capture_output=True,
            text=True,
            timeout=NETWORKSETUP_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.SubprocessError, UnicodeError):
        return {}
    return parse_hardware_ports(done.stdout)


def _kind_by_name(name: str) -> str:
    lower = name.lower()
    return next((kind for kind, pattern in NAME_PATTERNS if pattern.match(lower)), "")


def _is_hardware(device: Path) -> bool:
    return (device / "device").exists()


def _is_tun(device: Path) -> bool:
    try:
        return bool(int(_read(device / "tun_flags") or "0", 16) & IFF_TUN)
    except ValueError:
        return False


def _read(path: Path) -> str:
    try:
        return path.read_text("ascii", errors="replace").strip()
    except OSError:
        return ""


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []
