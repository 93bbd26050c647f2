"""Codes for new devices: the pairing port, its announcement, and what the user hears of both.

Owns the life of one code at a time. The desk does the talking.
"""

from __future__ import annotations

import logging
import secrets
import threading
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
    """Thread-safe; `hosts` gives where to listen, `addresses` where a port is reached."""

    def __init__(
        self,
        hosts: Callable[[], Sequence[str]],
        *,
        admit: Callable[[bytes], pairing_pb2.Admission],
        addresses: Callable[[int], tuple[Address, ...]],
        announcer: Announcer,
        say: Callable[[str], None],
    ) -> None:
        self._addresses = addresses
        self._announcer = announcer
        self._say = say
        self._inviting = threading.Lock()  # what is announced is the code that lives
        self._desk = PairingDesk(hosts, admit=admit, on_closed=self._closed)

    def invite(self) -> tuple[str, float, tuple[Address, ...]]:
        """Make a code; gives it, how long it lives, and where the pairing port is open."""
        with self._inviting:
            made = self._desk.invite()
            self._announcer.announce_pairing(secrets.token_hex(PAIRING_ID_BYTES), made.port)
            if self._desk.port != made.port:  # it was over before it was announced
                self._announcer.withdraw_pairing()
                raise PeerError(f"the code {made.code} was void at once; ask for another one")
        return str(made.code), made.lifetime_s, self._addresses(made.port)

    def close(self) -> None:
        self._desk.close()

    def _closed(self, why: Closed) -> None:
        if why is not Closed.REPLACED:  # the announcement is the next code's already
            self._announcer.withdraw_pairing()
        if why in SENTENCES:
            self._say(SENTENCES[why])
