"""The agent: makes this device a member and keeps it one.

Owns the composition of identity, discovery, meeting, survey, services and servers, and their end.
It holds no tensor framework: workers do, so that their crash is an event and not the end.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
import time
from collections.abc import Callable
from typing import Any

from exo_train.agent.actions import AgentActions
from exo_train.agent.admissions import Admissions
from exo_train.agent.announcing import Announcer
from exo_train.agent.dialling import Dialling
from exo_train.agent.invitations import Invitations
from exo_train.agent.local_client import Invitation
from exo_train.agent.local_service import LocalService
from exo_train.agent.meeting import Meeting
from exo_train.agent.noticing import going_on
from exo_train.agent.own_device import LOOPBACK, JoinOptions, OwnDevice
from exo_train.agent.profiles import Profiles
from exo_train.agent.protocol import PROTOCOL_VERSION, Introduction, greeting
from exo_train.agent.replicas import Replicas
from exo_train.agent.run_session import WorkerSettings, lease_s
from exo_train.agent.services import ControlService, HandshakeService
from exo_train.agent.sessions import Sessions
from exo_train.agent.status import describe
from exo_train.agent.strangers import Strangers
from exo_train.agent.survey import Survey
from exo_train.agent.takeover import Takeover, parts_of
from exo_train.backends.registry import available_backends
from exo_train.cluster.discovery import Discovery
from exo_train.cluster.home import Home, RememberedPeer
from exo_train.cluster.interfaces import LocalAddress, all_dialable, without_zone
from exo_train.cluster.link_facts import to_message
from exo_train.cluster.profile_cache import ProfileCache
from exo_train.cluster.steady_clock import steady_s
from exo_train.errors import ConfigError, PeerError
from exo_train.peer import NodeId, short_id
from exo_train.transport.channel import bind, bind_each, new_server
from exo_train.transport.probe import probe_handler
from exo_train.transport.tls import Gate
from exo_train.transport.weight_server import WeightServer
from exo_train.wire.pb.control_pb2_grpc import (
    add_ControlServicer_to_server,
    add_LocalServicer_to_server,
)
from exo_train.wire.pb.handshake_pb2_grpc import add_HandshakeServicer_to_server

__all__ = ["Agent", "JoinOptions"]

CONTROL_THREADS = 48  # a Run stream keeps one for the run; the rest answer hellos at once
LOCAL_THREADS = 4
MAX_LISTENING = 32  # addresses of a named interface, one after another
UPKEEP_S = 2.0
UPKEEP_END_S = 3.0  # mDNS may be starting just then
SERVER_STOP_S = 1.0

log = logging.getLogger(__name__)


class Agent:
    """Context manager; entering makes the device a member, leaving says goodbye.

    `ended` is set from within when the membership ends; `failure` says why if that was no wish of
    this device's user.
    """

    def __init__(
        self, home: Home, options: JoinOptions, *, say: Callable[[str], None] = log.info
    ) -> None:
        self.home = home
        self.say = say
        self.ended = threading.Event()
        self.failure: PeerError | None = None
        self.device = OwnDevice(home, options)
        self._options = options
        self._started_s = steady_s()
        self._instance = secrets.token_hex(8)
        self._closing = threading.Event()
        self._is_leaving = False
        self._sessions = Sessions(self._worker_settings, name_of=self._name_of, lease_s=lease_s())
        self._takeover = Takeover(
            home,
            lambda: parts_of(self.node_id, self.device.name, self._sessions, self.meeting),
            on_ended=self._sessions.end_left,
        )
        self._survey: Survey | None = None

    def __enter__(self) -> Agent:
        with contextlib.ExitStack() as stack:  # closes what is open already when a step fails
            self._open(stack)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._stack.close()
        if self._is_leaving:
            self.home.forget_membership()

    def _open(self, stack: contextlib.ExitStack) -> None:
        """Start all parts; they end in the reverse order, the home's claim last."""
        self.home.check_free()
        stack.callback(self.home.release)
        self._belong()
        self._incarnation = self.home.next_incarnation()
        self.gate = Gate(self.admissions.admit)
        tls = self.admissions.tls
        self._weights = stack.enter_context(
            WeightServer(self.device.listen_hosts, credentials=tls.server(), gate=self.gate)
        )
        dialling = Dialling(self.admissions, instance=self._instance)
        stack.callback(dialling.close)
        self.meeting = Meeting(
            admissions=self.admissions,
            dialling=dialling,
            introduce=self.introduce,
            on_expelled=self._take_expulsion,
            lasting=self._options.peers,
            may_dial=self.device.may_dial,
            say=self.say,
        )
        token = secrets.token_hex(16)
        self._local = LocalService(
            token=token,
            actions=AgentActions(self),
            weights=self._weights,
            weights_addresses=lambda: self.device.addresses(self._weights.port),
        )
        profiles = Profiles(
            lambda: self.device.facts(self.node_id),
            cache=ProfileCache(self.home.cache),
            log_path=self.home.logs / "profiler.log",
            run_id=self._run_id,
        )
        self._control = ControlService(
            self.meeting,
            self.admissions,
            self.gate,
            self._sessions,
            profiles,
            Replicas(self.home.replicas, device=self.device.name),
        )
        hosts, port = self.device.listen_hosts, self._options.port
        self.device.port, bound = self._serve_control(stack, self._control, hosts, port)
        self._listening = set(bound)
        self._look_around(stack)
        self._open_local(stack, token)
        self._start(stack, self._control, self.survey)

    def _run_id(self) -> str:
        facts = self._sessions.facts()
        return facts.run_id if facts is not None else ""

    def _belong(self) -> None:
        """Take up this home's membership, or found a cluster."""
        self.admissions = Admissions(self.home, self.home.found(), on_removed=self._take_removal)
        self.node_id = self.admissions.identity.node_id
        if self.admissions.is_removed(self.node_id):
            raise ConfigError(
                "this device was removed from its cluster; pair it anew with `exo-train join "
                "--code CODE`, or run `exo-train leave` and start a cluster of its own"
            )

    def _look_around(self, stack: contextlib.ExitStack) -> None:
        """Make what looks at links, strangers and mDNS, and what invites."""
        self._survey = Survey(
            self.meeting,
            self.admissions.tls,
            interface=self._options.interface,
            addresses=self.device.addresses,
            is_running=lambda: self._sessions.facts() is not None,
            say=self.say,
        )
        self.strangers = Strangers(self.port, say=log.warning)
        self.announcer = Announcer(
            self._discover, say=self.say, cluster=self.admissions.identity.cluster
        )
        self.invitations = Invitations(
            lambda: self.device.listen_hosts,
            admit=lambda key: self.admissions.invite(key, self.device.addresses()),
            addresses=self.device.addresses,
            announcer=self.announcer,
            say=self.say,
        )
        stack.callback(self.invitations.close)

    def _serve_control(
        self,
        stack: contextlib.ExitStack,
        control: ControlService,
        hosts: tuple[str, ...],
        port: int,
    ) -> tuple[int, tuple[str, ...]]:
        """Answer other devices, members only, whatever they call; gives the port and where."""
        identity = self.admissions.identity
        server = new_server(
            max_workers=CONTROL_THREADS,
            handlers=[probe_handler()],
            interceptors=[self.gate],
            name="control",
        )
        add_ControlServicer_to_server(control, server)
        hello = greeting(
            node_id=identity.node_id, instance=self._instance, certificate=identity.certificate
        )
        add_HandshakeServicer_to_server(HandshakeService(hello), server)
        bound = bind_each(server, hosts, port, credentials=self.admissions.tls.server())
        server.start()
        stack.callback(lambda: server.stop(SERVER_STOP_S).wait())
        return bound

    def _open_local(self, stack: contextlib.ExitStack, token: str) -> None:
        """Answer commands of this home, and write down how they reach us."""
        server = new_server(max_workers=LOCAL_THREADS, name="local")
        stack.callback(lambda: server.stop(SERVER_STOP_S).wait())
        add_LocalServicer_to_server(self._local, server)
        local_port = bind(server, LOOPBACK)
        self.home.claim(local_port=local_port, control_port=self.port, token=token)
        server.start()

    def _start(self, stack: contextlib.ExitStack, control: ControlService, survey: Survey) -> None:
        self.meeting.start()
        for node_id in self.admissions.removed():
            self.meeting.removed(node_id)
        for peer in self.home.remembered_peers():
            if self.admissions.certificate(peer.node_id) is not None:
                for address in all_dialable(peer.addresses):
                    self.meeting.suggest(address, peer.node_id, is_lasting=True)
        stack.callback(self.meeting.close)
        stack.callback(control.close)
        self._takeover.start()
        stack.callback(self._takeover.close)
        survey.start()
        stack.callback(survey.close)
        upkeep = threading.Thread(target=self._upkeep, name="upkeep", daemon=True)
        upkeep.start()
        stack.callback(upkeep.join, UPKEEP_END_S)
        stack.callback(self._closing.set)

    @property
    def is_alone(self) -> bool:
        """Tell whether this device is its cluster's only member."""
        return self.admissions.members() == (self.node_id,)

    def invite(self) -> Invitation:
        """Make a fresh code."""
        code, expires_s, addresses = self.invitations.invite()
        return Invitation(code=code, expires_s=expires_s, addresses=addresses)

    @property
    def port(self) -> int:
        return self.device.port

    @property
    def survey(self) -> Survey:
        assert self._survey is not None
        return self._survey

    def introduce(self) -> Introduction:
        """Say who this device is and what it does now."""
        survey = self._survey
        return Introduction(
            facts=self.device.facts(self.node_id),
            incarnation=self._incarnation,
            instance=self._instance,
            addresses=self.device.addresses(),
            wifi_hosts=self.device.wifi_hosts(),
            run=self._sessions.facts(),
            ended_runs=self._sessions.ended(),
            unreachable=survey is not None and survey.is_unreachable,
            links=tuple(to_message(link) for link in survey.own_links()) if survey else (),
        )

    def status(self) -> dict[str, Any]:
        return describe(
            self.introduce(),
            self.meeting,
            roster=self.admissions.members(),
            remembered=self.home.remembered_peers(),
            links=self.survey.listing(),
            other_clusters=len(self.announcer.heard().other_clusters),
            worker_pid=self._sessions.worker_pid(),
            takeovers=self._takeover.sentences(),
            age_s=steady_s() - self._started_s,
        )

    def _name_of(self, node_id: NodeId) -> str:
        told = self.meeting.told(node_id)
        if node_id == self.node_id or told is None:
            names = {**self.home.remembered_names(), self.node_id: self.device.name}
            return names.get(node_id, short_id(node_id))
        return told.facts.name

    def _upkeep(self) -> None:
        """Follow the network, and remember whom this device met, until the agent ends."""
        is_ending = False
        while not is_ending:
            if self._options.discover:
                with going_on(log):
                    self._follow_network()
            is_ending = self._closing.wait(UPKEEP_S)
            with going_on(log):
                self.strangers.look(self._known_hosts())
                self._remember()
        self.announcer.close()

    def _follow_network(self) -> None:
        # Alone in its cluster, it waits for a code to be used and misses nobody.
        is_alone = not self.meeting.members() and not self.is_alone
        usable = self.device.usable()
        self.announcer.follow(usable, is_alone=is_alone, now_s=time.monotonic())
        for address in self.announcer.heard().copies:
            self.meeting.suggest(address, None)  # who runs with our identity there?
        with contextlib.suppress(ConfigError, PeerError):  # away, or not ready: next time
            self._follow_interface()

    def _remember(self) -> None:
        met = [
            RememberedPeer(node_id=m.facts.node_id, name=m.facts.name, addresses=m.proven)
            for m in self.meeting.live()
            if m.proven
        ]
        try:
            self.home.remember_peers(met)
        except ConfigError as error:  # a full disk
            log.warning("%s", error)

    def _follow_interface(self) -> None:
        """Listen on addresses that a named interface got since; all interfaces need no care."""
        new = tuple(h for h in self.device.listen_hosts if h not in self._listening)
        if not new or len(self._listening) >= MAX_LISTENING or self._control is None:
            return
        _, bound = self._serve_control(self._stack, self._control, new, self.port)
        self._listening |= set(bound)
        self._weights.listen_also(bound)

    def _known_hosts(self) -> set[str]:
        """Give hosts whose connections are nothing new: members', and this device's own."""
        addresses = [a for m in self.meeting.members() for a in (*m.proven, *m.addresses)]
        hosts = {*(a.host for a in addresses), *self.gate.hosts(), *self.device.hosts()}
        hosts |= {LOOPBACK, "::1"}
        return {without_zone(host) for host in hosts}

    def _discover(self, addresses: list[LocalAddress]) -> Discovery:
        return Discovery(
            self.node_id,
            cluster=self.admissions.identity.cluster,
            protocol=PROTOCOL_VERSION,
            port=self.port,
            addresses=addresses,
            on_seen=self.meeting.seen,
        )

    def _take_removal(self, node_id: NodeId) -> None:
        """Cut a removed device off, or end when it is this one."""
        if node_id == self.node_id:
            self.expel("a member removed this device from the cluster")
            return
        self.meeting.removed(node_id)
        self._sessions.end_runs_of(node_id)

    def _take_expulsion(self, by: NodeId | None, said: str) -> None:
        if not self.admissions.is_removed(self.node_id):
            self.admissions.note_own_removal(by or self.node_id)
            self.expel(f"this device was removed from the cluster ({said})")

    def leave(self) -> None:
        """End for good: when all threads are still, the keys are deleted."""
        self._is_leaving = True
        self.ended.set()

    def expel(self, why: str) -> None:
        """End the membership against the wish of this device's user."""
        self.failure = PeerError(
            f"{why}; to come back, run `exo-train invite` on a member and `exo-train join --code "
            f"CODE` here"
        )
        self.ended.set()

    def _worker_settings(self) -> WorkerSettings:
        return WorkerSettings(
            node_id=self.node_id,
            name=self.device.name,
            cluster=self.admissions.identity.cluster,
            listen_hosts=self.device.listen_hosts,
            hosts=self.device.hosts(),
            home=self.home.path,
            logs=self.home.logs,
            backends=available_backends(),
            devices=self.device.offered(),
            own_models=self._local.own_models(),
        )
