"""The side that joins with a code: finds the device that printed it, and becomes a member.

Owns the calls to pairing ports and the sentences for what can go wrong. Must not look for
candidates itself, nor store anything. What a pairing port says in plain text is never shown: it
may be anybody's.
"""

from __future__ import annotations

import contextlib
import enum
import queue
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import grpc
from google.protobuf.message import DecodeError

import exo_train
from exo_train.agent.protocol import MAX_ENDPOINTS, PROTOCOL_VERSION, greeting
from exo_train.cluster.pairing import (
    REFUSED_ADMISSION,
    REFUSED_CLOSED,
    REFUSED_CODE,
    REFUSED_NUMBER,
    Code,
    JoinerExchange,
    WrongCodeError,
)
from exo_train.cluster.roster import Roster, RosterState
from exo_train.errors import ExoTrainError, PeerError, ProtocolError
from exo_train.identity import Identity, check_identity, new_key, node_id_of, public_key_of
from exo_train.peer import Address, has_control_characters
from exo_train.train.messages import from_endpoints
from exo_train.transport.channel import open_channel
from exo_train.transport.reach import Reach, reach
from exo_train.wire.pb import handshake_pb2
from exo_train.wire.pb import pairing_pb2 as pb
from exo_train.wire.pb.handshake_pb2_grpc import HandshakeStub
from exo_train.wire.pb.pairing_pb2_grpc import PairingStub

MAX_CANDIDATES = 64
MAX_AT_ONCE = 8
MAX_TOLD = 4  # candidates that an error names
MAX_BUILD_CHARS = 40
GREET_TIMEOUT_S = 3.0
PAIR_TIMEOUT_S = 10.0
SEARCH_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Paired:
    """What a device knows when it has become a member."""

    identity: Identity
    roster: RosterState
    endpoints: tuple[Address, ...]  # where the inviter's agent listens
    inviter: Address  # the pairing port that did it


class _Miss(enum.IntEnum):
    """What a candidate turned out to be; the most telling first."""

    CLOSED = 0
    VERSION = 1
    NOT_PAIRING = 2
    OTHER_NUMBER = 3
    SILENT = 4


@dataclass(frozen=True, slots=True)
class _Missed:
    kind: _Miss
    sentence: str


def pair(candidates: Iterable[Address], code: Code, *, timeout_s: float = SEARCH_S) -> Paired:
    """Try the candidates until one proves to have the code; makes this device's key.

    `candidates` may wait for more to turn up: it is read in a thread of its own, not further than
    is needed. The proof is given to one device only, since whoever gets it may test one guess; so
    the first device with the code's number decides. Raises PeerError.
    """
    return _Search(code).run(candidates, timeout_s=timeout_s)


class _Search:
    """Many attempts at once, of which one may use the code."""

    def __init__(self, code: Code) -> None:
        self._code = code
        self._key_pem = new_key()
        self._outcomes: queue.SimpleQueue[Paired | _Missed | ExoTrainError | None] = (
            queue.SimpleQueue()
        )
        self._proof = threading.Lock()  # never released: the code is shown once
        self._ended = threading.Event()
        self._num_tried = 0

    def run(self, candidates: Iterable[Address], *, timeout_s: float) -> Paired:
        feeder = threading.Thread(target=self._feed, args=(candidates,), daemon=True)
        feeder.start()
        deadline_s = time.monotonic() + timeout_s
        has_shown_code = is_fed = False
        missed: list[_Missed] = []
        try:
            while not is_fed or len(missed) < self._num_tried:
                try:
                    outcome = self._outcomes.get(timeout=max(deadline_s - time.monotonic(), 0))
                except queue.Empty:
                    if has_shown_code or not self._proof.locked():
                        break
                    has_shown_code = True  # its outcome is worth waiting for, and limited
                    deadline_s += PAIR_TIMEOUT_S
                    continue
                match outcome:
                    case Paired():
                        return outcome
                    case _Missed():
                        missed.append(outcome)
                    case None:
                        is_fed = True
                    case error:
                        raise error
        finally:
            self._ended.set()
        raise PeerError(_nobody(self._code, missed))

    def _feed(self, candidates: Iterable[Address]) -> None:
        seen: set[Address] = set()
        pool = ThreadPoolExecutor(MAX_AT_ONCE, thread_name_prefix="pair")
        try:
            for address in candidates:
                if self._ended.is_set() or len(seen) >= MAX_CANDIDATES:
                    break
                if address not in seen:
                    seen.add(address)
                    self._num_tried = len(seen)
                    pool.submit(self._try, address)
        except ExoTrainError as error:
            self._outcomes.put(error)
        finally:
            self._outcomes.put(None)
            pool.shutdown(wait=False)

    def _try(self, address: Address) -> None:
        if self._ended.is_set():
            return
        try:
            with contextlib.closing(open_channel(address)) as channel:
                missed = _greet(channel, address)
                self._outcomes.put(missed or self._pair(channel, address))
        except ExoTrainError as error:
            self._outcomes.put(error)

    def _pair(self, channel: grpc.Channel, address: Address) -> Paired | _Missed:
        """Go through the exchange; raises PeerError when the code has been shown in vain."""
        with contextlib.closing(_Conversation(channel)) as conversation:
            exchange = JoinerExchange(self._code, protocol=PROTOCOL_VERSION)
            first = pb.JoinerMessage(spake=exchange.first, number=self._code.number)
            reply = conversation.say(first)
            if reply is None or reply.WhichOneof("body") != "spake":
                return _not_the_one(address, reply)
            request = pb.JoinRequest(public_key=public_key_of(self._key_pem))
            try:
                proof = exchange.prove(reply.spake, request.SerializeToString())
            except ProtocolError:
                return _not_the_one(address, None)
            if not self._proof.acquire(blocking=False):
                return _Missed(_Miss.OTHER_NUMBER, f"{address} came second")
            reply = conversation.say(pb.JoinerMessage(sealed=proof))
            if reply is None or reply.WhichOneof("body") != "sealed":
                raise PeerError(_refused(address, reply))
            try:
                admission = pb.Admission.FromString(exchange.open(reply.sealed))
            except (WrongCodeError, DecodeError):
                raise PeerError(
                    f"what {address} answered was not sealed with the code: somebody on this "
                    f"network may have changed it or pretend to be that device; make a fresh code "
                    f"with `exo-train invite` and give the address that it prints with --peer"
                ) from None
            return _read_admission(admission, self._key_pem, address)


class _Conversation:
    """One stream, a message at a time."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._said: queue.SimpleQueue[pb.JoinerMessage | None] = queue.SimpleQueue()
        self._replies = PairingStub(channel).Pair(self._messages(), timeout=PAIR_TIMEOUT_S)

    def say(self, message: pb.JoinerMessage) -> pb.InviterMessage | None:
        """Give the reply; None when the stream breaks, ends or takes too long."""
        self._said.put(message)
        try:
            reply: pb.InviterMessage | None = next(self._replies, None)
        except grpc.RpcError:
            return None
        return reply

    def close(self) -> None:
        self._said.put(None)
        self._replies.cancel()

    def _messages(self) -> Iterator[pb.JoinerMessage]:
        while (message := self._said.get()) is not None:
            yield message


def _greet(channel: grpc.Channel, address: Address) -> _Missed | None:
    """Ask for the version; None when it is ours."""
    try:
        theirs = HandshakeStub(channel).Greet(greeting(), timeout=GREET_TIMEOUT_S)
    except grpc.RpcError:
        if reach(address) is Reach.CONNECTED:
            return _Missed(
                _Miss.NOT_PAIRING,
                f"{address} answers, but it is no pairing port (perhaps the port of an agent that "
                f"runs there: a code has a port of its own)",
            )
        return _Missed(_Miss.SILENT, f"nothing answers at {address}")
    if theirs.protocol == PROTOCOL_VERSION:
        return None
    return _Missed(_Miss.VERSION, _versions(address, theirs))


def _versions(address: Address, theirs: handshake_pb2.Greeting) -> str:
    build = theirs.build[:MAX_BUILD_CHARS]
    if has_control_characters(build):
        build = "unknown"
    return (
        f"{address} runs exo-train {build} (protocol {theirs.protocol}), this device runs "
        f"exo-train {exo_train.__version__} (protocol {PROTOCOL_VERSION}): install the same "
        f"version on both"
    )


def _not_the_one(address: Address, reply: pb.InviterMessage | None) -> _Missed:
    """Say why an inviter did not even begin."""
    refusal = reply.refusal if reply is not None else ""
    if refusal == REFUSED_NUMBER:
        return _Missed(_Miss.OTHER_NUMBER, f"{address} invites with another number")
    if refusal == REFUSED_CLOSED:
        return _Missed(
            _Miss.CLOSED, f"the code at {address} has expired, was used, or was tried too often"
        )
    return _Missed(_Miss.NOT_PAIRING, f"{address} broke off the pairing")


def _refused(address: Address, reply: pb.InviterMessage | None) -> str:
    """Say why a shown code led to nothing."""
    refusal = reply.refusal if reply is not None else ""
    if refusal == REFUSED_CODE:
        return (
            f"wrong code: {address} invites with this number, but with other words; check the "
            f"code, and after three wrong tries make a fresh one with `exo-train invite`"
        )
    if refusal == REFUSED_CLOSED:
        return (
            f"the code at {address} has expired, was used, or was tried too often; make a fresh "
            f"one with `exo-train invite`"
        )
    if refusal == REFUSED_ADMISSION:
        return f"the code is right, but {address} could not let this device in; its log says why"
    return (
        f"{address} broke off after the code was shown; make a fresh one with `exo-train invite` "
        f"and try again"
    )


def _nobody(code: Code, missed: list[_Missed]) -> str:
    """Put the most telling candidates into one sentence, and say what to do."""
    told = [m.sentence for m in sorted(missed, key=lambda m: m.kind)[:MAX_TOLD]]
    found = "; ".join(told) if told else "no device that invites was heard on this network"
    if len(missed) > len(told):
        found += f"; and {len(missed) - len(told)} more"
    return (
        f"no device answers to a code with the number {code.number}: {found}. Make a fresh code "
        f"with `exo-train invite`, and if it is not heard, give the address that is printed with "
        f"it: `exo-train join --code CODE --peer HOST:PORT`"
    )


def _read_admission(admission: pb.Admission, key_pem: bytes, inviter: Address) -> Paired:
    """Check what the inviter gave; raises ProtocolError."""
    identity = Identity(
        node_id=node_id_of(public_key_of(key_pem)),
        cluster=admission.cluster,
        key_pem=key_pem,
        certificate=admission.certificate,
        authority_certificate=admission.authority_certificate,
        authority_key=admission.authority_key,
    )
    check_identity(identity)
    roster = Roster.of(identity, RosterState.from_message(admission.roster))
    if roster.certificate(identity.node_id) is None:
        raise ProtocolError(
            f"{inviter} let this device in without knowing who had invited it; make a fresh code "
            f"on another device of the cluster"
        )
    endpoints = from_endpoints(admission.endpoints[:MAX_ENDPOINTS])
    return Paired(identity=identity, roster=roster.state(), endpoints=endpoints, inviter=inviter)
