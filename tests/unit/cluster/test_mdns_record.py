"""What goes into a record and what is believed of a stranger's."""

from __future__ import annotations

from typing import Any

import pytest
from zeroconf import ServiceInfo

from exo_train.cluster.interfaces import LocalAddress
from exo_train.cluster.mdns_record import (
    MAX_ADDRESSES,
    PAIRING_SERVICE_TYPE,
    SERVICE_TYPE,
    Announcement,
    id_in_name,
    read_info,
)
from exo_train.peer import Address

ID = "0123456789abcdef" * 2
OWN = [
    LocalAddress(interface="lan0", host="10.0.0.1", index=2),
    LocalAddress(interface="lan0", host="fe80::1%lan0", index=2),
]


def record(**changes: Any) -> ServiceInfo:
    content: dict[str, Any] = {
        "properties": {"id": ID, "cluster": "c0ffee", "v": "2"},
        "port": 5000,
        "parsed_addresses": ["10.0.0.2"],
        **changes,
    }
    return ServiceInfo(SERVICE_TYPE, content.pop("name", f"{ID}.{SERVICE_TYPE}"), **content)


def addresses(info: ServiceInfo, own: list[LocalAddress] = OWN) -> tuple[Address, ...] | None:
    seen = read_info(info, own=own)
    return seen and seen.addresses


def test_what_is_announced_is_read_back() -> None:
    announced = Announcement(
        service_type=SERVICE_TYPE, id=ID, cluster="c0ffee", port=5000, protocol=7
    )
    info = announced.to_info(["10.0.0.2", "fd00::2", "fe80::2%eth3", "fe80::2%wlan0"])
    seen = read_info(info, own=OWN)
    assert seen is not None
    assert (seen.node_id, seen.cluster, seen.protocol) == (ID, "c0ffee", 7)
    assert set(seen.addresses) == {
        Address("10.0.0.2", 5000),
        Address("fd00::2", 5000),
        Address("fe80::2", 5000),  # once, without the sender's zone
    }


def test_a_received_zone_is_named_as_this_system_names_it() -> None:
    scoped = record(parsed_addresses=["fe80::2"], interface_index=2)
    assert addresses(scoped) == (Address("fe80::2%lan0", 5000),)
    unknown = record(parsed_addresses=["fe80::2"], interface_index=9)
    assert addresses(unknown) == (Address("fe80::2", 5000),)


@pytest.mark.parametrize(
    "changes",
    [
        {"port": 0},
        {"port": None},
        {"parsed_addresses": []},
        {"properties": {}},
        {"properties": {"id": ID, "cluster": "c0ffee"}},
        {"properties": {"id": ID, "v": "2"}},
        {"properties": {"id": "f" * 32, "cluster": "c0ffee", "v": "2"}},
        {"properties": {"id": ID, "cluster": "c" * 65, "v": "2"}},
        {"properties": {"id": ID, "cluster": "a\x1b[2J", "v": "2"}},
        {"properties": {"id": ID, "cluster": "", "v": "2"}},
        {"properties": {"id": ID, "cluster": "c0ffee", "v": "9" * 40}},
        {"properties": {"id": ID, "cluster": "c0ffee", "v": "-1"}},
        {"properties": b"\x05\xff\xfe=\xff\xff"},
        {"properties": {"id": None, "cluster": "c0ffee", "v": "2"}},
        {"name": f"someone.{SERVICE_TYPE}"},
        {"name": f"{ID.upper()}.{SERVICE_TYPE}"},
    ],
)
def test_a_record_of_another_shape_is_dropped(changes: dict[str, Any]) -> None:
    assert read_info(record(**changes), own=OWN) is None


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "::1", "0.0.0.0", "::", "224.0.0.1", "255.255.255.255", "ff02::1"]
)
def test_addresses_that_lead_to_no_other_device_are_dropped(host: str) -> None:
    assert addresses(record(parsed_addresses=[host])) is None
    assert addresses(record(parsed_addresses=[host, "10.0.0.2"])) == (Address("10.0.0.2", 5000),)
    assert addresses(record(parsed_addresses=["::ffff:127.0.0.1"])) is None


def test_loopback_counts_for_who_is_on_loopback() -> None:
    own = [LocalAddress(interface="lo", host="127.0.0.1", index=1)]
    info = record(parsed_addresses=["127.0.0.1", "0.0.0.0"])
    assert addresses(info, own) == (Address("127.0.0.1", 5000),)


def test_the_number_of_addresses_is_bounded() -> None:
    hosts = [f"10.0.1.{n}" for n in range(60)]
    found = addresses(record(parsed_addresses=hosts))
    assert found is not None
    assert len(found) == MAX_ADDRESSES


def test_names_are_ids_and_short() -> None:
    for service_type in (SERVICE_TYPE, PAIRING_SERVICE_TYPE):
        assert id_in_name(f"{ID}.{service_type}", service_type) == ID
        for label in ("", "x", ID[1:], ID + "0", f"{ID}.{ID}", "José's Mac", "\n" + ID[1:]):
            assert id_in_name(f"{label}.{service_type}", service_type) is None
    assert id_in_name(f"{ID}.{PAIRING_SERVICE_TYPE}", SERVICE_TYPE) is None
    assert len(ID) < 63
