"""An agent's home directory: its identity and cluster, and the running agent's endpoint.

Owns the files under EXO_TRAIN_HOME and the lock that keeps two agents out of one home. Must not
talk to the network, nor decide who is a member.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import filelock
import platformdirs
import psutil

from exo_train.cluster.roster import Roster, RosterState
from exo_train.errors import ConfigError, ProtocolError
from exo_train.identity import Identity, check_identity, found_cluster, is_node_id
from exo_train.peer import Address, NodeId, has_control_characters, short_id

MAX_NAME_CHARS = 60
# A full roster, as JSON, has about a megabyte.
MAX_STATE_FILE_BYTES = 4 << 20
MAX_REMEMBERED_PEERS = 32
MAX_REMEMBERED_ADDRESSES = 16  # of each
CLAIM_TIMEOUT_S = 10.0
_MEMBERSHIP_FILES = ("peers.json", "roster.json", "cluster.json")


@dataclass(frozen=True, slots=True)
class AgentEndpoint:
    """How commands of the same home reach the running agent: loopback port and token."""

    pid: int
    started_s: float  # the process' start time, so that a reused pid is not taken for it
    local_port: int
    control_port: int
    token: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RememberedPeer:
    """A member met earlier: it has a name, and can be dialled, while it is away."""

    node_id: NodeId
    name: str
    addresses: tuple[Address, ...]  # where it answered, latest first


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
    def replicas(self) -> Path:
        """Where copies of other devices' runs lie, each laid out like a run's own directory."""
        return self.path / "replicas"

    def identity(self) -> Identity | None:
        """Give this device's identity; None when it belongs to no cluster.

        Raises ConfigError when the file is damaged: a new identity in its place would be a
        stranger to the other members, and nobody would know why.
        """
        path = self.path / "cluster.json"
        if not path.exists() and not (self.path / "roster.json").exists():
            return None
        stored = self._read("cluster.json")
        try:
            identity = Identity(
                node_id=NodeId(str(stored["node_id"])),
                cluster=str(stored["cluster"]),
                key_pem=str(stored["key"]).encode("ascii"),
                certificate=bytes.fromhex(stored["certificate"]),
                authority_certificate=bytes.fromhex(stored["authority_certificate"]),
                authority_key=bytes.fromhex(stored["authority_key"]),
            )
            check_identity(identity)
        except (KeyError, TypeError, ValueError):
            raise _damaged(path, "it cannot be read") from None
        except ProtocolError as error:
            raise _damaged(path, str(error)) from None
        return identity

    def paired_identity(self) -> Identity:
        """Give this device's identity; raises ConfigError when it belongs to no cluster."""
        identity = self.identity()
        if identity is None:
            raise ConfigError(
                "this device belongs to no cluster; run `exo-train join`, or `exo-train join "
                "--code CODE` with a code of another device"
            )
        return identity

    def found(self) -> Identity:
        """Give this device's identity; makes a cluster, and this its first member, at need."""
        with self._lock():
            identity = self.identity()
            if identity is None:
                identity = found_cluster()
                self.store_membership(identity, Roster.of(identity).state())
            return identity

    def store_membership(self, identity: Identity, state: RosterState) -> None:
        """Write down which cluster this device belongs to, and who else does."""
        # The identity last: without a roster it could trust nobody, and would not say why.
        self.save_roster(Roster.of(identity, state))
        self._write(
            "cluster.json",
            {
                "node_id": identity.node_id,
                "cluster": identity.cluster,
                "key": identity.key_pem.decode("ascii"),
                "certificate": identity.certificate.hex(),
                "authority_certificate": identity.authority_certificate.hex(),
                "authority_key": identity.authority_key.hex(),
            },
        )

    def roster(self, identity: Identity) -> Roster:
        """Give the roster as saved last.

        Raises ConfigError when it is damaged: the removals in it would be forgotten.
        """
        path = self.path / "roster.json"
        stored = self._read("roster.json")
        if stored.get("cluster") != identity.cluster:
            raise _damaged(path, f"it is not of cluster {identity.cluster}")
        try:
            return Roster.of(identity, RosterState.from_json(stored))
        except ProtocolError as error:
            raise _damaged(path, str(error)) from None

    def save_roster(self, roster: Roster) -> None:
        self._write("roster.json", {"cluster": roster.cluster, **roster.state().to_json()})

    def has_membership_files(self) -> bool:
        """Tell whether there is anything to forget, damaged or not."""
        return any((self.path / name).exists() for name in _MEMBERSHIP_FILES)

    def forget_membership(self) -> None:
        """Delete keys, roster and remembered peers; the count of starts stays.

        A removal is for ever, so whoever comes back comes with a new key.
        """
        for name in _MEMBERSHIP_FILES:
            self._delete(name)
            for unfinished in self.path.glob(f".{name}.*"):  # a power cut left it, maybe with a key
                self._delete(unfinished.name)

    def next_incarnation(self) -> int:
        """Count a start of the agent; survives restarts and changes of cluster."""
        node = self._read("node.json")
        stored = node.get("incarnation")
        incarnation = stored + 1 if type(stored) is int and stored >= 0 else 1
        self._write("node.json", {**node, "incarnation": incarnation})
        return incarnation

    def device_name(self, wanted: str | None = None) -> str:
        """Give the name that others see: the wanted one, which is remembered, else the last one.

        So an agent that `train` starts by itself is called as `join` called it. Raises ConfigError
        when the wanted one cannot be shown.
        """
        node = self._read("node.json")
        if wanted:
            name = clean_name(wanted)
            if node.get("name") != name:
                self._write("node.json", {**node, "name": name})
            return name
        stored = node.get("name")
        if isinstance(stored, str):
            with contextlib.suppress(ConfigError):
                return clean_name(stored)
        return default_device_name()

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
                    "started_s": start_mark(psutil.Process()),
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

    def remembered_peers(self) -> tuple[RememberedPeer, ...]:
        """Give the members met earlier, newest first; damaged entries are left out."""
        stored = self._read("peers.json").get("peers")
        entries = stored if isinstance(stored, list) else []
        peers = [peer for entry in entries if (peer := _read_peer(entry)) is not None]
        return _newest_of_each(peers)

    def remembered_names(self) -> dict[NodeId, str]:
        """Give the names of the members met earlier."""
        return {peer.node_id: peer.name for peer in self.remembered_peers()}

    def remember_peers(self, peers: Sequence[RememberedPeer]) -> None:
        """Put `peers` before those met earlier; whoever is away today may be back tomorrow."""
        before = self.remembered_peers()
        after = _newest_of_each([*(_cleaned(peer) for peer in peers), *before])
        if after != before:
            entries = [
                {
                    "node_id": peer.node_id,
                    "name": peer.name,
                    "addresses": [str(address) for address in peer.addresses],
                }
                for peer in after
            ]
            self._write("peers.json", {"peers": entries})

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

    def _delete(self, name: str) -> None:
        try:
            (self.path / name).unlink(missing_ok=True)
        except OSError as error:
            raise _cannot_write(self.path / name, error) from None

    def _write(self, name: str, content: Mapping[str, Any]) -> None:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            temporary = self.path / f".{name}.{os.getpid()}.{threading.get_ident()}"
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


def _cleaned(peer: RememberedPeer) -> RememberedPeer:
    """Keep of what another device says of itself only what may be shown and is bounded."""
    try:
        name = clean_name(peer.name)
    except ConfigError:
        name = short_id(peer.node_id)
    addresses = tuple(dict.fromkeys(peer.addresses))[:MAX_REMEMBERED_ADDRESSES]
    return RememberedPeer(node_id=peer.node_id, name=name, addresses=addresses)


def _read_peer(entry: object) -> RememberedPeer | None:
    if not isinstance(entry, dict):
        return None
    try:
        return _cleaned(
            RememberedPeer(
                node_id=NodeId(str(entry["node_id"])),
                name=str(entry["name"]),
                addresses=tuple(Address.parse(text) for text in entry["addresses"]),
            )
        )
    except (KeyError, TypeError, AttributeError, ConfigError):
        return None


def _newest_of_each(peers: Sequence[RememberedPeer]) -> tuple[RememberedPeer, ...]:
    """Keep the first entry of each id, and no more than fit."""
    newest: dict[NodeId, RememberedPeer] = {}
    for peer in peers:
        if is_node_id(peer.node_id):
            newest.setdefault(peer.node_id, peer)
    return tuple(newest.values())[:MAX_REMEMBERED_PEERS]


def _damaged(path: Path, reason: str) -> ConfigError:
    return ConfigError(
        f"{path} is damaged ({reason}), so this device does not know whom to trust; restore the "
        f"file from a backup, or run `exo-train leave` and pair this device anew with "
        f"`exo-train join --code CODE`"
    )


def _cannot_write(path: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"cannot write {path}: {error.strerror or error}; "
        f"choose another directory with EXO_TRAIN_HOME"
    )


def start_mark(process: psutil.Process) -> float:
    """Give when a process started, on a clock that no correction of the time moves.

    On Linux the system knows seconds since boot, and psutil adds the wall clock's.
    """
    started_s = process.create_time()
    return started_s - psutil.boot_time() if sys.platform == "linux" else started_s


def _is_running(endpoint: AgentEndpoint) -> bool:
    try:
        process = psutil.Process(endpoint.pid)
        return abs(start_mark(process) - endpoint.started_s) < 2.0
    except psutil.Error:
        return False
