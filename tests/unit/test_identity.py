"""Certificates: what they say, which ones are refused, and that gRPC's TLS holds to them."""

from __future__ import annotations

import datetime
import hashlib
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa

from exo_train.errors import ProtocolError
from exo_train.identity import (
    ADMISSION_OID,
    ANY_MEMBER_TLS_NAME,
    MAX_CERTIFICATE_BYTES,
    Identity,
    MemberCertificate,
    check_admission,
    check_identity,
    found_cluster,
    founder_of,
    issue_certificate,
    new_key,
    node_id_of,
    public_key_of,
    read_certificate,
    tls_name,
    to_pem,
)
from exo_train.peer import Address
from exo_train.transport.channel import bind, new_server, open_channel

FOUNDER = found_cluster()
DER = serialization.Encoding.DER
SPKI = serialization.PublicFormat.SubjectPublicKeyInfo


def member(inviter: Identity = FOUNDER) -> Identity:
    """Make a device that `inviter` has let in."""
    key_pem = new_key()
    public_key = public_key_of(key_pem)
    return replace(
        inviter,
        node_id=node_id_of(public_key),
        key_pem=key_pem,
        certificate=issue_certificate(inviter, public_key),
    )


MEMBER = member()


def read(der: bytes, of: Identity = FOUNDER) -> MemberCertificate:
    return read_certificate(der, authority_certificate=of.authority_certificate)


def signed_by_the_authority(key: object, *names: str) -> bytes:
    """Mint what any member can mint, since each has the authority's key."""
    authority = serialization.load_der_private_key(FOUNDER.authority_key, None)
    issuer = x509.load_der_x509_certificate(FOUNDER.authority_certificate).subject
    builder = x509.CertificateBuilder(
        issuer,
        x509.Name([]),
        key.public_key(),
        1,
        datetime.datetime(2000, 1, 1),
        datetime.datetime(3000, 1, 1),
    )
    general = [x509.DNSName(name) for name in names]
    builder = builder.add_extension(x509.SubjectAlternativeName(general), critical=False)
    extension = x509.UnrecognizedExtension(ADMISSION_OID, bytes(86))
    builder = builder.add_extension(extension, critical=False)
    return builder.sign(authority, hashes.SHA256()).public_bytes(DER)


def test_the_id_is_the_fingerprint_of_the_key() -> None:
    key = serialization.load_pem_private_key(MEMBER.key_pem, None)
    spki = key.public_key().public_bytes(DER, SPKI)
    assert MEMBER.node_id == hashlib.sha256(spki).hexdigest()[:32]
    assert read(MEMBER.certificate).node_id == MEMBER.node_id


def test_two_clusters_share_nothing() -> None:
    other = found_cluster()
    assert len(other.cluster) == 16
    assert int(other.cluster, 16) >= 0
    for field in ("node_id", "cluster", "key_pem", "authority_certificate", "authority_key"):
        assert getattr(other, field) != getattr(FOUNDER, field)


def test_a_certificate_names_the_device_and_who_invited_it_and_outlives_any_clock() -> None:
    certificate = x509.load_der_x509_certificate(MEMBER.certificate)
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert set(names.get_values_for_type(x509.DNSName)) == {
        f"{MEMBER.node_id}.exo-train",
        "member.exo-train",
    }
    assert certificate.not_valid_before_utc.year == 1970
    assert certificate.not_valid_after_utc.year == 9999
    assert read(MEMBER.certificate).invited_by == FOUNDER.node_id


def test_the_founder_is_invited_by_itself() -> None:
    founder = read(FOUNDER.certificate)
    assert founder.invited_by == founder.node_id == founder_of(FOUNDER.authority_certificate)
    check_admission(founder, founder, FOUNDER.cluster)


def test_members_of_members_can_invite() -> None:
    child = member(MEMBER)
    check_identity(child)
    check_admission(read(child.certificate), read(MEMBER.certificate), FOUNDER.cluster)


def test_keys_are_not_printed() -> None:
    assert "PRIVATE" not in repr(MEMBER)
    assert repr(MEMBER.authority_key) not in repr(MEMBER)
    assert MEMBER.node_id in repr(MEMBER)


@pytest.mark.parametrize(
    "field",
    ["node_id", "cluster", "key_pem", "certificate", "authority_certificate", "authority_key"],
)
def test_an_identity_with_a_foreign_part_is_refused(field: str) -> None:
    check_identity(MEMBER)
    with pytest.raises(ProtocolError):
        check_identity(replace(MEMBER, **{field: getattr(found_cluster(), field)}))
    with pytest.raises(ProtocolError):
        check_identity(replace(MEMBER, **{field: type(getattr(MEMBER, field))()}))


def test_another_members_certificate_is_not_ones_own() -> None:
    with pytest.raises(ProtocolError, match=f"not made out to this device, {MEMBER.node_id}"):
        check_identity(replace(MEMBER, certificate=FOUNDER.certificate))


def test_every_changed_byte_of_a_certificate_is_noticed() -> None:
    der = MEMBER.certificate
    for place in range(0, len(der), 7):
        changed = bytearray(der)
        changed[place] ^= 1
        with pytest.raises(ProtocolError):
            read(bytes(changed))


@pytest.mark.parametrize(
    "garbage",
    [b"", b"\x30", bytes(700), FOUNDER.authority_key],
    ids=["nothing", "a byte", "zeros", "a key"],
)
def test_garbage_is_refused_in_a_sentence(garbage: bytes) -> None:
    with pytest.raises(ProtocolError, match="not one of this cluster's"):
        read(garbage)
    with pytest.raises(ProtocolError):
        to_pem(garbage)


def test_an_oversized_certificate_is_refused_unread() -> None:
    with pytest.raises(ProtocolError, match=f"9000 bytes.*{MAX_CERTIFICATE_BYTES}"):
        read(bytes(9000))


def test_another_clusters_certificate_is_refused() -> None:
    with pytest.raises(ProtocolError, match="not one of this cluster's"):
        read(member(found_cluster()).certificate)


@pytest.mark.parametrize(
    "key",
    [ec.generate_private_key(ec.SECP384R1()), rsa.generate_private_key(65537, 2048)],
    ids=["P-384", "RSA"],
)
def test_only_p256_keys_are_members(key: object) -> None:
    spki = key.public_key().public_bytes(DER, SPKI)
    with pytest.raises(ProtocolError, match="not P-256"):
        issue_certificate(FOUNDER, spki)
    with pytest.raises(ProtocolError, match="not one of this cluster's"):
        read(signed_by_the_authority(key, tls_name(node_id_of(spki)), ANY_MEMBER_TLS_NAME))


@pytest.mark.parametrize(
    "names",
    [
        [],
        [ANY_MEMBER_TLS_NAME],
        [tls_name(FOUNDER.node_id), ANY_MEMBER_TLS_NAME],
        ["own", ANY_MEMBER_TLS_NAME, tls_name(FOUNDER.node_id)],
    ],
)
def test_a_certificate_in_anothers_name_is_refused(names: list[str]) -> None:
    """Any member can mint it; it would pass for another device in TLS."""
    key = ec.generate_private_key(ec.SECP256R1())
    own = tls_name(node_id_of(key.public_key().public_bytes(DER, SPKI)))
    with pytest.raises(ProtocolError):
        read(signed_by_the_authority(key, *(own if name == "own" else name for name in names)))


def test_nobody_but_the_founder_invites_itself() -> None:
    key_pem = new_key()
    public_key = public_key_of(key_pem)
    stranger = replace(FOUNDER, node_id=node_id_of(public_key), key_pem=key_pem)
    with pytest.raises(ProtocolError, match="invited itself"):
        read(issue_certificate(stranger, public_key))


def test_a_forged_invitation_is_noticed() -> None:
    public_key = public_key_of(new_key())
    founder = read(FOUNDER.certificate)
    forged = read(issue_certificate(replace(MEMBER, node_id=FOUNDER.node_id), public_key))
    assert forged.invited_by == FOUNDER.node_id
    with pytest.raises(ProtocolError, match="does not carry the signature"):
        check_admission(forged, founder, FOUNDER.cluster)
    with pytest.raises(ProtocolError, match="does not carry the signature"):
        check_admission(forged, read(MEMBER.certificate), FOUNDER.cluster)  # who really signed it
    honest = read(issue_certificate(FOUNDER, public_key))
    check_admission(honest, founder, FOUNDER.cluster)
    with pytest.raises(ProtocolError):
        check_admission(honest, founder, "0123456789abcdef")
    with pytest.raises(ProtocolError):
        check_admission(honest, read(MEMBER.certificate), FOUNDER.cluster)
    lent = replace(read(MEMBER.certificate), admission=honest.admission)
    with pytest.raises(ProtocolError):
        check_admission(lent, founder, FOUNDER.cluster)


def test_an_id_does_not_depend_on_how_the_key_is_written() -> None:
    key = ec.generate_private_key(ec.SECP256R1()).public_key()
    point = key.public_bytes(
        serialization.Encoding.X962, serialization.PublicFormat.CompressedPoint
    )
    header = bytes.fromhex("3039301306072a8648ce3d020106082a8648ce3d030107032200")
    certificate = read(issue_certificate(FOUNDER, header + point))
    assert certificate.node_id == node_id_of(key.public_bytes(DER, SPKI))


@pytest.fixture
def served() -> Iterator[Address]:
    """MEMBER's server, which demands certificates of the authority."""
    server = new_server(max_workers=2)
    handler = grpc.unary_unary_rpc_method_handler(lambda request, context: b"yes " + request)
    server.add_generic_rpc_handlers(
        [grpc.method_handlers_generic_handler("test.Echo", {"Say": handler})]
    )
    credentials = grpc.ssl_server_credentials(
        [(MEMBER.key_pem, to_pem(MEMBER.certificate))],
        root_certificates=to_pem(FOUNDER.authority_certificate),
        require_client_auth=True,
    )
    address = Address("127.0.0.1", bind(server, "127.0.0.1", credentials=credentials))
    server.start()
    yield address
    server.stop(None).wait()


def call(address: Address, *, root: bytes, name: str, caller: Identity | None = FOUNDER) -> bytes:
    own = {}
    if caller is not None:
        pem = to_pem(caller.certificate)
        own = {"private_key": caller.key_pem, "certificate_chain": pem}
    credentials = grpc.ssl_channel_credentials(root_certificates=to_pem(root), **own)
    with closing(open_channel(address, credentials=credentials, tls_name=name)) as channel:
        say = channel.unary_unary("/test.Echo/Say")
        return bytes(say(b"sir", timeout=5))


def test_tls_holds_with_the_peers_own_certificate_as_the_only_root(served: Address) -> None:
    assert call(served, root=MEMBER.certificate, name=tls_name(MEMBER.node_id)) == b"yes sir"


def test_tls_finds_any_member_by_the_authority(served: Address) -> None:
    root = FOUNDER.authority_certificate
    assert call(served, root=root, name=ANY_MEMBER_TLS_NAME) == b"yes sir"


@pytest.mark.parametrize(
    ("root", "name", "caller"),
    [
        (FOUNDER.certificate, tls_name(FOUNDER.node_id), FOUNDER),
        (FOUNDER.certificate, ANY_MEMBER_TLS_NAME, FOUNDER),
        (MEMBER.certificate, tls_name(FOUNDER.node_id), FOUNDER),
        (FOUNDER.authority_certificate, tls_name(FOUNDER.node_id), FOUNDER),
        (found_cluster().authority_certificate, ANY_MEMBER_TLS_NAME, FOUNDER),
        (MEMBER.certificate, tls_name(MEMBER.node_id), None),
        (MEMBER.certificate, tls_name(MEMBER.node_id), found_cluster()),
    ],
    ids=[
        "another member expected",
        "pinned to another member",
        "another name",
        "authority but another name",
        "another cluster's server",
        "a caller without certificate",
        "a caller of another cluster",
    ],
)
def test_tls_refuses(served: Address, root: bytes, name: str, caller: Identity | None) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        call(served, root=root, name=name, caller=caller)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
