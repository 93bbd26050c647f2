"""mDNS: says that this agent is here, and hears of others.

Owns the zeroconf objects. Must not decide anything: what it hears are suggestions whom to dial.
The record carries a node id, port, cluster tag and protocol version, nothing else.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import queue
import threading
from collections.abc import Callable

from zeroconf import (
    Error as ZeroconfError,
)
from zeroconf import (
    IPVersion,
    ServiceBrowser,
    ServiceInfo,
    ServiceStateChange,
    Zeroconf,
)

from exo_train.cluster.interfaces import LocalAddress
from exo_train.errors import PeerError
from exo_train.peer import Address, NodeId

SERVICE_TYPE = "_exo-train._tcp.local."
RESOLVE_TIMEOUT_MS = 3000
CLOSE_CHECK_S = 0.2
MAX_PENDING_NAMES = 256
MAX_ADDRESSES = 16
MAX_LOOKUPS = 5  # of one name, when the record comes without its details

OnSeen = Callable[[NodeId, str, tuple[Address, ...]], None]

log = logging.getLogger(__name__)


class Discovery:
    """Announces one agent on IPv4 and reports others as (node id, cluster tag, addresses).

    `on_seen` is called from this object's own thread. Making one takes a second: it asks the
    network whether the name is free. Raises PeerError when mDNS does not work.
    """

    def __init__(
        self,
        node_id: NodeId,
        *,
        cluster: str,
        protocol: int,
        port: int,
        addresses: list[LocalAddress],
        on_seen: OnSeen,
    ) -> None:
        self._node_id = node_id
        self._on_seen = on_seen
        self._names: queue.Queue[str] = queue.Queue(MAX_PENDING_NAMES)
        self._lookups: dict[str, int] = {}
        self._closing = False
        self._info = ServiceInfo(
            SERVICE_TYPE,
            f"{node_id}.{SERVICE_TYPE}",
            parsed_addresses=[a.host for a in addresses],
            port=port,
            properties={"id": node_id, "cluster": cluster, "v": str(protocol)},
            server=f"{node_id}.local.",
        )
        try:
            self._zeroconf = _open(addresses)
        except (OSError, ZeroconfError) as error:
            raise _does_not_work(error) from None
        try:
            self._zeroconf.register_service(self._info)
        except (OSError, ZeroconfError) as error:
            self._zeroconf.close()
            raise _does_not_work(error) from None
        self._thread = threading.Thread(target=self._resolve_all, name="discovery", daemon=True)
        self._thread.start()
        self._browser = ServiceBrowser(
            self._zeroconf, SERVICE_TYPE, handlers=[self._on_state_change]
        )

    def close(self) -> None:
        """Say goodbye on the network and stop."""
        self._closing = True
        self._browser.cancel()
        with contextlib.suppress(OSError, ZeroconfError):  # the network may be gone by now
            self._zeroconf.unregister_service(self._info)
        self._zeroconf.close()
        self._thread.join(timeout=5)

    def _on_state_change(
        self,
        zeroconf: Zeroconf,
        service_type: str,
        name: str,
        state_change: ServiceStateChange,
    ) -> None:
        if state_change is ServiceStateChange.Removed or name.startswith(self._node_id):
            return
        self._lookups.pop(name, None)
        self._look_up_later(name)

    def _look_up_later(self, name: str) -> None:
        try:
            self._names.put_nowait(name)
        except queue.Full:
            log.debug("too many mDNS names at once; '%s' is left out", name)

    def _resolve_all(self) -> None:
        while not self._closing:
            try:
                name = self._names.get(timeout=CLOSE_CHECK_S)
            except queue.Empty:
                continue
            try:
                info = self._zeroconf.get_service_info(SERVICE_TYPE, name, RESOLVE_TIMEOUT_MS)
            except (ZeroconfError, OSError, RuntimeError) as error:
                log.debug("mDNS look-up of '%s' failed: %s", name, error)
                info = None
            if info is not None:
                self._lookups.pop(name, None)
                self._report(info)
            elif (
                self._lookups.get(name, 0) < MAX_LOOKUPS and len(self._lookups) < MAX_PENDING_NAMES
            ):
                self._lookups[name] = self._lookups.get(name, 0) + 1
                self._look_up_later(name)

    def _report(self, info: ServiceInfo) -> None:
        """Pass on what a record says, if it has the shape of ours; it is not to be trusted."""
        properties = info.decoded_properties
        node_id, cluster = properties.get("id"), properties.get("cluster")
        if not node_id or len(node_id) != 32 or not info.port or cluster is None:
            return
        hosts = info.parsed_scoped_addresses()[:MAX_ADDRESSES]
        dialable = [h for h in hosts if not _needs_zone(h)]
        if dialable:
            addresses = tuple(Address(host, info.port) for host in dialable)
            self._on_seen(NodeId(node_id), cluster, addresses)


def _open(addresses: list[LocalAddress]) -> Zeroconf:
    logging.getLogger("zeroconf").addFilter(_log_in_one_line)
    return Zeroconf(interfaces=[a.host for a in addresses], ip_version=IPVersion.V4Only)


def _log_in_one_line(record: logging.LogRecord) -> bool:
    """Take over what zeroconf logs, with tracebacks, when an interface goes away."""
    log.info("mDNS: %s", record.getMessage().partition("\n")[0])
    return False


def _does_not_work(error: Exception) -> PeerError:
    return PeerError(
        f"mDNS does not work here ({type(error).__name__}: {error}); name a device with "
        f"--peer HOST:PORT"
    )


def _needs_zone(host: str) -> bool:
    parsed = ipaddress.ip_address(host.split("%")[0])
    return parsed.version == 6 and parsed.is_link_local and "%" not in host
