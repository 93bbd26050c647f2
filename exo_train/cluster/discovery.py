"""mDNS: says that this agent is here, and hears of others.

Owns the zeroconf objects. Must not decide anything: what it hears are suggestions whom to dial.
The record carries a node id, port, cluster tag and protocol version, nothing else.
"""

from __future__ import annotations

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
from exo_train.peer import Address, NodeId

SERVICE_TYPE = "_exo-train._tcp.local."
RESOLVE_TIMEOUT_MS = 3000
MAX_PENDING_NAMES = 256
MAX_ADDRESSES = 16

OnSeen = Callable[[NodeId, str, tuple[Address, ...]], None]

log = logging.getLogger(__name__)


class Discovery:
    """Announces one agent and reports others as (node id, cluster tag, addresses).

    `on_seen` is called from this object's own thread.
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
        self._names: queue.Queue[str | None] = queue.Queue(MAX_PENDING_NAMES)
        self._zeroconf = Zeroconf(
            interfaces=[a.host for a in addresses if a.is_ipv4] or None,  # type: ignore[arg-type]
            ip_version=IPVersion.V4Only if any(a.is_ipv4 for a in addresses) else IPVersion.V6Only,
        )
        self._info = ServiceInfo(
            SERVICE_TYPE,
            f"{node_id}.{SERVICE_TYPE}",
            parsed_addresses=[a.host.split("%")[0] for a in addresses],
            port=port,
            properties={"id": node_id, "cluster": cluster, "v": str(protocol)},
            server=f"{node_id}.local.",
        )
        self._zeroconf.register_service(self._info)
        self._thread = threading.Thread(target=self._resolve_all, name="discovery", daemon=True)
        self._thread.start()
        self._browser = ServiceBrowser(
            self._zeroconf, SERVICE_TYPE, handlers=[self._on_state_change]
        )

    def close(self) -> None:
        """Say goodbye on the network and stop."""
        self._browser.cancel()
        self._names.put(None)
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
        try:
            self._names.put_nowait(name)
        except queue.Full:
            log.warning("too many mDNS names at once; '%s' is looked up later", name)

    def _resolve_all(self) -> None:
        while (name := self._names.get()) is not None:
            try:
                info = self._zeroconf.get_service_info(SERVICE_TYPE, name, RESOLVE_TIMEOUT_MS)
            except (ZeroconfError, OSError, RuntimeError) as error:
                log.warning("mDNS look-up of '%s' failed: %s", name, error)
                continue
            if info is not None:
                self._report(info)

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


def _needs_zone(host: str) -> bool:
    parsed = ipaddress.ip_address(host.split("%")[0])
    return parsed.version == 6 and parsed.is_link_local and "%" not in host
