"""`exo-train doctor`: gathers facts from this device and its running agent, and runs all checks.

Owns which checks there are and what each is given. The judging is in `exo_train.cluster.checks`;
nothing here takes longer than BACKEND_TIMEOUT_S.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import exo_train
from exo_train.agent.examination import AgentFacts, read_examination
from exo_train.agent.local_client import LocalClient
from exo_train.backends.registry import available_backends
from exo_train.cluster.checks import firewall, machine, network, peers, reading, software
from exo_train.cluster.checks.finding import Finding, sorted_findings
from exo_train.cluster.checks.multicast_probe import probe_multicast
from exo_train.cluster.checks.tools import ToolAnswer, ask_tool, ask_tools
from exo_train.cluster.home import Home
from exo_train.cluster.interface_kinds import LOOPBACK, WI_FI
from exo_train.cluster.interfaces import default_route, dialable
from exo_train.cluster.roster import Roster
from exo_train.errors import ConfigError, ExoTrainError
from exo_train.peer import Address, short_id
from exo_train.transport.reach import MAX_ADDRESSES, Reach, reach_all

BACKEND_TIMEOUT_S = 20.0
# In a process of its own: a framework's abort must not take the doctor along.
_BLAS_CODE = "from exo_train.backends.fast_blas import load_fast_blas as f; print('is=' + f())"
_METAL_CODE = "import mlx.core as mx; print('is=' + str(mx.metal.is_available()))"
# The most telling first, where a device's addresses fail in different ways.
_TELLING = (Reach.REFUSED, Reach.NO_ROUTE, Reach.TIMED_OUT)
NEEDS_AGENT = (
    "no agent of this home runs, so it was not checked whether others reach this device, nor "
    "links, versions, clocks and identities of the others"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """All that the checks are given; `agent` is None when none runs."""

    platform: str
    version: str
    port: int
    python: str  # the program that a firewall must let in
    agent: AgentFacts | None
    agent_trouble: str = ""  # it runs, but does not answer
    home_trouble: str = ""  # the stored membership cannot be used
    interfaces: tuple[network.InterfaceFacts, ...]
    multicast: Mapping[str, network.MulticastFacts]
    outward_interface: str
    routes: str
    terminal: str
    dialled: Mapping[str, tuple[tuple[Address, Reach], ...]]  # remembered devices, by name
    firewall_answers: Mapping[str, ToolAnswer]
    disk: machine.DiskFacts
    memory: machine.MemoryFacts
    open_files: machine.OpenFilesFacts
    libraries: tuple[software.LibraryFacts, ...]
    python_version: str
    wanted_python: str
    backend: software.BackendFacts
    environment: Mapping[str, str]


def diagnose(home: Home) -> list[Finding]:
    """Run all checks on this device; the worst findings come first."""
    return run_checks(gather(home, dict(os.environ)))


def gather(home: Home, environment: Mapping[str, str]) -> Facts:
    """Ask the system, the network and the agent, all at once."""
    roster, home_trouble = _read_membership(home)
    with ThreadPoolExecutor(8, thread_name_prefix="doctor") as pool:
        tools = pool.submit(ask_tools, _tools())
        backend = pool.submit(_read_backend)
        dialled = pool.submit(_dial_remembered, home, roster)
        agent, agent_trouble = ask_agent(home)
        interfaces = _joined(agent.interfaces if agent else (), reading.read_interfaces())
        probed = pool.submit(_probe, interfaces)
        answers = tools.result()
        endpoint = home.agent()
        outward = default_route()
        return Facts(
            platform=sys.platform,
            version=exo_train.__version__,
            port=endpoint.control_port if endpoint else 0,
            python=os.path.realpath(sys.executable),
            agent=agent,
            agent_trouble=agent_trouble,
            home_trouble=home_trouble,
            interfaces=interfaces,
            multicast=_summed(agent.multicast if agent else {}, probed.result()),
            outward_interface=outward.interface if outward else "",
            routes=answers["routes"].text if answers["routes"].is_answer else "",
            terminal=reading.terminal_name(environment),
            dialled=dialled.result(),
            firewall_answers=answers,
            disk=reading.read_disk(home.path),
            memory=reading.read_memory(answers["memory pressure"]),
            open_files=reading.read_open_files(
                agent.open_files if agent else None, agent.open_files_limit if agent else None
            ),
            libraries=tuple(reading.read_libraries()),
            python_version=platform.python_version(),
            wanted_python=reading.read_wanted_python(),
            backend=backend.result(),
            environment=environment,
        )


def run_checks(facts: Facts) -> list[Finding]:
    """Judge the facts. Pure."""
    wall = firewall.read_firewall(facts.platform, facts.firewall_answers, facts.port)
    open_lines = firewall.commands_to_open(
        wall,
        facts.platform,
        port=facts.port,
        networks=network.home_networks(facts.interfaces),
        python=facts.python,
    )
    found = [
        *_about_agent(facts),
        *network.check_interfaces(facts.interfaces),
        *network.check_mtu(facts.interfaces),
        *_about_meeting(facts, open_lines),
        *firewall.check_firewall(
            wall,
            reached_by=_dialled_back(facts.agent, connected=True),
            missed_by=_dialled_back(facts.agent, connected=False),
            open_lines=open_lines,
        ),
        *(_about_others(facts, facts.agent, open_lines) if facts.agent else []),
        *software.check_proxy(facts.environment),
        *machine.check_disk(facts.disk),
        *machine.check_memory(facts.memory),
        *machine.check_open_files(facts.open_files),
        *software.check_python(facts.python_version, facts.wanted_python),
        *software.check_libraries(facts.libraries),
        *software.check_backend(facts.backend),
    ]
    return sorted_findings(found)


def _about_agent(facts: Facts) -> list[Finding]:
    found = []
    if facts.home_trouble:
        fix = "pair this device anew: exo-train leave, then exo-train join --code CODE"
        found.append(Finding("identity", "wrong", facts.home_trouble, fix, "configuration"))
    start = "" if facts.home_trouble else "exo-train join"  # which would be refused
    if facts.agent_trouble:
        found.append(Finding("agent", "wrong", facts.agent_trouble, start))
    elif facts.agent is None:
        found.append(Finding("agent", "unknown", NEEDS_AGENT, start))
    else:
        found.append(Finding("agent", "ok", f"this home's agent runs on port {facts.port}"))
    return found


def _about_meeting(facts: Facts, open_lines: str) -> list[Finding]:
    """Multicast, VPN, routes, permission, access point: what keeps devices from meeting."""
    met, known = _met(facts)
    failures = facts.agent.not_met if facts.agent else _remembered_failures(facts.dialled)
    is_running = facts.agent is not None
    no_routes = [
        network.NoRoute(device=f.device, host=f.host) for f in failures if f.failure == "no route"
    ]
    used = [i for i in facts.interfaces if i.is_used]
    found = network.check_multicast(facts.multicast, known=known, open_lines=open_lines)
    found += network.check_vpn(
        facts.outward_interface, facts.interfaces, is_anyone_met=bool(met), is_running=is_running
    )
    found += network.check_send_permission(
        facts.multicast, platform=facts.platform, terminal=facts.terminal
    )
    found += network.check_no_route(
        no_routes,
        facts.interfaces,
        platform=facts.platform,
        terminal=facts.terminal,
        routes=facts.routes,
    )
    found += peers.check_not_met(failures, is_running=is_running)
    found += peers.check_access_point(
        [f for f in failures if network.network_of(f.host, used)],
        num_met=len(met),
        num_heard=sum(m.heard for m in facts.multicast.values()),
        wifi_interfaces=list(dict.fromkeys(i.interface for i in used if i.kind == WI_FI)),
        is_running=is_running,
    )
    return found


def _about_others(facts: Facts, agent: AgentFacts, open_lines: str) -> list[Finding]:
    """What only the running agent knows."""
    used = list(dict.fromkeys(i.interface for i in facts.interfaces if i.is_used))
    return [
        *network.check_left_out(agent.multicast_left_out),
        *peers.check_members(agent.members),
        *peers.check_not_announced(agent.not_announced, used),
        *peers.check_reachable(agent.dial_back, open_lines),
        *peers.check_duplicates(agent.duplicates),
        *peers.check_versions(agent.members, facts.version),
        *peers.check_clock(agent.clock_skew_s),
        *peers.check_links(agent.links),
        *peers.check_strangers(agent.num_other_clusters, agent.refused_calls),
    ]


def _met(facts: Facts) -> tuple[list[str], dict[str, list[str]]]:
    """Name the devices that answer: all, and those with an address in each interface's network."""
    if facts.agent is not None:
        met = {m.name: m.hosts for m in facts.agent.members if m.is_live and not m.is_self}
    else:
        met = {
            name: hosts
            for name, tries in facts.dialled.items()
            if (hosts := tuple(a.host for a, outcome in tries if outcome is Reach.CONNECTED))
        }
    known: dict[str, list[str]] = {}
    for interface in facts.interfaces:
        near = known.setdefault(interface.interface, [])
        near += [
            name
            for name, hosts in met.items()
            if name not in near and any(network.network_of(h, [interface]) for h in hosts)
        ]
    return list(met), known


def _remembered_failures(
    dialled: Mapping[str, tuple[tuple[Address, Reach], ...]],
) -> tuple[peers.NotMet, ...]:
    """Give one failure per remembered device none of whose addresses answered."""
    failures = []
    for name, tries in dialled.items():
        if any(outcome is Reach.CONNECTED for _, outcome in tries):
            continue
        for address, outcome in sorted(tries, key=lambda t: _TELLING.index(t[1]))[:1]:
            failure: peers.DialFailure = "timed out"
            if outcome is Reach.REFUSED:
                failure = "refused"
            elif outcome is Reach.NO_ROUTE:
                failure = "no route"
            failures.append(peers.NotMet(device=name, address=str(address), failure=failure))
    return tuple(failures)


def _dialled_back(agent: AgentFacts | None, *, connected: bool) -> list[str]:
    """Name the members that could (or could not) connect to this device."""
    if agent is None:
        return []
    could = {d.member for d in agent.dial_back if d.outcome == "connected"}
    return [
        m for m in dict.fromkeys(d.member for d in agent.dial_back) if (m in could) == connected
    ]


def _read_membership(home: Home) -> tuple[Roster | None, str]:
    """Give who belongs to the cluster, if this device is in one, and why it cannot be used."""
    try:
        identity = home.identity()
        roster = home.roster(identity) if identity else None
    except ConfigError as error:
        return None, str(error)
    if identity and roster and roster.is_removed(identity.node_id):
        return roster, "this device was removed from its cluster, whose members refuse it"
    return roster, ""


def ask_agent(home: Home) -> tuple[AgentFacts | None, str]:
    """Give what this home's agent tells; else None and, when one runs, why it tells nothing."""
    endpoint = home.agent()
    if endpoint is None:
        return None, ""
    try:
        with LocalClient(endpoint) as client:
            return _with_names(read_examination(client.examine()), home), ""
    except ExoTrainError as error:
        return None, str(error)
    except (KeyError, TypeError, AttributeError) as error:
        said = f"this home's agent answers in a way this version does not know ({error!r})"
        return None, said


def _with_names(agent: AgentFacts, home: Home) -> AgentFacts:
    """Name devices that are no members now as they were called when they were met."""
    names = {short_id(node_id): name for node_id, name in home.remembered_names().items()}
    named = (replace(one, device=names.get(one.device, one.device)) for one in agent.not_met)
    return replace(agent, not_met=tuple(named))


def _dial_remembered(
    home: Home, roster: Roster | None
) -> dict[str, tuple[tuple[Address, Reach], ...]]:
    """Dial members met earlier, by name; whoever was removed since is missed by nobody."""
    members = roster.members() if roster else ()
    wanted = [
        (peer.name, address)
        for peer in home.remembered_peers()
        if peer.node_id in members
        for remembered in peer.addresses
        for address in dialable(remembered)
    ][:MAX_ADDRESSES]
    outcomes = reach_all([address for _, address in wanted])
    dialled: dict[str, tuple[tuple[Address, Reach], ...]] = {}
    for (name, address), outcome in zip(wanted, outcomes, strict=True):
        dialled[name] = (*dialled.get(name, ()), (address, outcome))
    return dialled


def _tools() -> dict[str, tuple[str, ...]]:
    return {
        **firewall.TOOLS.get(sys.platform, firewall.TOOLS["linux"]),
        "routes": reading.ROUTE_TOOLS.get(sys.platform, reading.ROUTE_TOOLS["darwin"]),
        "memory pressure": reading.MACOS_PRESSURE_TOOL,
    }


def _read_backend() -> software.BackendFacts:
    installed = available_backends()
    facts = software.BackendFacts(
        platform=sys.platform, machine=platform.machine(), installed=installed
    )
    if sys.platform == "linux" and "mlx" in installed:
        return replace(facts, blas=_ask_python(_BLAS_CODE))
    if sys.platform == "darwin":
        metal = _ask_python(_METAL_CODE) if "mlx" in installed else None
        translated = ask_tool(reading.MACOS_TRANSLATED_TOOL)
        return replace(
            facts,
            has_metal=None if metal is None else metal == "True",
            is_translated=translated.is_answer and translated.text.strip() == "1",
        )
    return facts


def _ask_python(code: str) -> str | None:
    """Run a line in a Python of its own; give what it prints after `is=`."""
    answer = ask_tool((sys.executable, "-c", code), timeout_s=BACKEND_TIMEOUT_S)
    lines = [line for line in answer.text.splitlines() if line.startswith("is=")]
    return lines[-1].removeprefix("is=") if answer.is_answer and lines else None


def _joined(
    judged: Sequence[network.InterfaceFacts], local: Sequence[network.InterfaceFacts]
) -> tuple[network.InterfaceFacts, ...]:
    """Take the agent's judgement where there is one; it says nothing of networks and MTUs."""
    by_host = {facts.host: facts for facts in local}
    return tuple(
        replace(facts, network=by_host[facts.host].network, mtu_bytes=by_host[facts.host].mtu_bytes)
        if facts.host in by_host
        else facts
        for facts in judged or local
    )


def _probe(interfaces: Sequence[network.InterfaceFacts]) -> dict[str, network.MulticastFacts]:
    hosts = {
        i.interface: i.host
        for i in interfaces
        if i.is_used and i.kind != LOOPBACK and ":" not in i.host
    }
    return probe_multicast(hosts, own=frozenset(i.host for i in interfaces))


def _summed(
    agent: Mapping[str, network.MulticastFacts], probed: Mapping[str, network.MulticastFacts]
) -> dict[str, network.MulticastFacts]:
    """Add what the agent has counted to what was heard just now."""
    summed = dict(agent)
    for name, now in probed.items():
        before = summed.get(name)
        summed[name] = (
            now
            if before is None
            else replace(
                now,
                sent=now.sent + before.sent,
                heard=now.heard + before.heard,
                exo_train_heard=now.exo_train_heard + before.exo_train_heard,
                echoed=before.echoed,
                malformed=now.malformed + before.malformed,
            )
        )
    return summed
