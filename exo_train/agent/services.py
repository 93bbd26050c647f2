"""What the agent answers to other devices: Handshake and Control.

Owns the mapping between gRPC and the agent's parts, and the check of every claim against the
caller's certificate. gRPC's statuses are made here and in `local_service`, nowhere else.
"""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Collection, Iterable, Iterator
from typing import NoReturn

import grpc

from exo_train.agent.admissions import Admissions
from exo_train.agent.local_client import ERROR_METADATA
from exo_train.agent.meeting import Meeting
from exo_train.agent.profiles import Profiles
from exo_train.agent.protocol import MAX_ENDPOINTS
from exo_train.agent.replicas import MAX_KEEP_S, Replicas
from exo_train.agent.run_session import RunSession
from exo_train.agent.sessions import Sessions, TooManyRunsError
from exo_train.cluster.interfaces import all_dialable, local_addresses, without_zone
from exo_train.errors import ExoTrainError, ProtocolError, TakenOverError
from exo_train.peer import Address
from exo_train.plan.block_times import ProfileRequest
from exo_train.train.messages import from_endpoints, to_failure
from exo_train.transport.reach import Reach, reach_all
from exo_train.transport.tls import Gate, caller_id, host_of
from exo_train.wire.pb import control_pb2 as pb
from exo_train.wire.pb import handshake_pb2, pairing_pb2
from exo_train.wire.pb.control_pb2_grpc import ControlServicer
from exo_train.wire.pb.handshake_pb2_grpc import HandshakeServicer

OUTCOMES = {
    Reach.CONNECTED: pb.CONNECTED,
    Reach.REFUSED: pb.REFUSED,
    Reach.TIMED_OUT: pb.TIMED_OUT,
    Reach.NO_ROUTE: pb.UNREACHABLE,
}


class HandshakeService(HandshakeServicer):
    def __init__(self, greeting: handshake_pb2.Greeting) -> None:
        self._greeting = greeting

    def Greet(
        self, request: handshake_pb2.Greeting, context: grpc.ServicerContext
    ) -> handshake_pb2.Greeting:
        return self._greeting


class ControlService(ControlServicer):
    """Thread-safe; `sessions` are the runs that others lead here."""

    def __init__(
        self,
        meeting: Meeting,
        admissions: Admissions,
        gate: Gate,
        sessions: Sessions,
        profiles: Profiles,
        replicas: Replicas,
    ) -> None:
        self._meeting = meeting
        self._admissions = admissions
        self._gate = gate
        self._profiles = profiles
        self._replicas = replicas
        self.sessions = sessions

    def Hello(self, request: pb.HelloRequest, context: grpc.ServicerContext) -> pb.HelloReply:
        self._check_claim(request.sender.node_id, context)
        try:
            return self._meeting.hello(request)
        except ExoTrainError as error:
            self._refuse_malformed(context, error)

    def Goodbye(self, request: pb.GoodbyeRequest, context: grpc.ServicerContext) -> pb.GoodbyeReply:
        self._check_claim(request.node_id, context)
        self._meeting.goodbye(request)
        return pb.GoodbyeReply()

    def SyncRoster(
        self, request: pairing_pb2.RosterState, context: grpc.ServicerContext
    ) -> pairing_pb2.RosterState:
        try:
            self._admissions.merge(request)
        except ExoTrainError as error:
            self._refuse_malformed(context, error)
        return self._admissions.message()

    def DialBack(
        self, request: pb.DialBackRequest, context: grpc.ServicerContext
    ) -> pb.DialBackReply:
        """Try only what the caller has told to be its own: this is no port scanner for hire."""
        try:
            if (count := len(request.endpoints)) > MAX_ENDPOINTS:
                raise ProtocolError(f"{count} addresses to try, the limit is {MAX_ENDPOINTS}")
            wanted = from_endpoints(request.endpoints)
        except ExoTrainError as error:
            self._refuse_malformed(context, error)
        told = self._meeting.told_addresses(caller_id(context))
        host, own_hosts = host_of(context.peer()), {a.host for a in local_addresses()}
        tried = _try(a for a in wanted if a in told and may_dial_back(a.host, host, own_hosts))
        return pb.DialBackReply(
            outcomes=[tried.get(address, pb.DIAL_OUTCOME_UNSPECIFIED) for address in wanted]
        )

    def Profile(self, request: pb.ProfileRequest, context: grpc.ServicerContext) -> pb.ProfileReply:
        try:
            wanted = ProfileRequest.from_json(request.json, place="a request for a profile")
        except ExoTrainError as error:
            self._refuse_malformed(context, error)
        try:
            times, from_cache = self._profiles.answer(
                wanted, fresh=request.fresh, is_wanted=context.is_active
            )
        except ExoTrainError as error:
            return pb.ProfileReply(failure=to_failure(error))
        return pb.ProfileReply(json=json.dumps(times.to_fields()), from_cache=from_cache)

    def Run(
        self, request_iterator: Iterator[pb.RunMessage], context: grpc.ServicerContext
    ) -> Iterator[pb.RunMessage]:
        first = next(request_iterator, None)
        if first is None:
            return
        session = self._open(first, context)
        try:
            yield from session.serve(request_iterator, context)
        finally:
            self.sessions.left(session)

    def KeepReplica(
        self, request_iterator: Iterator[pb.ReplicaPiece], context: grpc.ServicerContext
    ) -> pb.ReplicaKept:
        """Take a copy; a call without an end of its own could keep the copy's lock for ever."""
        left_s = context.time_remaining()
        try:
            if left_s is None or left_s > MAX_KEEP_S:
                raise ProtocolError(f"no deadline within {MAX_KEEP_S:.0f} s is set")
            self._replicas.keep(request_iterator, caller_id(context))
        except ProtocolError as error:
            self._refuse_malformed(context, error)
        except ExoTrainError as error:
            return pb.ReplicaKept(failure=to_failure(error))
        return pb.ReplicaKept()

    def close(self) -> None:
        """End what others have begun here: ranks of runs, and a layer's timing."""
        self.sessions.close()
        self._profiles.close()

    def _open(self, first: pb.RunMessage, context: grpc.ServicerContext) -> RunSession:
        try:
            return self.sessions.open(first, caller_id(context))
        except TooManyRunsError as error:
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))
        except TakenOverError as error:
            context.set_trailing_metadata(((ERROR_METADATA, TakenOverError.__name__),))
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        except ExoTrainError as error:
            code = grpc.StatusCode.FAILED_PRECONDITION
            self._gate.refuse(context, code, "a run that does not fit", str(error))

    def _check_claim(self, node_id: str, context: grpc.ServicerContext) -> None:
        """Refuse a member that speaks in another's name."""
        caller = caller_id(context)
        if node_id != caller:
            sentence = f"device {caller} claims to be {node_id[:32]!r}: the certificate decides"
            self._gate.refuse(context, grpc.StatusCode.UNAUTHENTICATED, "another's name", sentence)

    def _refuse_malformed(self, context: grpc.ServicerContext, error: ExoTrainError) -> NoReturn:
        self._gate.refuse(context, grpc.StatusCode.INVALID_ARGUMENT, "malformed", str(error))


def may_dial_back(host: str, caller_host: str, own_hosts: Collection[str]) -> bool:
    """Tell whether to connect for a caller: to numeric hosts, and to this one only from itself.

    A member elsewhere must not learn what listens on this device's loopback or behind its firewall.
    """
    try:
        target = _numeric(host)
        if not _is_here(target, own_hosts):
            return not target.is_multicast
        return _is_here(_numeric(caller_host), own_hosts)
    except ValueError:  # a name: those are never dialled
        return False


def _is_here(
    address: ipaddress.IPv4Address | ipaddress.IPv6Address, own_hosts: Collection[str]
) -> bool:
    own = {without_zone(host) for host in own_hosts}
    return address.is_loopback or address.is_unspecified or str(address) in own


def _numeric(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    address = ipaddress.ip_address(without_zone(host))
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address


def _try(addresses: Iterable[Address]) -> dict[Address, pb.DialOutcome]:
    """Connect to each; a link-local one is reached when it is on any of our networks."""
    ways = [(address, way) for address in addresses for way in all_dialable([address])]
    tried: dict[Address, pb.DialOutcome] = {}
    for (address, _), outcome in zip(ways, reach_all([way for _, way in ways]), strict=False):
        if tried.get(address) != pb.CONNECTED:
            tried[address] = OUTCOMES[outcome]
    return tried
