"""Weights over the network: what arrives is what the manifest says, or nothing is given."""

from __future__ import annotations

import hashlib
import os
import time
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import pytest

from exo_train.errors import ConfigError, ModelError, PeerLostError, ProtocolError
from exo_train.models.manifest import build_manifest
from exo_train.models.open import open_model
from exo_train.models.packed import Packing
from exo_train.models.tensors import TensorInfo
from exo_train.peer import Address
from exo_train.transport.channel import bind, new_server
from exo_train.transport.weight_cache import MAX_PART_AGE_S, WeightCache
from exo_train.transport.weight_server import FETCH_METHOD, MAX_NAMES, WeightServer
from exo_train.transport.weights import RemoteSource
from exo_train.wire.codec import encode_weight
from tests.packed_models import make_packed_model

DATA = {
    "embed": os.urandom(3_000_001),
    "layer.0": os.urandom(70_000),
    "layer.1": os.urandom(70_000),
    "empty": b"",
}


@dataclass
class MemorySource:
    """A model in memory; `reads` lists what was asked for."""

    tensors: dict[str, bytes]
    reads: list[str] = field(default_factory=list)

    @property
    def infos(self) -> dict[str, TensorInfo]:
        return {
            name: TensorInfo(name=name, encoding="BF16", shape=(), num_bytes=len(data))
            for name, data in self.tensors.items()
        }

    def read(self, name: str) -> bytes:
        self.reads.append(name)
        if name == "layer.1" and b"unreadable" in self.tensors.values():
            raise ModelError("model.safetensors ends early")
        return self.tensors[name]


@pytest.fixture
def model() -> MemorySource:
    return MemorySource(dict(DATA))


@pytest.fixture
def server(model: MemorySource):
    with WeightServer(["127.0.0.1"]) as server:
        server.register("secret", model)
        yield server


def remote(addresses, folder: Path, *, token: str = "secret", **options) -> RemoteSource:
    return RemoteSource(
        addresses,
        peer="mac",
        token=token,
        infos=MemorySource(DATA).infos,
        digests={name: hashlib.sha256(data).hexdigest() for name, data in DATA.items()},
        cache=WeightCache(folder, max_bytes=options.pop("max_bytes", 1 << 30)),
        **options,
    )


def cache_file(folder: Path, name: str) -> Path:
    digest = hashlib.sha256(DATA[name]).hexdigest()
    return folder / digest[:2] / digest


def test_tensors_are_fetched_once_and_then_read_from_the_cache(server, model, tmp_path) -> None:
    source = remote(server.addresses, tmp_path)
    progress: list[int] = []
    source.prefetch(["embed", "layer.0", "empty"], on_progress=progress.append)
    assert model.reads == ["embed", "layer.0", "empty"]
    assert sum(progress) == source.fetched_bytes == 3_070_001
    assert {name: source.read(name) for name in DATA} == DATA
    assert model.reads == ["embed", "layer.0", "empty", "layer.1"]
    assert source.cached_bytes == 0
    server.close()
    again = remote(server.addresses, tmp_path)
    again.prefetch(list(DATA))
    assert {name: again.read(name) for name in DATA} == DATA
    assert (again.fetched_bytes, again.cached_bytes) == (0, 3_140_001)


@pytest.mark.parametrize("damage", ["flip", "cut", "empty"])
def test_a_damaged_cache_entry_is_fetched_once_more(server, model, tmp_path, damage) -> None:
    source = remote(server.addresses, tmp_path)
    source.read("embed")
    path = cache_file(tmp_path, "embed")
    good = path.read_bytes()
    path.write_bytes(
        {"flip": good[:-1] + bytes([good[-1] ^ 1]), "cut": good[:9], "empty": b""}[damage]
    )
    assert source.read("embed") == DATA["embed"]
    assert model.reads == ["embed", "embed"]
    assert path.read_bytes() == DATA["embed"]


def test_a_tensor_that_is_not_the_manifests_is_never_given(server, model, tmp_path) -> None:
    model.tensors["layer.0"] = bytes(70_000)
    source = remote(server.addresses, tmp_path)
    with pytest.raises(
        ModelError, match=r"'layer.0' from mac \(127\.0\.0\.1:\d+: .*SHA-256 is not"
    ):
        source.read("layer.0")
    assert model.reads == ["layer.0"] * 2
    assert not list(tmp_path.glob("*/*"))
    model.tensors["layer.0"] = DATA["layer.0"]
    assert source.read("layer.0") == DATA["layer.0"]


def test_a_wrong_size_is_refused_before_it_is_stored(server, model, tmp_path) -> None:
    model.tensors["layer.0"] = bytes(70_001)
    with pytest.raises(ProtocolError, match=r"70001 bytes\); expected byte 0 of 'layer.0' .*70000"):
        remote(server.addresses, tmp_path).read("layer.0")
    assert not list(tmp_path.glob("*/*"))


@pytest.mark.parametrize("token", ["", "guess", "secret2"])
def test_a_wrong_token_gets_nothing(server, model, tmp_path, token) -> None:
    with pytest.raises(ProtocolError, match=r"mac refused to give weights .*unauthenticated"):
        remote(server.addresses, tmp_path, token=token).read("embed")
    assert model.reads == []


def test_only_registered_names_are_served_and_only_while_registered(
    server, model, tmp_path
) -> None:
    server.register("stage", model, ["layer.0"])
    source = remote(server.addresses, tmp_path, token="stage")
    with pytest.raises(ProtocolError, match=r"tensor 'layer\.1' is not served"):
        source.prefetch(["layer.0", "layer.1"])
    assert model.reads == []
    assert source.read("layer.0") == DATA["layer.0"]
    server.unregister("stage")
    with pytest.raises(ProtocolError, match="no model is served"):
        remote(server.addresses, tmp_path / "other", token="stage").read("layer.0")
    with pytest.raises(ModelError, match="Cannot serve tensor 'nope'"):
        server.register("x", model, ["nope"])


def test_an_unreadable_model_on_the_giving_device_is_named(server, model, tmp_path) -> None:
    model.tensors["x"] = b"unreadable"
    source = remote(server.addresses, tmp_path)
    with pytest.raises(ModelError, match=r"mac cannot read its model .*ends early"):
        source.prefetch(["layer.0", "layer.1"])
    assert cache_file(tmp_path, "layer.0").exists()


def test_the_next_address_is_tried_and_nothing_whole_is_fetched_twice(model, tmp_path) -> None:
    dying = _server_that(_first_tensor_then_break)
    with WeightServer(["127.0.0.1"]) as server:
        server.register("secret", model)
        source = remote([dying[1], *server.addresses], tmp_path)
        source.prefetch(["embed", "layer.0"])
    assert model.reads == ["layer.0"]
    assert source.read("embed") == DATA["embed"]
    dying[0].stop(0).wait()


def test_a_silent_giver_is_given_up_with_its_name(tmp_path) -> None:
    server, address = _server_that(_silence)
    source = remote([address], tmp_path, stall_timeout_s=0.3)
    start_s = time.monotonic()
    with pytest.raises(PeerLostError, match=r"'embed' from mac .*nothing came for 0\.3 s"):
        source.prefetch(["embed", "layer.0"])
    assert time.monotonic() - start_s < 2.5
    server.stop(0).wait()


def test_an_unreachable_giver_is_named(tmp_path) -> None:
    source = remote([Address("127.0.0.1", 1)], tmp_path)
    with pytest.raises(PeerLostError, match=r"'embed' from mac \(127.0.0.1:1: .*[Cc]onnection"):
        source.read("embed")


def _first_tensor_then_break():
    yield from encode_weight("embed", "BF16", DATA["embed"])
    raise grpc.RpcError


def _silence():
    time.sleep(1)
    yield from ()


def _server_that(answer):
    def serve(request, context):
        try:
            yield from answer()
        except grpc.RpcError:
            context.abort(grpc.StatusCode.UNAVAILABLE, "the disk went away")

    handler = grpc.unary_stream_rpc_method_handler(serve)
    service, method = FETCH_METHOD.strip("/").split("/")
    handlers = [grpc.method_handlers_generic_handler(service, {method: handler})]
    server = new_server(max_workers=4, handlers=handlers)
    port = bind(server, "127.0.0.1")
    server.start()
    return server, Address("127.0.0.1", port)


def test_digests_that_could_be_paths_are_refused(tmp_path) -> None:
    infos = MemorySource({"a": b""}).infos
    for digest in ("../../etc/passwd", "AB" * 32, ""):
        with pytest.raises(ModelError, match="no SHA-256 for tensor 'a'"):
            RemoteSource(
                [],
                peer="mac",
                token="",
                infos=infos,
                digests={"a": digest},
                cache=WeightCache(tmp_path),
            )


def test_names_outside_the_manifest_and_huge_requests_are_refused(server, tmp_path) -> None:
    source = remote(server.addresses, tmp_path)
    with pytest.raises(ModelError, match=r"'\.\./\.\./x' is not in the manifest"):
        source.read("../../x")
    with pytest.raises(ProtocolError, match=f"{MAX_NAMES + 1} names in one request"):
        source._fetch_missing(["embed"] * (MAX_NAMES + 1))


def test_the_cache_stays_below_its_cap_and_drops_what_was_unused_longest(server, tmp_path) -> None:
    source = remote(server.addresses, tmp_path, max_bytes=3_100_000)
    source.prefetch(["layer.0", "embed"])
    for age_s, name in ((300, "layer.0"), (200, "embed")):
        os.utime(cache_file(tmp_path, name), (time.time() - age_s,) * 2)
    source.read("layer.0")  # now the youngest
    source.read("layer.1")
    kept = {name for name in DATA if cache_file(tmp_path, name).exists()}
    assert kept == {"layer.0", "layer.1"}


def test_files_of_a_crashed_fetch_are_cleared(server, tmp_path) -> None:
    folder = tmp_path / "ab"
    folder.mkdir()
    for name, age_s in (("old.part", MAX_PART_AGE_S + 60), ("new.part", 60)):
        (folder / name).write_bytes(b"x")
        os.utime(folder / name, (time.time() - age_s,) * 2)
    remote(server.addresses, tmp_path).read("layer.0")
    assert sorted(path.name for path in folder.iterdir()) == ["new.part"]


def test_a_cache_that_cannot_be_written_names_the_folder(server, tmp_path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(ConfigError, match=r"Cannot write the weight cache .*file"):
        remote(server.addresses, blocked).read("layer.0")


def test_a_packed_matrix_travels_with_its_scales(tmp_path) -> None:
    """A stage fetches its own layer's tensors, and they are trained as on the giver's disk."""
    path = make_packed_model(tmp_path / "model", Packing(bits=4, group_size=64), num_layers=2)
    spec, source = open_model(path)
    manifest = build_manifest(source, spec, cache_dir=None)
    mine = manifest.subset(start=1, end=2, embedding=False, head=False)
    with WeightServer(["127.0.0.1"]) as server:
        server.register("secret", source)
        fetching = RemoteSource(
            server.addresses,
            peer="mac",
            token="secret",
            infos=mine.infos,
            digests=mine.digests,
            cache=WeightCache(tmp_path / "cache", max_bytes=1 << 30),
        )
        fetching.prefetch(list(mine.infos))
    name = "model.layers.1.self_attn.q_proj.weight"
    assert mine.infos[name].encoding == "AFFINE:4:64:F32"
    assert {name: fetching.read(name) for name in mine.infos} == {
        name: source.read(name) for name in mine.infos
    }
    assert fetching.fetched_bytes == sum(info.num_bytes for info in mine.infos.values())
