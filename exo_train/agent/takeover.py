"""Going on with a run whose coordinator is gone, where this device keeps a copy of it.

Owns when that is, how often, and the driver that is started for it. Must not know how a run is
taken up: `exo-train train --resume` does that.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from exo_train.agent.meeting import Meeting
from exo_train.agent.sessions import Sessions, is_over
from exo_train.agent.succession import TIED_VARIABLE, Succession, read_succession
from exo_train.cluster.home import Home
from exo_train.errors import ConfigError, ExoTrainError
from exo_train.models.hub import kept_snapshot
from exo_train.models.manifest import build_manifest
from exo_train.models.open import open_model
from exo_train.peer import NodeId, devices_called
from exo_train.shell import command_line
from exo_train.train.rundir import SUMMARY_FILE, RunDir
from exo_train.wire.pb import control_pb2 as pb

# A coordinator that forms its ring anew may leave workers alone for a moment.
GRACE_S = 10.0
LOOK_S = 1.0
MAX_TAKEOVERS = 3
WINDOW_S = 600.0
END_TIMEOUT_S = 4.0  # for saving, when the agent ends
MAX_SAID = 64

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A live member, this device included, and the run that it takes part in."""

    node_id: NodeId
    name: str
    run: pb.RunFacts | None
    ended: tuple[pb.EndedRun, ...] = ()


def parts_of(node_id: NodeId, name: str, sessions: Sessions, meeting: Meeting) -> list[Part]:
    """Give this device, without a look at its hardware, and live members as they told last."""
    own = Part(node_id=node_id, name=name, run=sessions.facts(), ended=sessions.ended())
    told = [meeting.told(member.facts.node_id) for member in meeting.live()]
    others = [
        Part(node_id=t.facts.node_id, name=t.facts.name, run=t.run, ended=t.ended_runs)
        for t in told
        if t
    ]
    return [own, *others]


@dataclass(slots=True)
class _Watched:
    """A run that is kept here: since when it has no coordinator, and what was done about it."""

    alone_since_s: float | None = None
    is_handled: bool = False  # this death of its coordinator
    started_s: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_TAKEOVERS))
    driver: subprocess.Popen[bytes] | None = None


class Takeover:
    """A run is alone when members keep workers of it and no member's worker has a coordinator.

    When it stays so for GRACE_S, and this device has a copy of the run, its model and the user's
    leave, a driver is started: once for each death of a coordinator, at most MAX_TAKEOVERS times
    within WINDOW_S. It ends with the agent.
    """

    def __init__(
        self,
        home: Home,
        parts: Callable[[], Iterable[Part]],
        *,
        on_ended: Callable[[Mapping[str, int]], None] = lambda ended: None,
        say: Callable[[str], None] = log.warning,
        clock_s: Callable[[], float] = time.monotonic,
        command: tuple[str, ...] = (sys.executable, "-m", "exo_train"),
    ) -> None:
        self._home = home
        self._parts = parts
        self._on_ended = on_ended
        self._say = say
        self._clock_s = clock_s
        self._command = command
        self._watched: dict[str, _Watched] = {}
        self._said: dict[str, str] = {}  # by run id
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="takeover", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """End the drivers that were started; they save first, if that is quick."""
        self._closing.set()
        if self._thread.ident is not None:
            self._thread.join(END_TIMEOUT_S)
        running = [w.driver for w in self._watched.values() if w.driver is not None]
        for driver in running:
            _let_end(driver)
        until_s = time.monotonic() + END_TIMEOUT_S
        for driver in running:
            try:
                driver.wait(max(0.0, until_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                driver.kill()
                driver.wait()

    def sentences(self) -> list[str]:
        """Give what the user should know of runs that are kept here: the newest of each."""
        return list(self._said.values())

    def look(self) -> None:
        """Look at all runs once, and do what is due."""
        parts = list(self._parts())
        ended: dict[str, int] = {}
        for run in (run for part in parts for run in part.ended):
            ended[run.run_id] = max(run.generation, ended.get(run.run_id, 0))
        self._on_ended(ended)
        for run_id in {p.run.run_id for p in parts if p.run} | self._watched.keys():
            told = [
                p.run
                for p in parts
                if p.run is not None and p.run.run_id == run_id and not is_over(p.run, ended)
            ]
            is_led = any(not run.orphaned for run in told)
            folder = self._home.replicas / run_id
            if run_id not in self._watched and (is_led or read_succession(folder) is None):
                continue
            self._follow(run_id, folder, is_led=is_led, is_alone=bool(told) and not is_led)
            watched = self._watched[run_id]
            if watched.alone_since_s is None or watched.is_handled:
                continue
            if self._clock_s() - watched.alone_since_s >= GRACE_S:
                watched.is_handled = True
                self._take(folder, watched, {p.node_id: p.name for p in parts})

    def _follow(self, run_id: str, folder: Path, *, is_led: bool, is_alone: bool) -> None:
        watched = self._watched.setdefault(run_id, _Watched())
        if not is_alone:
            watched.alone_since_s = None
        elif watched.alone_since_s is None:
            watched.alone_since_s = self._clock_s()
        if is_led:
            watched.is_handled = False
        if watched.driver is not None and (code := watched.driver.poll()) is not None:
            _let_end(watched.driver)
            watched.driver = None
            again = command_line("exo-train", "train", "--resume", folder)
            self._tell(
                run_id,
                f"run {run_id}, taken over by this device, is done: {folder}"
                if code == 0
                else f"run {run_id} was taken over by this device, but ended with exit code "
                f"{code}; see {self._log_path(run_id)}; go on with: {again}",
            )

    def _take(self, folder: Path, watched: _Watched, names: Mapping[NodeId, str]) -> None:
        succession = read_succession(folder)
        if succession is None or not succession.wanted or _ended_well(folder):
            return
        run_id, now_s = folder.name, self._clock_s()
        starts = watched.started_s
        if len(starts) == MAX_TAKEOVERS and now_s - starts[0] < WINDOW_S:
            again = command_line("exo-train", "train", "--resume", folder)
            self._tell(
                run_id,
                f"run {run_id} was taken over {MAX_TAKEOVERS} times within "
                f"{WINDOW_S / 60:.0f} minutes and is left alone now; go on with: {again}",
            )
            return
        model = find_model(self._home, succession)
        if model is None:
            again = command_line("exo-train", "train", "--resume", folder, "MODEL")
            self._tell(
                run_id,
                f"this device could take over run {run_id}, but the model is only on "
                f"{succession.coordinator_name}; copy it here and start: {again}",
            )
            return
        if watched.driver is not None:  # it stands still, or it would lead the run
            watched.driver.kill()
            watched.driver.wait()
            _let_end(watched.driver)
        starts.append(now_s)
        watched.driver = self._start(folder, model, names)
        self._tell(
            run_id,
            f"{succession.coordinator_name}, which led run {run_id}, is gone: this device goes on "
            f"with it in {folder}; see {self._log_path(run_id)}",
        )

    def _start(
        self, folder: Path, model: str, names: Mapping[NodeId, str]
    ) -> subprocess.Popen[bytes]:
        arguments = ["train", model, "--resume", str(folder), "--min-devices", "1"]
        if wanted := _still_here(folder, names):
            arguments += ["--devices", ",".join(wanted)]
        log_path = self._log_path(folder.name)
        log_path.parent.mkdir(parents=True, exist_ok=True)
        with log_path.open("ab") as log_file:
            return subprocess.Popen(
                [*self._command, *arguments],
                env=os.environ | {"EXO_TRAIN_HOME": str(self._home.path), TIED_VARIABLE: "1"},
                stdin=subprocess.PIPE,  # closes when this process ends, however it ends
                stdout=log_file,
                stderr=log_file,
                start_new_session=True,  # Ctrl-C is for the agent, which ends this one
            )

    def _log_path(self, run_id: str) -> Path:
        return self._home.logs / f"takeover-{run_id}.log"

    def _tell(self, run_id: str, sentence: str) -> None:
        self._said.pop(run_id, None)
        self._said[run_id] = sentence
        while len(self._said) > MAX_SAID:
            del self._said[next(iter(self._said))]
        self._say(sentence)

    def _watch(self) -> None:
        while not self._closing.wait(LOOK_S):
            try:
                self.look()
            except Exception:  # what members send must not end this thread
                log.exception("looking at runs without a coordinator failed")


def _let_end(driver: subprocess.Popen[bytes]) -> None:
    """Have it save and end, as `train` does when its input ends."""
    assert driver.stdin is not None
    with contextlib.suppress(OSError):
        driver.stdin.close()


def find_model(home: Home, succession: Succession) -> str | None:
    """Give the name under which this device has the run's model; nothing is downloaded."""
    for name in succession.models:
        try:
            path = Path(name).expanduser()
            found = path if path.exists() else kept_snapshot(name, home.cache)
            if found is None:
                continue
            spec, source = open_model(found)
            manifest = build_manifest(source, spec, cache_dir=home.cache)
        except (ExoTrainError, OSError, ValueError, RuntimeError) as error:
            log.info("%s is not the model of run %s: %s", name, succession.run_id, error)
            continue
        if manifest.model_hash == succession.model_hash:
            return str(found)
    return None


def _ended_well(folder: Path) -> bool:
    try:
        status = json.loads((folder / SUMMARY_FILE).read_text("utf-8")).get("status")
    except (OSError, ValueError, AttributeError, RecursionError):
        return False
    return status in ("done", "interrupted")


def _still_here(folder: Path, names: Mapping[NodeId, str]) -> list[str]:
    """Give those of the devices that the run asks for by name which are here; none: any will do."""
    try:
        asked = RunDir(folder).read_config().get("devices")
    except ConfigError:
        return []
    if not isinstance(asked, list):
        return []
    return [text for text in map(str, asked) if devices_called(text, names)]
