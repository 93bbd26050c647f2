"""The giving end of weights: serves encoded tensors of registered models.

Owns who may fetch what. Must not read files: a TensorSource does.
"""

from __future__ import annotations

import hmac
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import NoReturn

import grpc
from google.protobuf.message import DecodeError

from exo_train.errors import ExoTrainError, ModelError
from exo_train.models.tensors import TensorSource
from exo_train.peer import Address
from exo_train.transport.base import CLOSE_TIMEOUT_S
from exo_train.transport.channel import bind_all, new_server
from exo_train.transport.grpc_link import MAX_DETAILS_CHARS
from exo_train.transport.tls import Gate
from exo_train.wire.codec import encode_weight
from exo_train.wire.pb import data_pb2

FETCH_METHOD = "/exo_train.wire.Weights/Fetch"
# As many devices can fetch at once; more are refused and come again.
MAX_FETCHES = 16
MAX_NAMES = 4096
MAX_REQUEST_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class _Model:
    source: TensorSource
    names: frozenset[str]


class WeightServer:
    """Listens on its own ports with its own threads, so that control calls never queue behind it.

    It must be closed, or its threads keep the process alive.
    """

    def __init__(
        self,
        hosts: Sequence[str],
        *,
        credentials: grpc.ServerCredentials | None = None,
        gate: Gate | None = None,
    ) -> None:
        self._credentials = credentials
        self._gate = gate
        self._models: dict[str, _Model] = {}
        self._lock = threading.Lock()
        self._servers: list[grpc.Server] = []
        self.port = self._serve(hosts, 0)
        self.addresses = tuple(Address(host, self.port) for host in hosts)

    def __enter__(self) -> WeightServer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def register(
        self, token: str, source: TensorSource, names: Iterable[str] | None = None
    ) -> None:
        """Serve these tensors (all by default) to whoever shows the token."""
        wanted = frozenset(source.infos if names is None else names)
        if unknown := wanted - set(source.infos):
            raise ModelError(f"Cannot serve tensor '{min(unknown)}': the model has none")
        with self._lock:
            self._models[token] = _Model(source, wanted)

    def unregister(self, token: str) -> None:
        """Start no more fetches with this token; one under way goes on."""
        with self._lock:
            self._models.pop(token, None)

    def listen_also(self, hosts: Sequence[str]) -> None:
        """Listen on further hosts, at the same port; raises PeerError when it can on none."""
        self._serve(hosts, self.port)

    def close(self) -> None:
        for stopping in [server.stop(CLOSE_TIMEOUT_S) for server in self._servers]:
            stopping.wait()

    def _serve(self, hosts: Sequence[str], port: int) -> int:
        handler = grpc.unary_stream_rpc_method_handler(self._fetch)
        service, method = FETCH_METHOD.strip("/").split("/")
        server = new_server(
            max_workers=MAX_FETCHES,
            max_rpcs=MAX_FETCHES,
            handlers=[grpc.method_handlers_generic_handler(service, {method: handler})],
            interceptors=[self._gate] if self._gate else [],
            name="weight-server",
        )
        bound = bind_all(server, hosts, port, credentials=self._credentials)
        server.start()
        self._servers.append(server)
        return bound

    def _fetch(self, message: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        request = data_pb2.FetchRequest()
        try:
            if len(message) > MAX_REQUEST_BYTES:
                raise DecodeError
            request.ParseFromString(message)
        except DecodeError:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "this is no FetchRequest")
        model = self._model(request.token)
        if model is None:
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "no model is served under this token")
        if len(request.names) > MAX_NAMES:
            _refuse(context, f"{len(request.names)} names in one request (limit {MAX_NAMES})")
        for name in request.names:
            if name not in model.names:
                _refuse(context, f"tensor '{name}' is not served")
        for name in request.names:
            try:
                data = model.source.read(name)
            except ExoTrainError as error:
                context.abort(grpc.StatusCode.DATA_LOSS, str(error)[:MAX_DETAILS_CHARS])
            yield from encode_weight(name, model.source.infos[name].encoding, data)

    def _model(self, token: str) -> _Model | None:
        with self._lock:
            models = list(self._models.items())
        for registered, model in models:
            if hmac.compare_digest(registered.encode(), token.encode()):
                return model
        return None


def _refuse(context: grpc.ServicerContext, sentence: str) -> NoReturn:
    context.abort(grpc.StatusCode.INVALID_ARGUMENT, sentence[:MAX_DETAILS_CHARS])
