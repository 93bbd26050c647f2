"""Who a device is: its key, its cluster's authority, the certificate that joins both.

Owns keys, ids and certificates as values, and what makes a certificate a member's. Must not know
who is a member (see cluster/roster.py), and touches no file, socket or clock.
"""

from __future__ import annotations

import datetime
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from exo_train.errors import ProtocolError
from exo_train.peer import NodeId

MAX_CERTIFICATE_BYTES = 4096
MAX_KEY_BYTES = 1024
# What every member's certificate carries beside its own name, for a caller that does not know yet
# whom it will reach.
ANY_MEMBER_TLS_NAME = "member.exo-train"
# A UUID as object identifier (ITU-T X.667), made once for this purpose.
ADMISSION_OID = x509.ObjectIdentifier("2.25.155867785535525935818732851428365404974")
# RFC 5280, 4.1.2.5: the latest time there is. Clocks at home are wrong; removals end membership.
NEVER_EXPIRES = datetime.datetime(9999, 12, 31, 23, 59, 59)
ALWAYS_VALID = datetime.datetime(1970, 1, 1)

_ID_BYTES = 16
_NODE_ID = re.compile(r"[0-9a-f]{32}")
_TAG = re.compile(r"[0-9a-f]{16}")
_SHA256 = ec.ECDSA(hashes.SHA256())


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """What makes a device a member; the authority's key lets each member invite others."""

    node_id: NodeId
    cluster: str  # the tag: 16 random hex digits
    key_pem: bytes = field(repr=False)  # PKCS #8
    certificate: bytes = field(repr=False)  # DER
    authority_certificate: bytes = field(repr=False)  # DER
    authority_key: bytes = field(repr=False)  # PKCS #8, DER


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberCertificate:
    """A certificate that the authority has signed, read; not yet that its inviter is trusted."""

    node_id: NodeId
    invited_by: NodeId
    public_key: bytes  # SubjectPublicKeyInfo, DER
    admission: bytes  # the inviter's signature over cluster and public key
    der: bytes


def found_cluster() -> Identity:
    """Make a new cluster, with its authority, and its first member."""
    cluster = secrets.token_hex(8)
    key_pem = new_key()
    public_key = public_key_of(key_pem)
    node_id = node_id_of(public_key)
    authority = ec.generate_private_key(ec.SECP256R1())
    name = _authority_name(cluster, node_id)
    builder = _builder(name, name, authority.public_key(), authority.public_key())
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    builder = builder.add_extension(_key_usage(authority=True), critical=True)
    authority_certificate = builder.sign(authority, hashes.SHA256())
    founder = Identity(
        node_id=node_id,
        cluster=cluster,
        key_pem=key_pem,
        certificate=b"",
        authority_certificate=authority_certificate.public_bytes(serialization.Encoding.DER),
        authority_key=_key_der(authority),
    )
    return replace(founder, certificate=issue_certificate(founder, public_key))


def new_key() -> bytes:
    """Make a device's key: P-256, PEM, PKCS #8."""
    return ec.generate_private_key(ec.SECP256R1()).private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def public_key_of(key_pem: bytes) -> bytes:
    """Give the SubjectPublicKeyInfo, DER, of a private key."""
    return _spki(_member_key(key_pem).public_key())


def node_id_of(public_key: bytes) -> NodeId:
    """Give the id: the first 32 hex digits of the key's SHA-256."""
    digest = hashes.Hash(hashes.SHA256())
    digest.update(public_key)
    return NodeId(digest.finalize()[:_ID_BYTES].hex())


def tls_name(node_id: NodeId) -> str:
    """Give the name in a member's certificate; IP addresses change, so none is in there."""
    return f"{node_id}.exo-train"


def to_pem(certificate: bytes) -> bytes:
    """Give a DER certificate as PEM, as gRPC wants it."""
    with _refusing("a certificate cannot be read"):
        return x509.load_der_x509_certificate(certificate).public_bytes(serialization.Encoding.PEM)


def issue_certificate(inviter: Identity, public_key: bytes) -> bytes:
    """Sign a member's certificate as the authority, with the inviter's admission in it; DER.

    Raises ProtocolError when `public_key` is no P-256 key.
    """
    key = _p256(public_key)
    spki = _spki(key)
    node_id = node_id_of(spki)
    authority = _authority_key(inviter.authority_key)
    signature = _member_key(inviter.key_pem).sign(_admission_text(inviter.cluster, spki), _SHA256)
    admission = bytes.fromhex(inviter.node_id) + signature
    issuer = x509.load_der_x509_certificate(inviter.authority_certificate).subject
    builder = _builder(_member_name(node_id), issuer, key, authority.public_key())
    names = [x509.DNSName(name) for name in (tls_name(node_id), ANY_MEMBER_TLS_NAME)]
    usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    return (
        builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(authority=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.UnrecognizedExtension(ADMISSION_OID, admission), critical=False)
        .sign(authority, hashes.SHA256())
        .public_bytes(serialization.Encoding.DER)
    )


def read_certificate(der: bytes, *, authority_certificate: bytes) -> MemberCertificate:
    """Read a member's certificate; raises ProtocolError unless this authority has signed it.

    That the inviter may invite is another question: see `check_admission`.
    """
    if len(der) > MAX_CERTIFICATE_BYTES:
        raise ProtocolError(
            f"a certificate has {len(der)} bytes, more than the {MAX_CERTIFICATE_BYTES} allowed"
        )
    with _refusing("a device showed a certificate that is not one of this cluster's"):
        certificate = x509.load_der_x509_certificate(der)
        authority = x509.load_der_x509_certificate(authority_certificate)
        certificate.verify_directly_issued_by(authority)
        public_key = _spki(_p256_of(certificate.public_key()))
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        admission = certificate.extensions.get_extension_for_oid(ADMISSION_OID).value
    node_id = node_id_of(public_key)
    if (
        sorted(names.get_values_for_type(x509.DNSName))
        != sorted([tls_name(node_id), ANY_MEMBER_TLS_NAME])
        or len(names) != 2
    ):
        raise ProtocolError(f"the certificate of device {node_id} is made out to another name")
    assert isinstance(admission, x509.UnrecognizedExtension)
    invited_by = NodeId(admission.value[:_ID_BYTES].hex())
    if invited_by == node_id and node_id != founder_of(authority_certificate):
        raise ProtocolError(f"device {node_id} invited itself, and it did not found the cluster")
    return MemberCertificate(
        node_id=node_id,
        invited_by=invited_by,
        public_key=public_key,
        admission=admission.value[_ID_BYTES:],
        der=der,
    )


def check_admission(
    certificate: MemberCertificate, inviter: MemberCertificate, cluster: str
) -> None:
    """Raise ProtocolError unless `inviter` has signed that this key may enter this cluster."""
    text = _admission_text(cluster, certificate.public_key)
    try:
        if certificate.invited_by == inviter.node_id:
            _p256(inviter.public_key).verify(certificate.admission, text, _SHA256)
            return
    except InvalidSignature:
        pass
    raise ProtocolError(
        f"the certificate of device {certificate.node_id} does not carry the signature of device "
        f"{inviter.node_id}, which is said to have invited it"
    )


def founder_of(authority_certificate: bytes) -> NodeId:
    """Give the id of the device that made the cluster."""
    return NodeId(_authority_names(authority_certificate)[1])


def check_identity(identity: Identity) -> None:
    """Raise ProtocolError unless keys, certificates, id and tag belong together."""
    public_key = public_key_of(identity.key_pem)
    with _refusing("the cluster's authority cannot be read"):
        authority = x509.load_der_x509_certificate(identity.authority_certificate)
        authority.verify_directly_issued_by(authority)
        authority_key = _spki(_p256_of(authority.public_key()))
    if _spki(_authority_key(identity.authority_key).public_key()) != authority_key:
        raise ProtocolError("the authority's key and the authority's certificate do not match")
    if _authority_names(identity.authority_certificate)[0] != identity.cluster:
        raise ProtocolError(f"the authority's certificate is not of cluster {identity.cluster}")
    certificate = read_certificate(
        identity.certificate, authority_certificate=identity.authority_certificate
    )
    if certificate.public_key != public_key or certificate.node_id != identity.node_id:
        raise ProtocolError(f"the certificate is not made out to this device, {identity.node_id}")


def is_node_id(text: str) -> bool:
    return _NODE_ID.fullmatch(text) is not None


@contextmanager
def _refusing(sentence: str) -> Iterator[None]:
    """Turn what the library says of foreign bytes into one sentence."""
    try:
        yield
    except (
        ValueError,
        TypeError,
        InvalidSignature,
        UnsupportedAlgorithm,
        x509.ExtensionNotFound,
        x509.DuplicateExtension,
    ):
        raise ProtocolError(sentence) from None


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePublicKey,
    issuer_key: ec.EllipticCurvePublicKey,
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(ALWAYS_VALID)
        .not_valid_after(NEVER_EXPIRES)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key), critical=False
        )
    )


def _key_usage(*, authority: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not authority,
        key_cert_sign=authority,
        crl_sign=False,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _authority_name(cluster: str, founder: NodeId) -> x509.Name:
    return x509.Name(
        [
            x509.NameAttribute(NameOID.ORGANIZATION_NAME, "exo-train"),
            x509.NameAttribute(NameOID.ORGANIZATIONAL_UNIT_NAME, cluster),
            x509.NameAttribute(NameOID.COMMON_NAME, founder),
        ]
    )


def _authority_names(authority_certificate: bytes) -> tuple[str, str]:
    """Give cluster tag and founder's id, as `_authority_name` wrote them."""
    with _refusing("the cluster's authority cannot be read"):
        subject = x509.load_der_x509_certificate(authority_certificate).subject
        units = subject.get_attributes_for_oid(NameOID.ORGANIZATIONAL_UNIT_NAME)
        commons = subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    names = [str(attribute.value) for attribute in (*units, *commons)]
    if len(names) != 2 or not _TAG.fullmatch(names[0]) or not is_node_id(names[1]):
        raise ProtocolError("the authority's certificate names no cluster and founder")
    return names[0], names[1]


def _member_name(node_id: NodeId) -> x509.Name:
    return x509.Name(
        [
            x509.NameAttribute(NameOID.ORGANIZATION_NAME, "exo-train"),
            x509.NameAttribute(NameOID.COMMON_NAME, node_id),
        ]
    )


def _admission_text(cluster: str, public_key: bytes) -> bytes:
    """What an inviter signs; the first part keeps it from meaning anything elsewhere."""
    return b"exo-train admission\0" + cluster.encode("ascii") + b"\0" + public_key


def _spki(key: ec.EllipticCurvePublicKey) -> bytes:
    """Give the one encoding that ids are made of."""
    return key.public_bytes(
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )


def _p256(public_key: bytes) -> ec.EllipticCurvePublicKey:
    if len(public_key) > MAX_KEY_BYTES:
        raise ProtocolError(
            f"a public key has {len(public_key)} bytes, more than the {MAX_KEY_BYTES} allowed"
        )
    with _refusing("a device sent a public key that is not P-256"):
        return _p256_of(serialization.load_der_public_key(public_key))


def _p256_of(key: object) -> ec.EllipticCurvePublicKey:
    if isinstance(key, ec.EllipticCurvePublicKey) and isinstance(key.curve, ec.SECP256R1):
        return key
    raise ValueError("not P-256")


def _member_key(key_pem: bytes) -> ec.EllipticCurvePrivateKey:
    with _refusing("this device's key cannot be read"):
        key = serialization.load_pem_private_key(key_pem, password=None)
        _p256_of(key.public_key())
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    return key


def _authority_key(der: bytes) -> ec.EllipticCurvePrivateKey:
    with _refusing("the authority's key cannot be read"):
        key = serialization.load_der_private_key(der, password=None)
        _p256_of(key.public_key())
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    return key


def _key_der(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.DER,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
