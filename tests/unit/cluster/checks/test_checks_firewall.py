"""Firewalls of three systems, from what their own tools print."""

from __future__ import annotations

import pytest

from exo_train.cluster.checks.finding import Finding, exit_code
from exo_train.cluster.checks.firewall import (
    TOOLS,
    Firewall,
    check_firewall,
    commands_to_open,
    read_firewall,
)
from exo_train.cluster.checks.tools import ToolAnswer

PORT = 52415
MISSING = ToolAnswer("missing")

UFW_ACTIVE = """Status: active

To                         Action      From
--                         ------      ----
22/tcp                     ALLOW       Anywhere
22/tcp (v6)                ALLOW       Anywhere (v6)
"""
UFW_LAN = UFW_ACTIVE + "Anywhere                   ALLOW       192.168.1.0/24\n"
UFW_PORT = UFW_ACTIVE + f"{PORT}/tcp                  ALLOW       Anywhere\n"
UFW_DENIED = UFW_ACTIVE + f"{PORT}/tcp                  DENY        Anywhere\n"
UFW_CONF = "# /etc/ufw/ufw.conf\n#\n\n# Set to yes to start on boot.\nENABLED={}\nLOGLEVEL=low\n"

FEDORA_ZONE = """FedoraWorkstation (default, active)
  target: default
  interfaces: wlp2s0
  services: dhcpv6-client mdns samba-client ssh
  ports: 1025-65535/udp 1025-65535/tcp
  forward: yes
"""
PUBLIC_ZONE = """public (active)
  target: default
  interfaces: eth0
  services: cockpit dhcpv6-client ssh
  ports: 8080/tcp
"""
NFT_DROPPING = """table inet filter {
\tchain input {
\t\ttype filter hook input priority filter; policy drop;
\t\tct state established,related accept
\t\ttcp dport { 22, 80 } accept
\t}
}
"""
NFT_ALLOWING = NFT_DROPPING.replace("{ 22, 80 }", f"{{ 22, {PORT} }}")
NFT_OPEN = """table inet filter {
\tchain input {
\t\ttype filter hook input priority filter; policy accept;
\t\tct state invalid drop
\t}
\tchain forward {
\t\ttype filter hook forward priority filter; policy drop;
\t}
}
"""
IPTABLES_REJECTING = "-P INPUT ACCEPT\n-A INPUT -p tcp -m tcp --dport 22 -j ACCEPT\n" + (
    "-A INPUT -j REJECT --reject-with icmp-host-prohibited\n"
)
NETSH = """
{profile} Profile Settings:
----------------------------------------------------------------------
State                                 {state}
Firewall Policy                       {policy},AllowOutbound
LocalFirewallRules                    N/A (GPO-store only)
Ok.

"""


def answered(text: str) -> ToolAnswer:
    return ToolAnswer("answered", text)


def linux(**given: ToolAnswer) -> Firewall:
    tools = dict.fromkeys(TOOLS["linux"], MISSING)
    names = {"ufw_conf": "ufw.conf", "rules": "firewalld rules"}
    for name, answer in given.items():
        tools[names.get(name, name)] = answer
    return read_firewall("linux", tools, PORT)


def macos(state: str, block: str = "", stealth: str = "") -> Firewall:
    answers = {"state": state, "block all": block, "stealth": stealth}
    return read_firewall("darwin", {k: answered(v) for k, v in answers.items()}, PORT)


def judge(
    firewall: Firewall, *, reached: tuple[str, ...] = (), missed: tuple[str, ...] = ()
) -> Finding:
    [finding] = check_firewall(
        firewall, reached_by=reached, missed_by=missed, open_lines="sudo open the door"
    )
    return finding


@pytest.mark.parametrize(
    ("text", "lets_in"),
    [(UFW_ACTIVE, False), (UFW_LAN, True), (UFW_PORT, True), (UFW_DENIED, False)],
)
def test_ufw_read_as_root(text: str, lets_in: bool) -> None:
    assert linux(ufw=answered(text)) == Firewall("ufw", True, lets_in)


def test_ufw_without_root_is_known_from_its_file() -> None:
    refused = ToolAnswer("failed", "ERROR: You need to be root to run this script")
    assert linux(ufw=refused, ufw_conf=answered(UFW_CONF.format("yes"))) == Firewall("ufw", True)
    off = linux(ufw=refused, ufw_conf=answered(UFW_CONF.format("no")))
    assert off.is_on is None, "another firewall may be on; nothing readable says"


@pytest.mark.parametrize(("zone", "lets_in"), [(FEDORA_ZONE, True), (PUBLIC_ZONE, False)])
def test_firewalld_zone(zone: str, lets_in: bool) -> None:
    found = linux(firewalld=answered("running\n"), rules=answered(zone))
    assert found == Firewall("firewalld", True, lets_in)


def test_firewalld_whose_rules_are_not_for_everybody() -> None:
    refused = ToolAnswer("failed", "Authorization failed.\n    Make sure polkit agent is running")
    assert linux(firewalld=answered("running\n"), rules=refused).lets_in is None
    stopped = linux(firewalld=ToolAnswer("failed", "not running\n"))
    assert stopped.is_on is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (NFT_DROPPING, Firewall("nftables", True)),
        (NFT_ALLOWING, Firewall("nftables", True, True)),
        (NFT_OPEN, Firewall("", False)),
        ("", Firewall("", False)),
    ],
)
def test_nft_ruleset(text: str, expected: Firewall) -> None:
    assert linux(nft=answered(text)) == expected


def test_iptables_that_rejects_the_rest() -> None:
    assert linux(iptables=answered(IPTABLES_REJECTING)) == Firewall("iptables", True)
    assert linux(iptables=answered("-P INPUT ACCEPT\n")).is_on is False
    one_port = "-P INPUT ACCEPT\n-A INPUT -p tcp -m tcp --dport 25 -j DROP\n"
    assert linux(iptables=answered(one_port)).is_on is False, "another port is closed, not ours"


def test_linux_without_any_firewall_is_fine_and_unreadable_is_unknown() -> None:
    assert judge(linux()).verdict == "ok"
    refused = ToolAnswer("failed", "Operation not permitted (you must be root)")
    finding = judge(linux(nft=refused))
    assert finding.verdict == "unknown"
    assert "administrator rights" in finding.said


@pytest.mark.parametrize(
    ("firewall", "is_on", "lets_in"),
    [
        (macos("Firewall is disabled. (State = 0)"), False, None),
        (macos("Firewall is enabled. (State = 1)", "Block all DISABLED!"), True, None),
        (macos("Firewall is enabled. (State = 1)", "Block all ENABLED!"), True, False),
        (macos("Firewall is on. (State = 2)", "Firewall has block all state set to enabled."), True,
         False),
        (macos("", ""), None, None),
    ],
)  # fmt: skip
def test_macos(firewall: Firewall, is_on: bool | None, lets_in: bool | None) -> None:
    assert (firewall.kind, firewall.is_on, firewall.lets_in) == ("macOS", is_on, lets_in)


def test_macos_stealth_explains_time_outs() -> None:
    for text in ("Stealth mode enabled", "Firewall stealth mode is on"):
        assert "times out" in macos("(State = 1)", "Block all DISABLED!", text).detail
    assert macos("(State = 1)", "Block all DISABLED!", "Stealth mode disabled").detail == ""


@pytest.mark.parametrize(
    ("text", "is_on", "lets_in"),
    [
        (NETSH.format(profile="Private", state="ON", policy="BlockInbound"), True, None),
        (NETSH.format(profile="Private", state="OFF", policy="AllowInbound"), False, None),
        (NETSH.format(profile="Public", state="ON", policy="BlockInboundAlways"), True, False),
        ("Einstellungen für Privates Profil:\nStatus     EIN\n", None, None),
    ],
)
def test_windows(text: str, is_on: bool | None, lets_in: bool | None) -> None:
    found = read_firewall("win32", {"profile": answered(text)}, PORT)
    assert (found.kind, found.is_on, found.lets_in) == ("Windows", is_on, lets_in)


def test_windows_says_that_the_network_counts_as_public() -> None:
    text = NETSH.format(profile="Public", state="ON", policy="BlockInbound")
    assert "private" in read_firewall("win32", {"profile": answered(text)}, PORT).detail
    private = text.replace("Public", "Private")
    assert "make it" not in read_firewall("win32", {"profile": answered(private)}, PORT).detail


def test_who_could_connect_counts_more_than_rules() -> None:
    closed = Firewall("ufw", True, False)
    assert judge(closed, reached=("den-pc",)).verdict == "ok"
    wrong = judge(closed, missed=("den-pc", "laptop"))
    assert wrong.verdict == "wrong"
    assert "den-pc, laptop" in wrong.said
    assert wrong.fix == "sudo open the door"
    assert exit_code([wrong]) == 3


def test_a_firewall_whose_rules_are_unknown_is_wrong_only_once_somebody_is_kept_out() -> None:
    hidden = Firewall("ufw", True)
    assert judge(hidden).verdict == "note"
    assert judge(hidden).fix == "sudo open the door"
    assert judge(hidden, missed=("den-pc",)).verdict == "wrong"
    assert judge(Firewall("ufw", True, True)).verdict == "ok"
    assert judge(Firewall("firewalld", True, False)).verdict == "wrong"


def commands(kind: str, platform: str = "linux", networks: tuple[str, ...] = ()) -> list[str]:
    text = commands_to_open(
        Firewall(kind, True), platform, port=PORT, networks=networks, python="/opt/my python"
    )
    return text.splitlines()


def test_commands_let_the_home_network_in_with_all_ports_of_a_run() -> None:
    lan = ("192.168.1.0/24", "fe80::/64")
    assert commands("ufw", networks=lan) == [
        "sudo ufw allow from 192.168.1.0/24",
        "sudo ufw allow from fe80::/10",
    ]
    assert commands("firewalld", networks=lan)[0] == (
        "sudo firewall-cmd --permanent --zone=trusted --add-source=192.168.1.0/24"
    )
    assert commands("firewalld", networks=lan)[-1] == "sudo firewall-cmd --reload"
    assert commands("iptables", networks=lan) == [
        "sudo iptables -I INPUT -s 192.168.1.0/24 -j ACCEPT",
        "sudo ip6tables -I INPUT -s fe80::/10 -j ACCEPT",
    ]
    assert "ip6 saddr fe80::/10 accept" in commands("nftables", networks=lan)[1]


@pytest.mark.parametrize("kind", ["ufw", "firewalld", "nftables", "iptables"])
def test_without_a_known_network_port_and_mdns_are_let_in(kind: str) -> None:
    text = "\n".join(commands(kind))
    assert str(PORT) in text
    assert "5353" in text


def test_macos_and_windows_let_the_program_in() -> None:
    tool = "sudo /usr/libexec/ApplicationFirewall/socketfilterfw"
    assert commands("macOS", "darwin") == [
        f"{tool} --add '/opt/my python'",
        f"{tool} --unblockapp '/opt/my python'",
    ]
    [rule] = commands("Windows", "win32")
    assert rule.startswith("netsh advfirewall firewall add rule name=exo-train dir=in action=allow")
    assert 'program="/opt/my python"' in rule


def test_macos_that_blocks_all_is_told_to_stop_that_first() -> None:
    firewall = macos("(State = 2)")
    text = commands_to_open(firewall, "darwin", port=PORT, networks=(), python="/usr/bin/python3")
    assert text.splitlines()[0].endswith("--setblockall off")
