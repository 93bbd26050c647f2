"""What a measured plan needs to know of the members that are here: their speed and their links.

Owns the asking, all members at once, with its bounds and its sentences. Must not plan.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import grpc

from exo_train.agent.dialling import refusal_of
from exo_train.agent.planning import Candidate
from exo_train.agent.protocol import HELLO_TIMEOUT_S
from exo_train.cluster.interface_kinds import WI_FI
from exo_train.cluster.interfaces import all_dialable, without_zone
from exo_train.config import TrainConfig
from exo_train.errors import ExoTrainError, InterruptedRunError, PeerError, PeerLostError
from exo_train.lora_config import LoraConfig
from exo_train.peer import Address, NodeId, has_control_characters
from exo_train.plan.block_times import MAX_ANSWER_CHARS, BlockTimes, ProfileRequest
from exo_train.plan.fields import parse_json
from exo_train.plan.plan import Key
from exo_train.plan.profiles import DeviceProfile, LinkProfile, Links, StageCosts
from exo_train.train.messages import from_failure
from exo_train.transport.channel import open_channel
from exo_train.transport.reach import Reach, reach
from exo_train.transport.tls import PeerTls
from exo_train.wire.pb import control_pb2 as pb
from exo_train.wire.pb.control_pb2_grpc import ControlStub

BUDGET_S = 3.0
# A member measures for its budget and loads a framework before; several GPUs take turns.
ASK_TIMEOUT_S = 180.0
CONNECT_TIMEOUT_S = 2 * HELLO_TIMEOUT_S  # an address
MAX_AT_ONCE = 64  # members: a cluster has no more
LOOK_S = 0.05
SAY_AFTER_S = 0.5  # what was measured before is there sooner, and needs no words
MAX_SENTENCE_CHARS = 1000
# A survey measures a way within 3 s of meeting and takes 2 s for it; a device has up to 8 ways.
LINKS_TIMEOUT_S = 10.0
LINKS_LOOK_S = 0.3
MAX_PAIRS_NAMED = 4
# Two ranks on one computer send through its own stack, under TLS as everywhere: `bench/wire.py`
# gave 0.14 to 0.33 GB/s on two cores that did other work. No survey measures it.
SAME_COMPUTER = LinkProfile(latency_s=0.0005, bytes_per_s=0.3e9)

Answer = BlockTimes | ExoTrainError


def request_for(
    candidate: Candidate,
    config_json: str,
    config: TrainConfig,
    *,
    lora: LoraConfig,
    compute_dtype: str,
    microbatch_size: int,
    sequence: int,
    with_ends: bool = True,
    budget_s: float = BUDGET_S,
) -> ProfileRequest:
    """Ask for a layer as this run would compute it on `candidate`.

    `config.base_weights` is what the candidate is to do; undecided ("auto"), it is packed.
    `lora` is of every layer.
    """
    return ProfileRequest(
        config_json=config_json,
        backend=candidate.backend,
        device=candidate.device,
        compute_dtype=compute_dtype,
        lora=lora,
        microbatch_size=microbatch_size,
        sequence=sequence,
        checkpoint_activations=config.checkpoint_activations,
        with_ends=with_ends,
        budget_s=budget_s,
        quantize=config.quantize,
        base_weights="dense" if config.base_weights == "dense" else "packed",
    )


def device_profile(
    candidate: Candidate, times: BlockTimes, costs: StageCosts | None
) -> DeviceProfile:
    """Put what a candidate has said into the planner's form; ends not timed cost nothing."""
    ends = times.ends
    return DeviceProfile(
        name=candidate.name,
        usable_bytes=candidate.usable_memory_bytes,
        layer_s=times.layer_s,
        embedding_s=ends.embedding_s if ends else 0.0,
        head_s=ends.head_s if ends else 0.0,
        head_layer_s=ends.head_layer_s if ends else None,
        overhead_s=times.overhead_s,
        layer_update_s=times.layer_update_s,
        costs=costs,
    )


def ask_profiles(
    candidates: Sequence[Candidate],
    requests: Mapping[Key, ProfileRequest],
    tls_of: Callable[[NodeId], PeerTls],
    *,
    fresh: bool = False,
    on_note: Callable[[str], None] = lambda note: None,
    wants_stop: Callable[[], bool] = lambda: False,
    best_host: Callable[[NodeId], str] = lambda node_id: "",
    timeout_s: float = ASK_TIMEOUT_S,
) -> dict[Key, Answer]:
    """Have all members time a layer at the same time; gives the times, or why there are none.

    At the same time because a user waits, and because in a run they compute at the same time too:
    what they share slows both. The processors of one member take turns. `best_host` gives the host
    of the best measured link, which is dialled first. Each error names its device. Raises
    InterruptedRunError soon after `wants_stop`.
    """
    members: dict[NodeId, list[Candidate]] = {}
    for candidate in candidates:
        members.setdefault(candidate.node_id, []).append(candidate)
    asking = _Asking(requests=requests, fresh=fresh, timeout_s=timeout_s)

    def ask(group: Sequence[Candidate]) -> dict[Key, Answer]:
        first = group[0]
        host = best_host(first.node_id)
        addresses = sorted(first.addresses, key=lambda a: without_zone(a.host) != host)
        return _ask_member(group, asking, addresses, tls_of)

    answers: dict[Key, Answer] = {}
    with ThreadPoolExecutor(max(1, min(len(members), MAX_AT_ONCE))) as pool:
        names = {pool.submit(ask, group): _names(group) for group in members.values()}
        try:
            _wait_all(names, on_note, wants_stop)
        finally:
            asking.stop.set()  # the pool's end waits for its threads
        for asked in names:
            answers |= asked.result()
    return answers


def _wait_all(
    names: Mapping[Future[dict[Key, Answer]], str],
    on_note: Callable[[str], None],
    wants_stop: Callable[[], bool],
) -> None:
    """Wait until all have answered, and say whom one waits for when it takes long."""
    pending, say_at_s = set(names), time.monotonic() + SAY_AFTER_S
    has_said = False
    while pending:
        if wants_stop():
            raise InterruptedRunError("stopped while the devices were timed; nothing was begun")
        _, pending = wait(pending, timeout=LOOK_S)
        if pending and not has_said and time.monotonic() >= say_at_s:
            has_said = True
            on_note(f"measuring {', '.join(names[one] for one in names if one in pending)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asking:
    """One question to all; `stop` ends it before its deadline."""

    requests: Mapping[Key, ProfileRequest]
    fresh: bool
    timeout_s: float
    started_s: float = field(default_factory=time.monotonic)
    stop: threading.Event = field(default_factory=threading.Event)

    def left_s(self) -> float:
        return max(0.0, self.started_s + self.timeout_s - time.monotonic())

    def is_over(self) -> bool:
        return self.stop.is_set() or not self.left_s()

    def overdue(self, name: str) -> PeerLostError:
        return PeerLostError(
            f"{name} has not timed a layer of this model within {self.timeout_s:g} s; leave it out "
            f"with --devices, or look there with `exo-train doctor`"
        )


def _ask_member(
    group: Sequence[Candidate],
    asking: _Asking,
    addresses: Sequence[Address],
    tls_of: Callable[[NodeId], PeerTls],
) -> dict[Key, Answer]:
    """Ask one member for each of its processors, one after the other.

    It knows at once what it has just measured on another GPU of the same chip.
    """
    answers: dict[Key, Answer] = {}
    measured: list[BlockTimes] = []
    try:
        address, channel = _connect(_names(group), addresses, tls_of(group[0].node_id), asking)
    except PeerError as error:
        return {candidate.key: error for candidate in group}
    with contextlib.closing(channel):  # which hangs up: the member ends what nobody waits for
        for candidate in group:
            try:
                times = _ask_once(candidate, asking, address, channel, measured)
                measured.append(times)
                answers[candidate.key] = times
            except ExoTrainError as error:
                answers[candidate.key] = error
    return answers


def _connect(
    name: str, addresses: Sequence[Address], tls: PeerTls, asking: _Asking
) -> tuple[Address, grpc.Channel]:
    """Give a channel to the first address where the member proves to be itself."""
    for address in all_dialable(addresses):
        if reach(address) is not Reach.CONNECTED:  # a channel would go on trying
            continue
        channel = open_channel(address, credentials=tls.credentials, tls_name=tls.name)
        ready = grpc.channel_ready_future(channel)
        until_s = time.monotonic() + CONNECT_TIMEOUT_S
        while time.monotonic() < until_s and not asking.is_over():
            with contextlib.suppress(grpc.FutureTimeoutError):
                ready.result(timeout=LOOK_S)
                return address, channel
        ready.cancel()
        channel.close()
    tried = ", ".join(str(address) for address in addresses) or "no address known"
    raise PeerLostError(
        f"{name} cannot be reached ({tried}); is `exo-train join` running there, and does its "
        f"firewall let the port in?"
    )


def _ask_once(
    candidate: Candidate,
    asking: _Asking,
    address: Address,
    channel: grpc.Channel,
    measured: Sequence[BlockTimes],
) -> BlockTimes:
    """Where fresh times are wanted, those that were `measured` just now are fresh."""
    if asking.fresh and measured:
        times, was_known = _ask(candidate, asking, address, channel, fresh=False)
        if not was_known or times in measured:
            return times
    return _ask(candidate, asking, address, channel, fresh=asking.fresh)[0]


def _ask(
    candidate: Candidate, asking: _Asking, address: Address, channel: grpc.Channel, *, fresh: bool
) -> tuple[BlockTimes, bool]:
    """Give the times, and whether they were known; raises what the member says, or PeerError."""
    name = candidate.name
    request = pb.ProfileRequest(json=asking.requests[candidate.key].to_json(), fresh=fresh)
    call = ControlStub(channel).Profile.future(request, timeout=max(LOOK_S, asking.left_s()))
    try:
        while not asking.is_over():
            with contextlib.suppress(grpc.FutureTimeoutError):
                reply = call.result(timeout=LOOK_S)
                return _read(reply, name), reply.from_cache
        raise asking.overdue(name)
    except grpc.RpcError as error:
        raise _lost(error, name, address, asking) from None


def _lost(error: grpc.RpcError, name: str, address: Address, asking: _Asking) -> PeerError:
    assert isinstance(error, grpc.Call)
    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        return asking.overdue(name)
    if error.code() is grpc.StatusCode.UNAVAILABLE:
        return PeerLostError(
            f"{name}: the connection to it broke while it timed a layer (switched off, asleep, or "
            f"its agent was ended?)"
        )
    return PeerError(f"{name}: {refusal_of(error, address)}")


def _read(reply: pb.ProfileReply, name: str) -> BlockTimes:
    """Check a reply; raises the failure in it, with the device named."""
    if reply.HasField("failure"):
        message = reply.failure.message
        if not message or len(message) > MAX_SENTENCE_CHARS or has_control_characters(message):
            # A member says there what it likes, and people read it.
            reply.failure.message = "it gives no reason that can be shown"
        raise from_failure(reply.failure, where=name)
    place = f"what {name} says of its speed"
    fields = parse_json(reply.json, place=place, max_chars=MAX_ANSWER_CHARS)
    return BlockTimes.from_fields(fields, place=place)


def links_of(
    status: Callable[[], dict[str, Any]],
    candidates: Sequence[Candidate],
    *,
    on_note: Callable[[str], None] = lambda note: None,
    wants_stop: Callable[[], bool] = lambda: False,
    timeout_s: float = LINKS_TIMEOUT_S,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Links:
    """Give what is measured between candidates, by their indices; waits for what is not yet.

    A pair that stays without, or on whose link nothing passes, is left out and named in a note.
    """
    ids = [candidate.node_id for candidate in candidates]
    names = {
        c.node_id: _names([o for o in candidates if o.node_id == c.node_id]) for c in candidates
    }
    pairs = [frozenset(pair) for pair in combinations(dict.fromkeys(ids), 2)]
    until_s, say_at_s, has_said = clock() + timeout_s, clock() + SAY_AFTER_S, False
    told: list[dict[str, Any]] = []
    wifi_hosts: set[tuple[NodeId, str]] = set()
    while pairs:
        answer = status()
        told, wifi_hosts = answer["links"], _wifi_hosts(answer["members"])
        measured = {_pair_of(link) for link in told}
        missing = [pair for pair in pairs if pair not in measured]
        if not missing or clock() >= until_s:
            break
        if wants_stop():
            raise InterruptedRunError("stopped while links were measured; nothing was begun")
        if not has_said and clock() >= say_at_s:
            has_said = True
            on_note(f"waiting for the links' speed: {_pairs_text(missing, names)}")
        sleep(LINKS_LOOK_S)
    found = links_between(told, ids, wifi_hosts)
    known = {frozenset((ids[i], ids[j])) for i, j in found}
    if lacking := [pair for pair in pairs if pair not in known]:
        on_note(
            f"the link's speed is not known for {_pairs_text(lacking, names)}: no plan puts them "
            f"side by side; `exo-train doctor` says why"
        )
    return found


def links_between(
    links: Sequence[Mapping[str, Any]],
    ids: Sequence[NodeId],
    wifi_hosts: Collection[tuple[NodeId, str]] = (),
) -> Links:
    """Read `links` of `status --json` for each ordered pair of `ids`; same ids: one computer.

    All Wi-Fi shares one medium, the air. A link has the kind of its measuring end only;
    `wifi_hosts` are what members say of their own ends.
    """
    by_ends: dict[tuple[NodeId, NodeId], LinkProfile] = {}
    for link in links:
        (a, b), (there, back) = (end["id"] for end in link["ends"]), link["bytes_per_s"]
        if min(there, back) <= 0:  # a ring sends both ways
            continue
        hosts = {(end["id"], without_zone(end["host"])) for end in link["ends"]}
        is_wifi = link["kind"] == WI_FI or not hosts.isdisjoint(wifi_hosts)
        # A step waits for each of its messages, so what counts is a late one: half the median
        # round trip, and all of what the 95th percentile adds, since who delays is not known.
        latency_s = link["rtt_s"] / 2 + link["jitter_s"]
        for ends, bytes_per_s in (((a, b), there), ((b, a), back)):
            by_ends[ends] = LinkProfile(
                latency_s=latency_s, bytes_per_s=bytes_per_s, medium=WI_FI if is_wifi else ""
            )
    found: Links = {}
    for i, a in enumerate(ids):
        for j, b in enumerate(ids):
            profile = SAME_COMPUTER if a == b else by_ends.get((a, b))
            if i != j and profile is not None:
                found[i, j] = profile
    return found


def _wifi_hosts(members: Sequence[Mapping[str, Any]]) -> set[tuple[NodeId, str]]:
    return {(m["id"], without_zone(host)) for m in members for host in m["wifi_hosts"]}


def _pair_of(link: Mapping[str, Any]) -> frozenset[NodeId]:
    return frozenset(end["id"] for end in link["ends"])


def _names(group: Sequence[Candidate]) -> str:
    return " and ".join(candidate.name for candidate in group)


def _pairs_text(pairs: Sequence[frozenset[NodeId]], names: Mapping[NodeId, str]) -> str:
    """Name pairs, the first few of many."""
    texts = [" – ".join(sorted(names[node_id] for node_id in pair)) for pair in pairs]
    more = len(texts) - MAX_PAIRS_NAMED
    shown = ", ".join(texts[:MAX_PAIRS_NAMED])
    return f"{shown} and {more} more" if more > 0 else shown
