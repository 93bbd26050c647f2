"""Who may talk to this agent: the roster under a lock, kept on disk, changed by gossip.

Owns the agent's only Roster. Must not send anything.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from exo_train.cluster.home import Home
from exo_train.cluster.roster import Roster, RosterState
from exo_train.errors import ConfigError, ProtocolError
from exo_train.identity import Identity, MemberCertificate, issue_certificate, read_certificate
from exo_train.peer import Address, NodeId
from exo_train.train.messages import to_endpoints
from exo_train.transport.tls import MemberTls, RemovedError
from exo_train.wire.pb import pairing_pb2 as pb

log = logging.getLogger(__name__)


class Admissions:
    """Thread-safe. `on_removed` is told, outside the lock, of each device that is removed."""

    def __init__(
        self, home: Home, identity: Identity, *, on_removed: Callable[[NodeId], None]
    ) -> None:
        self.identity = identity
        self._home = home
        self._on_removed = on_removed
        self._roster = home.roster(identity)
        self._lock = threading.Lock()
        self._save_lock = threading.Lock()
        self.tls = MemberTls(identity, self.certificate)

    def admit(self, der: bytes) -> NodeId:
        """Give the id of whoever owns this certificate.

        Raises RemovedError for a former member, ProtocolError for a stranger.
        """
        with self._lock:
            before = self._roster.members()
            try:
                node_id = self._roster.admit(der).node_id
            except ProtocolError:
                self._check_not_removed(der)
                raise
            is_new = self._roster.members() != before
        if is_new:
            self._save()
        return node_id

    def _check_not_removed(self, der: bytes) -> None:
        authority = self.identity.authority_certificate
        node_id = read_certificate(der, authority_certificate=authority).node_id
        if self._roster.is_removed(node_id):
            raise RemovedError(f"device {node_id} was removed from this cluster") from None

    def invite(self, public_key: bytes, addresses: tuple[Address, ...]) -> pb.Admission:
        """Make the owner of a key a member, and give what it needs to be one."""
        certificate = issue_certificate(self.identity, public_key)
        with self._lock:
            self._roster.admit(certificate)
            roster = self._roster.state().to_message()
        self._save()
        return pb.Admission(
            cluster=self.identity.cluster,
            authority_certificate=self.identity.authority_certificate,
            authority_key=self.identity.authority_key,
            certificate=certificate,
            roster=roster,
            endpoints=to_endpoints(addresses),
        )

    def certificate(self, node_id: NodeId) -> MemberCertificate | None:
        with self._lock:
            return self._roster.certificate(node_id)

    def members(self) -> tuple[NodeId, ...]:
        with self._lock:
            return self._roster.members()

    def invited_by(self, node_id: NodeId) -> tuple[NodeId, ...]:
        with self._lock:
            return self._roster.invited_by(node_id)

    def is_removed(self, node_id: NodeId) -> bool:
        with self._lock:
            return self._roster.is_removed(node_id)

    def removed(self) -> tuple[NodeId, ...]:
        with self._lock:
            return tuple(removal.node_id for removal in self._roster.state().removals)

    def digest(self) -> bytes:
        with self._lock:
            return self._roster.digest()

    def message(self) -> pb.RosterState:
        with self._lock:
            return self._roster.state().to_message()

    def merge(self, message: pb.RosterState) -> None:
        """Take in what another member knows of who belongs here."""
        state = RosterState.from_message(message)
        with self._lock:
            before = {removal.node_id for removal in self._roster.state().removals}
            changed = self._roster.merge(state)
            removed = {removal.node_id for removal in self._roster.state().removals} - before
        if changed:
            self._save()
        for node_id in sorted(removed):
            self._on_removed(node_id)

    def remove(self, node_id: NodeId) -> None:
        """End a membership for ever, in this device's name."""
        with self._lock:
            self._roster.remove(node_id, by=self.identity.node_id)
        self._save()
        self._on_removed(node_id)

    def note_own_removal(self, by: NodeId) -> None:
        """Remember that this device is no member any more, so that it does not try again."""
        with self._lock:
            self._roster.remove(self.identity.node_id, by=by)
        self._save()

    def _save(self) -> None:
        """Write the newest roster down; a slow disk keeps no caller waiting at the gate."""
        with self._save_lock:
            with self._lock:
                newest = Roster.of(self.identity, self._roster.state())
            try:
                self._home.save_roster(newest)
            except ConfigError as error:  # a full disk must not refuse a member's call
                log.warning("%s", error)
