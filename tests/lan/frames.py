"""What an Ethernet frame is, as far as the hub's rules ask. Pure. For tests only."""

from __future__ import annotations

import struct

ETHERNET_BYTES = 14
IPV4, IPV6 = 0x0800, 0x86DD
TCP, UDP = 6, 17
SYN, RST, ACK = 0x02, 0x04, 0x10
MDNS_PORT = 5353


def ethertype(frame: bytes) -> int:
    return frame[12] << 8 | frame[13]


def is_ipv4(frame: bytes) -> bool:
    return ethertype(frame) == IPV4


def is_ipv6(frame: bytes) -> bool:
    return ethertype(frame) == IPV6


def is_multicast(frame: bytes) -> bool:
    """Tell whether many are meant, with IP: without ARP and neighbour solicitations no host
    reaches any other.
    """
    is_neighbours = is_ipv6(frame) and frame[20] == 58
    return bool(frame[0] & 1) and ethertype(frame) in (IPV4, IPV6) and not is_neighbours


def is_mdns(frame: bytes) -> bool:
    return _ports(frame, UDP)[1] == MDNS_PORT


def is_tcp(frame: bytes) -> bool:
    return _transport(frame)[0] == TCP


def is_tcp_syn(frame: bytes) -> bool:
    """Tell whether it opens a connection."""
    protocol, start = _transport(frame)
    return protocol == TCP and frame[start + 13] & (SYN | ACK) == SYN


def is_tcp_syn_to(frame: bytes, port: int) -> bool:
    return is_tcp_syn(frame) and _ports(frame, TCP)[1] == port


def reset_answer(syn: bytes) -> bytes:
    """Make the frame by which the receiver of a SYN refuses the connection."""
    _, start = _transport(syn)
    source, target, sequence = struct.unpack("!HHI", syn[start : start + 8])
    port_part = struct.pack("!HHIIBBHHH", target, source, 0, sequence + 1, 0x50, RST | ACK, 0, 0, 0)
    hosts = syn[38:54] + syn[22:38] if is_ipv6(syn) else syn[30:34] + syn[26:30]
    pseudo = hosts + struct.pack("!HH", TCP, len(port_part))
    checksum = struct.pack("!H", _checksum(pseudo + port_part))
    port_part = port_part[:16] + checksum + port_part[18:]
    if is_ipv6(syn):
        head = struct.pack("!IHBB", 6 << 28, len(port_part), TCP, 64) + hosts
    else:
        head = struct.pack("!BBHHHBBH", 0x45, 0, 20 + len(port_part), 0, 0, 64, TCP, 0) + hosts
        head = head[:10] + struct.pack("!H", _checksum(head)) + head[12:]
    return syn[6:12] + syn[:6] + syn[12:14] + head + port_part


def _transport(frame: bytes) -> tuple[int, int]:
    """Give the protocol above IP and where its header starts; (0, 0) for others."""
    kind = ethertype(frame)
    if kind == IPV4 and len(frame) >= 34:
        return frame[23], ETHERNET_BYTES + 4 * (frame[14] & 15)
    if kind == IPV6 and len(frame) >= 54:
        return frame[20], ETHERNET_BYTES + 40
    return 0, 0


def _ports(frame: bytes, protocol: int) -> tuple[int, int]:
    found, start = _transport(frame)
    if found != protocol or len(frame) < start + 4:
        return 0, 0
    source, target = struct.unpack_from("!HH", frame, start)
    return source, target


def _checksum(content: bytes) -> int:
    total: int = sum(struct.unpack(f"!{len(content) // 2}H", content))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF
