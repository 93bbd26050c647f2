"""Whether a TCP connection to an address can be made at all, and if not, how it fails.

Owns the telling apart of a closed port, silence and no route. A connection proves nothing about
who answers.
"""

from __future__ import annotations

import enum
import errno
import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from exo_train.peer import Address

TIMEOUT_S = 1.5
MAX_ADDRESSES = 16


class Reach(enum.Enum):
    CONNECTED = "connected"
    REFUSED = "refused"  # nothing listens there, or a firewall rejects
    TIMED_OUT = "timed out"  # nothing came back
    NO_ROUTE = "no route"


def reach(address: Address, *, timeout_s: float = TIMEOUT_S) -> Reach:
    """Connect and close again."""
    try:
        with socket.create_connection((address.host, address.port), timeout_s):
            return Reach.CONNECTED
    except ConnectionError:
        return Reach.REFUSED
    except TimeoutError:
        return Reach.TIMED_OUT
    except OSError as error:
        return Reach.TIMED_OUT if error.errno == errno.ETIMEDOUT else Reach.NO_ROUTE


def reach_all(addresses: Sequence[Address], *, timeout_s: float = TIMEOUT_S) -> list[Reach]:
    """Try the addresses at once; the result is in their order."""
    wanted = list(addresses)[:MAX_ADDRESSES]
    if not wanted:
        return []
    with ThreadPoolExecutor(len(wanted), thread_name_prefix="reach") as pool:
        return list(pool.map(lambda address: reach(address, timeout_s=timeout_s), wanted))
