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
from collections.abc import Callable, Iterable, Iterator
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
from exo_train.errors import ExoTrainError, InterruptedRunError, PeerError, ProtocolError
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
LOOK_S = 0.1  # between two looks whether the search is to end
END_S = 1.0  # for what was being browsed to be closed


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


Outcome = Paired | _Missed | ExoTrainError | None  # None: there are no more candidates
Otherwise = Callable[[threading.Event], Iterable[Address]]


def no_others(ended: threading.Event) -> Iterable[Address]:
    return ()


def pair(
    candidates: Iterable[Address],
    code: Code,
    *,
    otherwise: Otherwise = no_others,
    stopped: threading.Event | None = None,
    timeout_s: float = SEARCH_S,
) -> Paired:
    """Try the candidates until one proves to have the code; makes this device's key.

    The proof is given to one device only, since whoever gets it may test one guess; so the first
    device with the code's number decides. That is why `otherwise` is called only when all
    candidates have missed. Both may wait for more to turn up: they are read in a thread of its own,
    not further than is needed; `otherwise` is given an event that tells it to end.

    Raises PeerError, and InterruptedRunError soon after `stopped` was set.
    """
    search = _Search(code, stopped or threading.Event())
    return search.run(candidates, otherwise, timeout_s=timeout_s)


class _Search:
    """Many attempts at once, of which one may use the code."""

    def __init__(self, code: Code, stopped: threading.Event) -> None:
        self._code = code
        self._stopped = stopped
        self._key_pem = new_key()
        self._outcomes: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
        self._proof = threading.Lock()  # never released: the code is shown once
        self._ended = threading.Event()
        self._room = threading.Semaphore(MAX_AT_ONCE)
        self._channels: set[grpc.Channel] = set()
        self._lock = threading.Lock()  # over _channels
        self._num_tried = 0

    def run(
        self, candidates: Iterable[Address], otherwise: Otherwise, *, timeout_s: float
    ) -> Paired:
        feeder = threading.Thread(target=self._feed, args=(candidates, otherwise), daemon=True)
        feeder.start()
        deadline_s = time.monotonic() + timeout_s
        has_shown_code = is_fed = False
        missed: list[_Missed] = []
        try:
            while not is_fed or len(missed) < self._num_tried:
                try:
                    outcome = self._wait_outcome(deadline_s)
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
            raise PeerError(_nobody(self._code, missed))
        except ExoTrainError:
            self._end()
            feeder.join(END_S)  # the process ends now, mostly: with nothing half closed
            raise
        finally:
            self._end()

    def _wait_outcome(self, deadline_s: float) -> Outcome:
        """Give the next outcome; raises queue.Empty at the deadline."""
        while True:
            if self._stopped.is_set():
                raise InterruptedRunError(_interrupted(has_shown_code=self._proof.locked()))
            left_s = max(deadline_s - time.monotonic(), 0)
            try:
                return self._outcomes.get(timeout=min(left_s, LOOK_S))
            except queue.Empty:
                if left_s <= LOOK_S:
                    raise

    def _end(self) -> None:
        """Break off what is under way."""
        with self._lock:
            self._ended.set()
            channels, self._channels = self._channels, set()
        for channel in channels:
            channel.close()

    def _feed(self, candidates: Iterable[Address], otherwise: Otherwise) -> None:
        seen: set[Address] = set()
        try:
            self._try_all(candidates, seen)
            if not self._ended.is_set():
                self._try_all(otherwise(self._ended), seen)
        except ExoTrainError as error:
            self._outcomes.put(error)
        finally:
            self._outcomes.put(None)

    def _try_all(self, candidates: Iterable[Address], seen: set[Address]) -> None:
        """Try each in a thread, and wait until all have missed, or the search has ended."""
        tries: list[threading.Thread] = []
        for address in candidates:
            if self._ended.is_set() or len(seen) >= MAX_CANDIDATES:
                break
            if address in seen:
                continue
            seen.add(address)
            self._num_tried = len(seen)
            while not self._room.acquire(timeout=LOOK_S):
                if self._ended.is_set():
                    return
            # A daemon: what an address makes it wait for must not hold up the end of the process.
            tries.append(threading.Thread(target=self._try, args=(address,), daemon=True))
            tries[-1].start()
        while any(one.is_alive() for one in tries) and not self._ended.wait(LOOK_S):
            pass

    def _try(self, address: Address) -> None:
        try:
            with self._channel(address) as channel:
                missed = _greet(channel, address)
                self._outcomes.put(missed or self._pair(channel, address))
        except ExoTrainError as error:
            self._outcomes.put(error)
        except ValueError:  # gRPC's error for a channel that was closed meanwhile
            if not self._ended.is_set():
                raise
        finally:
            self._room.release()

    @contextlib.contextmanager
    def _channel(self, address: Address) -> Iterator[grpc.Channel]:
        """Open a channel that the end of the search closes, too; raises PeerError."""
        channel = open_channel(address)
        with self._lock:
            self._channels.add(channel)
            is_late = self._ended.is_set()
        try:
            if is_late:
                raise PeerError("the search has ended")
            yield channel
        finally:
            with self._lock:
                is_ours = channel in self._channels
                self._channels.discard(channel)
            if is_ours:
                channel.close()

    def _pair(self, channel: grpc.Channel, address: Address) -> Paired | _Missed:
        """Go through the exchange; raises PeerError when the code has been shown in vain."""
        second = _Missed(_Miss.OTHER_NUMBER, f"{address} came second")
        if self._proof.locked():
            return second
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
                return second
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


def _interrupted(*, has_shown_code: bool) -> str:
    told = "stopped before this device was paired; nothing was changed here"
    if has_shown_code:
        told += (
            ", but the code may be used up: make a fresh one with `exo-train invite`, and if that "
            "device lists one more member that never came, remove it with `exo-train remove`"
        )
    return told


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
