"""An agent's home directory: identity, cluster tag, the running agent's endpoint.

Owns the files under EXO_TRAIN_HOME and the lock that keeps two agents out of one home. Must not
talk to the network.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import filelock
import platformdirs
import psutil

from exo_train.errors import ConfigError
from exo_train.peer import NodeId, has_control_characters

MAX_NAME_CHARS = 60
MAX_STATE_FILE_BYTES = 64 * 1024
MAX_REMEMBERED_PEERS = 32
CLAIM_TIMEOUT_S = 10.0
DEFAULT_CLUSTER = "home"


@dataclass(frozen=True, slots=True)
class AgentEndpoint:
    """How commands of the same home reach the running agent: loopback port and token."""

    pid: int
    started_s: float  # the process' start time, so that a reused pid is not taken for it
    local_port: int
    control_port: int
    token: str


@dataclass(frozen=True, slots=True)
class Home:
    path: Path

    @property
    def cache(self) -> Path:
        return self.path / "cache"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def runs(self) -> Path:
        return self.path / "runs"

    @property
    def cluster(self) -> str:
        """The tag that keeps clusters on one network apart, until devices are paired."""
        tag = os.environ.get("EXO_TRAIN_CLUSTER", DEFAULT_CLUSTER)
        if not tag.isascii() or not tag.replace("-", "").isalnum() or len(tag) > 32:
            raise ConfigError(
                f"EXO_TRAIN_CLUSTER must be 1 to 32 letters, digits and dashes, got {tag!r}"
            )
        return tag

    def node_id(self) -> NodeId:
        """Give this home's id, made at the first call."""
        stored = self._read("node.json").get("node_id")
        if isinstance(stored, str) and len(stored) == 32:
            return NodeId(stored)
        made = secrets.token_hex(16)
        self._write("node.json", {"node_id": made, "incarnation": 0})
        return NodeId(made)

    def next_incarnation(self) -> int:
        """Count a start of the agent; survives restarts."""
        node_id = self.node_id()
        stored = self._read("node.json").get("incarnation")
        incarnation = stored + 1 if isinstance(stored, int) else 1
        self._write("node.json", {"node_id": node_id, "incarnation": incarnation})
        return incarnation

    def agent(self) -> AgentEndpoint | None:
        """Give the running agent's endpoint; None when none runs (a stale file is ignored)."""
        stored = self._read("agent.json")
        try:
            endpoint = AgentEndpoint(
                pid=int(stored["pid"]),
                started_s=float(stored["started_s"]),
                local_port=int(stored["local_port"]),
                control_port=int(stored["control_port"]),
                token=str(stored["token"]),
            )
        except (KeyError, TypeError, ValueError):
            return None
        return endpoint if _is_running(endpoint) else None

    def claim(self, *, local_port: int, control_port: int, token: str) -> None:
        """Write this process down as the home's agent; refused while another one runs."""
        with self._lock():
            self.check_free()
            self._write(
                "agent.json",
                {
                    "pid": os.getpid(),
                    "started_s": psutil.Process().create_time(),
                    "local_port": local_port,
                    "control_port": control_port,
                    "token": token,
                },
            )

    def check_free(self) -> None:
        """Raise ConfigError, naming the process, while another one is this home's agent."""
        other = self.agent()
        if other is not None and other.pid != os.getpid():
            raise ConfigError(
                f"an agent of this home already runs (pid {other.pid}, port {other.control_port}); "
                f"stop it, or give this one another home with EXO_TRAIN_HOME"
            )

    def release(self) -> None:
        """Take this process' claim back; another one's stays."""
        other = self.agent()
        if other is not None and other.pid != os.getpid():
            return
        with contextlib.suppress(FileNotFoundError):
            (self.path / "agent.json").unlink()

    def remembered_peers(self) -> list[str]:
        """Give HOST:PORT of peers met earlier, newest first."""
        peers = self._read("peers.json").get("peers", [])
        known = [p for p in peers if isinstance(p, str)] if isinstance(peers, list) else []
        return known[:MAX_REMEMBERED_PEERS]

    def remember_peers(self, peers: list[str]) -> None:
        """Put `peers` before those met earlier; whoever is away today may be back tomorrow."""
        known = list(dict.fromkeys([*peers, *self.remembered_peers()]))[:MAX_REMEMBERED_PEERS]
        if known != self.remembered_peers():
            self._write("peers.json", {"peers": known})

    @contextlib.contextmanager
    def _lock(self) -> Iterator[None]:
        """Keep two agents that start at once from both finding the home free."""
        lock = filelock.FileLock(self.path / "agent.lock", timeout=CLAIM_TIMEOUT_S)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock.acquire()
        except (OSError, filelock.Timeout) as error:
            raise _cannot_write(self.path / "agent.lock", error) from None
        try:
            yield
        finally:
            lock.release()

    def _read(self, name: str) -> dict[str, Any]:
        path = self.path / name
        try:
            if path.stat().st_size > MAX_STATE_FILE_BYTES:
                return {}
            content = json.loads(path.read_text("utf-8"))
        except FileNotFoundError:
            return {}
        except (OSError, ValueError):
            return {}  # torn by a crash: made anew
        return content if isinstance(content, dict) else {}

    def _write(self, name: str, content: Mapping[str, Any]) -> None:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            temporary = self.path / f".{name}.{os.getpid()}"
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                json.dump(content, file)
                file.flush()
                os.fsync(file.fileno())  # a power cut must not cost this device its identity
            temporary.replace(self.path / name)
        except OSError as error:
            raise _cannot_write(self.path / name, error) from None


def open_home() -> Home:
    """Give the home that EXO_TRAIN_HOME names, else the platform's user-data directory."""
    given = os.environ.get("EXO_TRAIN_HOME")
    return Home(Path(given) if given else Path(platformdirs.user_data_dir("exo-train", False)))


def default_device_name() -> str:
    return clean_name(socket.gethostname().removesuffix(".local") or "device")


def clean_name(name: str) -> str:
    """Refuse control characters and cut to what fits; names are for people, not for dialling."""
    if has_control_characters(name):
        raise ConfigError(f"the name {name!r} has control characters; choose one without")
    name = name.strip()
    if not name:
        raise ConfigError("the name is empty; choose one with --name")
    return name[:MAX_NAME_CHARS].strip()


def _cannot_write(path: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"cannot write {path}: {error.strerror or error}; "
        f"choose another directory with EXO_TRAIN_HOME"
    )


def _is_running(endpoint: AgentEndpoint) -> bool:
    try:
        process = psutil.Process(endpoint.pid)
        return abs(process.create_time() - endpoint.started_s) < 2.0
    except psutil.Error:
        return False
