"""Codes for new devices: the pairing port, its announcement, and what the user hears of both.

Owns the life of one code at a time. The desk does the talking.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Sequence

from exo_train.agent.announcing import Announcer
from exo_train.agent.pairing_desk import PairingDesk
from exo_train.cluster.pairing import Closed
from exo_train.errors import PeerError
from exo_train.peer import Address
from exo_train.wire.pb import pairing_pb2

PAIRING_ID_BYTES = 16
SENTENCES = {
    Closed.PAIRED: "the code was used: a new device is being taken in",
    Closed.EXPIRED: "the code has expired; `exo-train invite` makes a fresh one",
    Closed.WRONG_TRIES: "three wrong codes were tried, so this one is void; `exo-train invite` "
    "makes a fresh one",
}

log = logging.getLogger(__name__)


class Invitations:
    """Thread-safe; `addresses` gives where this device is reached at a port."""

    def __init__(
        self,
        hosts: Sequence[str],
        *,
        admit: Callable[[bytes], pairing_pb2.Admission],
        addresses: Callable[[int], tuple[Address, ...]],
        announcer: Announcer,
        say: Callable[[str], None],
    ) -> None:
        self._addresses = addresses
        self._announcer = announcer
        self._say = say
        self._desk = PairingDesk(hosts, admit=admit, on_closed=self._closed)

    def invite(self) -> tuple[str, float, tuple[Address, ...]]:
        """Make a code; gives it, how long it lives, and where the pairing port is open."""
        code, expires_s = self._desk.invite()
        port = self._desk.port
        if port is None:
            raise PeerError(f"the code {code} was used or replaced at once; ask for another one")
        self._announcer.announce_pairing(secrets.token_hex(PAIRING_ID_BYTES), port)
        return str(code), expires_s, self._addresses(port)

    def close(self) -> None:
        self._desk.close()

    def _closed(self, why: Closed) -> None:
        if why is not Closed.REPLACED:  # the announcement is the next code's already
            self._announcer.withdraw_pairing()
        if why in SENTENCES:
            self._say(SENTENCES[why])
