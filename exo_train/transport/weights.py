"""The taking end of weights: a TensorSource whose tensors lie on another device.

Owns fetching, its retries and deadlines, and the check of every tensor against the manifest's
SHA-256. Must not decode tensors.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence

import grpc

from exo_train.errors import ExoTrainError, ModelError, PeerError, PeerLostError, ProtocolError
from exo_train.models.tensors import TensorInfo
from exo_train.peer import Address
from exo_train.transport.channel import open_channel
from exo_train.transport.grpc_link import break_reason
from exo_train.transport.stalling import StallGuard
from exo_train.transport.stopping import Stopper
from exo_train.transport.weight_cache import WeightCache
from exo_train.transport.weight_server import FETCH_METHOD, MAX_NAMES
from exo_train.wire.codec import decode_weight
from exo_train.wire.pb import data_pb2

# Each address gets this many tries; what arrived whole in one try is not fetched again.
FETCH_ROUNDS = 2
RETRY_PAUSE_S = 0.2
# A slow link is fine, a silent one is not.
STALL_TIMEOUT_S = 30.0
SHA256_PATTERN = re.compile(r"[0-9a-f]{64}")
REFUSALS = (
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.INVALID_ARGUMENT,
)


class _DamagedError(PeerError):
    """A tensor arrived, but its bytes are not the manifest's."""


class RemoteSource:
    """Fetches what the cache does not have; `peer` names the giving device in messages.

    When `stopper` stops, whoever reads or fetches gets its error.
    """

    def __init__(
        self,
        addresses: Sequence[Address],
        *,
        peer: str,
        token: str,
        infos: Mapping[str, TensorInfo],
        digests: Mapping[str, str],
        cache: WeightCache,
        credentials: grpc.ChannelCredentials | None = None,
        tls_name: str = "",
        stall_timeout_s: float = STALL_TIMEOUT_S,
        stopper: Stopper | None = None,
    ) -> None:
        for name in infos:
            # The digest becomes a file name.
            if not SHA256_PATTERN.fullmatch(digests.get(name, "")):
                raise ModelError(f"The manifest has no SHA-256 for tensor '{name}'")
        self._addresses = tuple(addresses)
        self._peer = peer
        self._token = token
        self._infos = infos
        self._digests = digests
        self._cache = cache
        self._credentials = credentials
        self._tls_name = tls_name
        self._stall_timeout_s = stall_timeout_s
        self._stopper = stopper or Stopper()
        self._fetched_bytes = 0
        self._fetched: set[str] = set()
        self._cached: set[str] = set()
        self._lock = threading.Lock()

    @property
    def infos(self) -> Mapping[str, TensorInfo]:
        return self._infos

    @property
    def fetched_bytes(self) -> int:
        """Tensor bytes that came over the network, repeated ones included."""
        return self._fetched_bytes

    @property
    def cached_bytes(self) -> int:
        """Bytes of tensors used so far that lay in the cache before."""
        return sum(self._infos[name].num_bytes for name in self._cached - self._fetched)

    def read(self, name: str) -> bytes:
        """Give verified bytes; a damaged cache entry is fetched once more.

        Raises ModelError when the tensor is unknown or stays damaged, PeerLostError when the
        device cannot be reached, ProtocolError when it refuses.
        """
        self._stopper.check()
        info = self._info(name)
        data = self._cache.read(self._digests[name], info.num_bytes)
        if data is None:
            self._fetch_missing([name])
            data = self._cache.read(self._digests[name], info.num_bytes)
        else:
            self._cached.add(name)
        if data is None:
            raise ModelError(
                f"Tensor '{name}' was fetched from {self._peer} but cannot be read back from the "
                "cache; check the disk"
            )
        return data

    def prefetch(
        self, names: Sequence[str], *, on_progress: Callable[[int], None] = lambda num_bytes: None
    ) -> None:
        """Fetch all that the cache lacks in one stream; `on_progress` gets bytes as they come."""
        missing = []
        for name in names:
            info = self._info(name)
            if self._cache.has(self._digests[name], info.num_bytes):
                self._cached.add(name)
            else:
                missing.append(name)
        for start in range(0, len(missing), MAX_NAMES):
            self._fetch_missing(missing[start : start + MAX_NAMES], on_progress)

    def _info(self, name: str) -> TensorInfo:
        if name not in self._infos:
            raise ModelError(f"Tensor '{name}' is not in the manifest of {self._peer}")
        return self._infos[name]

    def _fetch_missing(
        self, names: Sequence[str], on_progress: Callable[[int], None] = lambda num_bytes: None
    ) -> None:
        missing = list(names)
        failures: dict[Address, PeerError] = {}
        with self._lock:
            for address in self._addresses * FETCH_ROUNDS:
                try:
                    self._fetch(address, missing, on_progress)
                    return
                except ProtocolError:
                    raise
                except PeerError as error:
                    failures[address] = error
                self._stopper.wait(RETRY_PAUSE_S)
        causes = "; ".join(f"{address}: {error}" for address, error in failures.items())
        sentence = f"Cannot fetch tensor '{missing[0]}' from {self._peer} ({causes})"
        if any(isinstance(error, _DamagedError) for error in failures.values()):
            raise ModelError(f"{sentence}; check the model's files on {self._peer}")
        raise PeerLostError(f"{sentence}; check that {self._peer} is awake and on the network")

    def _fetch(
        self, address: Address, missing: list[str], on_progress: Callable[[int], None]
    ) -> None:
        """Fetch in one stream; each name leaves `missing` when its file is committed."""
        request = data_pb2.FetchRequest(token=self._token, names=missing)
        with open_channel(
            address, credentials=self._credentials, tls_name=self._tls_name
        ) as channel:
            fetch = channel.unary_stream(
                FETCH_METHOD, request_serializer=bytes, response_deserializer=bytes
            )
            call = fetch(request.SerializeToString())
            guard = StallGuard(call.cancel, timeout_s=self._stall_timeout_s)
            try:
                with guard, self._stopper.calling(lambda reason: call.cancel()):  # type: ignore[no-untyped-call]
                    self._receive(guard.watched(iter(call)), missing, on_progress)
            except grpc.RpcError as error:
                self._stopper.check()
                raise self._failure(error, stalled=guard.stalled) from None
            finally:
                call.cancel()  # type: ignore[no-untyped-call]

    def _receive(
        self, messages: Iterator[bytes], missing: list[str], on_progress: Callable[[int], None]
    ) -> None:
        while missing:
            name = missing[0]
            digest = self._digests[name]
            with self._cache.pending(digest) as entry:
                for payload in self._payloads(messages, self._infos[name]):
                    entry.write(payload)
                    self._fetched_bytes += len(payload)
                    on_progress(len(payload))
                if not entry.commit():
                    raise _DamagedError(f"tensor '{name}' arrived, but its SHA-256 is not {digest}")
            self._fetched.add(missing.pop(0))

    def _payloads(self, messages: Iterator[bytes], info: TensorInfo) -> Iterator[memoryview]:
        """Give the chunks of one tensor, each checked against what the manifest says."""
        expected = (info.name, info.encoding, info.num_bytes)
        offset = 0
        for message in messages:
            chunk = decode_weight(message)
            if (chunk.name, chunk.encoding, chunk.total_bytes, chunk.offset) != (*expected, offset):
                raise ProtocolError(
                    f"{self._peer} sent byte {chunk.offset} of tensor '{chunk.name}' "
                    f"({chunk.encoding}, {chunk.total_bytes} bytes); expected byte {offset} of "
                    f"'{info.name}' ({info.encoding}, {info.num_bytes} bytes)"
                )
            yield chunk.payload
            offset += len(chunk.payload)
            if offset == info.num_bytes:
                return
        raise ProtocolError(
            f"{self._peer} ended after byte {offset} of {info.num_bytes} of tensor '{info.name}'"
        )

    def _failure(self, error: grpc.RpcError, *, stalled: bool) -> ExoTrainError:
        reason = break_reason(error)
        if stalled:
            return PeerError(f"nothing came for {self._stall_timeout_s:.1f} s")
        if isinstance(error, grpc.Call) and error.code() in REFUSALS:
            return ProtocolError(f"{self._peer} refused to give weights ({reason})")
        if isinstance(error, grpc.Call) and error.code() is grpc.StatusCode.DATA_LOSS:
            return ModelError(f"{self._peer} cannot read its model ({reason})")
        return PeerError(reason)
