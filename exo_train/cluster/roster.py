"""Who belongs to a cluster, and who does no longer.

Owns the rules by which a certificate enters and how two members' views become one. Pure: no
socket, file or clock. Whatever the order of merges, those who know the same say the same.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from exo_train.errors import ConfigError, ProtocolError
from exo_train.identity import (
    MAX_CERTIFICATE_BYTES,
    Identity,
    MemberCertificate,
    check_admission,
    is_node_id,
    read_certificate,
)
from exo_train.peer import NodeId
from exo_train.wire.pb import pairing_pb2 as pb

MAX_MEMBERS = 64
# A removed device stays here for ever: its certificate says who had invited others.
MAX_REMOVALS = 512
MAX_CERTIFICATES = MAX_MEMBERS + MAX_REMOVALS
# Removals of devices that nobody has a certificate of count against MAX_REMOVALS, others never.
MAX_LISTED_REMOVALS = MAX_REMOVALS + MAX_CERTIFICATES


@dataclass(frozen=True, slots=True, kw_only=True)
class Removal:
    node_id: NodeId
    removed_by: NodeId


@dataclass(frozen=True, slots=True, kw_only=True)
class RosterState:
    """A roster as it travels and lies on disk: sizes and ids checked, signatures not yet."""

    certificates: tuple[bytes, ...] = ()  # DER
    removals: tuple[Removal, ...] = ()

    def __post_init__(self) -> None:
        """Refuse what no member would say, before anything is computed from it."""
        num_certificates, num_removals = len(self.certificates), len(self.removals)
        if num_certificates > MAX_CERTIFICATES or num_removals > MAX_LISTED_REMOVALS:
            raise ProtocolError(
                f"a roster has {num_certificates} certificates and {num_removals} removals, more "
                f"than the {MAX_CERTIFICATES} and {MAX_LISTED_REMOVALS} allowed"
            )
        if any(len(der) > MAX_CERTIFICATE_BYTES for der in self.certificates) or not all(
            is_node_id(removal.node_id) and is_node_id(removal.removed_by)
            for removal in self.removals
        ):
            raise ProtocolError("a roster has entries that make no sense")

    def to_message(self) -> pb.RosterState:
        return pb.RosterState(
            certificates=self.certificates,
            removals=[
                pb.Removal(node_id=removal.node_id, removed_by=removal.removed_by)
                for removal in self.removals
            ],
        )

    @classmethod
    def from_message(cls, message: pb.RosterState) -> RosterState:
        """Read a peer's roster; raises ProtocolError."""
        return cls(
            certificates=tuple(message.certificates),
            removals=tuple(
                Removal(node_id=NodeId(removal.node_id), removed_by=NodeId(removal.removed_by))
                for removal in message.removals
            ),
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "certificates": [base64.b64encode(der).decode("ascii") for der in self.certificates],
            "removals": {removal.node_id: removal.removed_by for removal in self.removals},
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> RosterState:
        """Read what `to_json` wrote; raises ProtocolError."""
        try:
            return cls(
                certificates=tuple(
                    base64.b64decode(text, validate=True) for text in content["certificates"]
                ),
                removals=tuple(
                    Removal(node_id=NodeId(str(node_id)), removed_by=NodeId(str(removed_by)))
                    for node_id, removed_by in content["removals"].items()
                ),
            )
        except (KeyError, TypeError, ValueError, AttributeError):
            raise ProtocolError("a stored roster cannot be read") from None


class Roster:
    """The members of one cluster; each certificate in it has been checked."""

    def __init__(self, cluster: str, authority_certificate: bytes) -> None:
        self.cluster = cluster
        self._authority_certificate = authority_certificate
        self._certificates: dict[NodeId, MemberCertificate] = {}  # of the removed too
        self._removals: dict[NodeId, NodeId] = {}

    @classmethod
    def of(cls, identity: Identity, state: RosterState | None = None) -> Roster:
        """Make the roster of the identity's cluster."""
        roster = cls(identity.cluster, identity.authority_certificate)
        if state is not None:
            roster.merge(state)
        roster.merge(RosterState(certificates=(identity.certificate,)))
        return roster

    def admit(self, der: bytes) -> MemberCertificate:
        """Give the checked certificate of a caller, whom we may not have known before.

        Raises ProtocolError when it was removed, or when its inviter is no member: one who was
        removed still has the authority's key, and could make certificates for ever.
        """
        certificate = self._known(der) or self._read(der)
        if certificate.node_id in self._removals:
            raise ProtocolError(
                f"device {certificate.node_id} was removed from this cluster; to bring it back, "
                f"pair it anew with a code from `exo-train invite`"
            )
        if self.certificate(certificate.node_id) is None:
            invited_itself = certificate.invited_by == certificate.node_id
            if not invited_itself and self.certificate(certificate.invited_by) is None:
                raise ProtocolError(
                    f"device {certificate.node_id} was invited by {certificate.invited_by}, which "
                    f"is no member here; pair it anew with a code from `exo-train invite`"
                )
            self._check_room()
        self._enter(certificate)
        return certificate

    def merge(self, state: RosterState) -> bool:
        """Take in what another member knows; give whether anything was new.

        Certificates that do not hold, or that there is no room for, are left out.
        """
        before = self.digest()
        waiting = []
        for der in dict.fromkeys(state.certificates):
            if self._known(der) is None:
                with contextlib.suppress(ProtocolError):
                    waiting.append(self._read(der))
        # The removed take no member's place, and what they are known by comes with them.
        for removal in state.removals:
            self._note_removal(removal)
        self._enter_in_order_of_invitation(waiting)
        for removal in state.removals:
            self._note_removal(removal)
        return self.digest() != before

    def remove(self, node_id: NodeId, by: NodeId) -> None:
        """End a membership for ever; raises ConfigError when there is no room to remember it."""
        if not self._note_removal(Removal(node_id=node_id, removed_by=by)):
            raise ConfigError(
                f"this cluster remembers {len(self._removals)} removals, the limit is "
                f"{MAX_REMOVALS}; found a new one with `exo-train leave` and `exo-train join`"
            )

    def certificate(self, node_id: NodeId) -> MemberCertificate | None:
        """Give a member's certificate; None for those who never were or are no longer members."""
        return None if node_id in self._removals else self._certificates.get(node_id)

    def members(self) -> tuple[NodeId, ...]:
        """Give the members in the order of their ids."""
        return tuple(sorted(self._certificates.keys() - self._removals.keys()))

    def is_removed(self, node_id: NodeId) -> bool:
        return node_id in self._removals

    def invited_by(self, node_id: NodeId) -> tuple[NodeId, ...]:
        """Give the members whom a device has invited: whoever removes it may doubt them too."""
        return tuple(
            member
            for member in self.members()
            if self._certificates[member].invited_by == node_id and member != node_id
        )

    def state(self) -> RosterState:
        """Give all of it, in one order."""
        return RosterState(
            certificates=tuple(self._certificates[n].der for n in sorted(self._certificates)),
            removals=tuple(
                Removal(node_id=node_id, removed_by=removed_by)
                for node_id, removed_by in sorted(self._removals.items())
            ),
        )

    def digest(self) -> bytes:
        """Give 32 bytes that are equal exactly when the content is."""
        digest = hashlib.sha256()
        state = self.state()
        for der in state.certificates:
            digest.update(b"certificate" + hashlib.sha256(der).digest())
        for removal in state.removals:
            digest.update(f"removal{removal.node_id}{removal.removed_by}".encode("ascii"))
        return digest.digest()

    def _known(self, der: bytes) -> MemberCertificate | None:
        """Spare what was checked before another check: this runs at every call."""
        return next((c for c in self._certificates.values() if c.der == der), None)

    def _read(self, der: bytes) -> MemberCertificate:
        return read_certificate(der, authority_certificate=self._authority_certificate)

    def _enter(self, certificate: MemberCertificate) -> None:
        """Take a certificate in, once its inviter's signature holds; raises ProtocolError."""
        node_id = certificate.node_id
        inviter = self._certificates.get(certificate.invited_by)
        if certificate.invited_by == node_id:
            inviter = certificate  # the founder: `read_certificate` lets no other
        if inviter is None:
            raise ProtocolError(f"nobody here knows {certificate.invited_by}, the inviter")
        check_admission(certificate, inviter, self.cluster)
        known = self._certificates.get(node_id)
        # Two certificates of one key: all members must come to keep the same one.
        if known is None or certificate.der < known.der:
            self._certificates[node_id] = certificate

    def _enter_in_order_of_invitation(self, waiting: list[MemberCertificate]) -> None:
        """Take in those whose inviters are known, then those whom they have invited, and so on."""
        while waiting:
            later = []
            for certificate in sorted(waiting, key=lambda c: c.der):
                invited_itself = certificate.invited_by == certificate.node_id
                if not invited_itself and certificate.invited_by not in self._certificates:
                    later.append(certificate)
                    continue
                with contextlib.suppress(ProtocolError):
                    if certificate.node_id not in self._certificates:
                        self._check_room(removed=certificate.node_id in self._removals)
                    self._enter(certificate)
            if len(later) == len(waiting):
                return
            waiting = later

    def _note_removal(self, removal: Removal) -> bool:
        """Remember a removal; give False when it is of an unknown device and there is no room."""
        known = self._removals.get(removal.node_id)
        if known is None:
            # One broken member's inventions must not keep a real device from being removed.
            if len(self._removals) >= MAX_REMOVALS and removal.node_id not in self._certificates:
                return False
            self._removals[removal.node_id] = removal.removed_by
        else:
            self._removals[removal.node_id] = min(known, removal.removed_by)
        return True

    def _check_room(self, *, removed: bool = False) -> None:
        num_members = len(self.members())
        if not removed and num_members >= MAX_MEMBERS:
            raise ProtocolError(
                f"this cluster has {num_members} devices, the limit is {MAX_MEMBERS}; remove one "
                f"that is gone for good with `exo-train remove NAME`"
            )
        if len(self._certificates) >= MAX_CERTIFICATES:
            raise ProtocolError(
                f"this cluster has had {len(self._certificates)} devices, the limit is "
                f"{MAX_CERTIFICATES}; found a new one with `exo-train leave` and `exo-train join`"
            )
