"""What is known of the way between two devices, as frozen values and as words.

Owns the checks of what other devices say of links. Pure. Must not choose among links: the table
in `links` does.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from exo_train.errors import ProtocolError
from exo_train.identity import is_node_id
from exo_train.peer import NodeId, has_control_characters, short_id
from exo_train.wire.pb import control_pb2 as pb

MAX_LINKS = 64  # that one device tells of
MAX_TEXT_CHARS = 200
MAX_TROUBLE_CHARS = 400
MAX_RTT_S = 60.0
MAX_BYTES_PER_S = 1e12


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkFacts:
    """As in control.proto, from the measuring end; IPv6 link-local hosts without zone."""

    peer_id: NodeId
    local_host: str
    remote_host: str
    interface: str
    kind: str
    rtt_s: float
    jitter_s: float
    to_peer_bytes_per_s: float
    from_peer_bytes_per_s: float
    trouble: str = ""

    @property
    def bytes_per_s(self) -> float:
        """The slower direction: a ring sends both ways at once."""
        return min(self.to_peer_bytes_per_s, self.from_peer_bytes_per_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class PairLink:
    """The pinned link of a pair, with the device that measured it."""

    measurer_id: NodeId
    link: LinkFacts

    def line(self, names: Mapping[NodeId, str]) -> str:
        """Say it in one line for a person, with its trouble if it has one."""
        link = self.link
        ends = " ⇄ ".join(
            names.get(node_id, short_id(node_id)) for node_id in (self.measurer_id, link.peer_id)
        )
        text = f"{ends}  {link.kind}  {speed_text(link.bytes_per_s)}  {link.rtt_s * 1e3:.1f} ms"
        return f"{text}  ({link.trouble})" if link.trouble else text


def from_message(message: pb.LinkFacts) -> LinkFacts:
    """Check and take in what a device says of a link; raises ProtocolError."""
    link = LinkFacts(
        peer_id=NodeId(message.peer_id),
        local_host=message.local_host,
        remote_host=message.remote_host,
        interface=message.interface,
        kind=message.kind,
        rtt_s=message.rtt_s,
        jitter_s=message.jitter_s,
        to_peer_bytes_per_s=message.to_peer_bytes_per_s,
        from_peer_bytes_per_s=message.from_peer_bytes_per_s,
        trouble=message.trouble,
    )
    speeds = (link.to_peer_bytes_per_s, link.from_peer_bytes_per_s)
    makes_sense = (
        is_node_id(link.peer_id)
        and _is_plain_host(link.local_host)
        and _is_plain_host(link.remote_host)
        and _is_text(link.interface, MAX_TEXT_CHARS)
        and _is_text(link.kind, MAX_TEXT_CHARS)
        and _is_text(link.trouble, MAX_TROUBLE_CHARS)
        and 0 < link.rtt_s <= MAX_RTT_S
        and 0 <= link.jitter_s <= MAX_RTT_S
        # Nothing passes: that is a trouble, and must be called one.
        and all(0 < s <= MAX_BYTES_PER_S or (s == 0 and link.trouble) for s in speeds)
    )
    if not makes_sense:  # also for a value that is not a number
        raise ProtocolError("a device sent facts about a link that make no sense")
    return link


def from_messages(messages: Sequence[pb.LinkFacts]) -> tuple[LinkFacts, ...]:
    """Take in all that a device says of its links; raises ProtocolError."""
    if len(messages) > MAX_LINKS:
        raise ProtocolError(f"a device sent {len(messages)} links (limit {MAX_LINKS})")
    return tuple(from_message(message) for message in messages)


def to_message(link: LinkFacts) -> pb.LinkFacts:
    return pb.LinkFacts(
        peer_id=link.peer_id,
        local_host=link.local_host,
        remote_host=link.remote_host,
        interface=link.interface,
        kind=link.kind,
        rtt_s=link.rtt_s,
        jitter_s=link.jitter_s,
        to_peer_bytes_per_s=link.to_peer_bytes_per_s,
        from_peer_bytes_per_s=link.from_peer_bytes_per_s,
        trouble=link.trouble,
    )


def speed_text(bytes_per_s: float) -> str:
    """Write a speed in decimal units with two or three digits, like "1.9 GB/s"."""
    value, unit = bytes_per_s, "B/s"
    for larger in ("kB/s", "MB/s", "GB/s"):
        if value < 999.5:
            break
        value, unit = value / 1e3, larger
    return f"{value:.1f} {unit}" if 0 < value < 9.95 else f"{value:.0f} {unit}"


def _is_plain_host(host: str) -> bool:
    try:
        return "%" not in host and bool(ipaddress.ip_address(host))
    except ValueError:
        return False


def _is_text(text: str, max_chars: int) -> bool:
    return len(text) <= max_chars and not has_control_characters(text)
