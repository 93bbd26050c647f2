"""Harm at an address, for tests: what EXO_TRAIN_TEST_FAULT may ask for and where it strikes.

Owns the words of a fault and what each does; `faults` says where a stage passes these points.
Nothing but a test may set the variable, and without it nothing here does anything.

A fault is `ACTION@key=value,key=value`; several are separated by `;`. Actions:

`kill`, `term`, `stop`   SIGKILL, SIGTERM or SIGSTOP to this process
`kill-agent`, `stop-agent`, `kill-both`, `stop-both`   to its parent; to its parent and itself
`oom`, `error`, `exit`   memory runs out; RuntimeError; the process ends with code 9
`hold`   write the file `mark`, and go on when it has been removed: the test does its own harm

Keys: `phase` (needed), `rank`, `step` and `microbatch` (left out: any), `times` (how often it
strikes, 1), `once` (a directory where strikes are counted, so that a restarted process does not
strike again), `mark`. Phases of a worker are `loading`, `forward`, `backward` (of a microbatch:
computed, nothing sent), `between` (before the forward of any microbatch but 0), `evaluate`,
`commit` (nothing moved yet), `committed` (everything moved) and `snapshot` (state is read; also
once after loading, where the step is 0). Those of other processes, with `rank` left out, are
`checkpoint-write`, `checkpoint-publish`, `replan` and `recover`.

In a ring of threads what would hit a process raises KilledError in the thread.
"""

from __future__ import annotations

import functools
import hashlib
import os
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path

from exo_train.errors import ConfigError, DoesNotFitError

VARIABLE = "EXO_TRAIN_TEST_FAULT"
ACTIONS = (
    "kill", "term", "stop", "kill-agent", "stop-agent", "kill-both", "stop-both", "oom", "error",
    "exit", "hold",
)  # fmt: skip
LAYER_ACTIONS = ("nan-activation", "overflow-activation", "nan-gradient")
NUMBER_ACTIONS = (*LAYER_ACTIONS, "nan-loss")
WORKER_PHASES = (
    "loading", "forward", "backward", "between", "evaluate", "commit", "committed", "snapshot",
)  # fmt: skip
OTHER_PHASES = ("checkpoint-write", "checkpoint-publish", "replan", "recover")
HOLD_LIMIT_S = 600.0
HOLD_POLL_S = 0.02
EXIT_CODE = 9


class KilledError(BaseException):
    """The end of a rank that is a thread; no handler of errors may survive it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault as it was asked for; None and "" mean any, or none given."""

    text: str
    action: str
    phase: str = ""
    rank: int | None = None
    step: int | None = None
    layer: int | None = None
    microbatch: int | None = None
    times: int = 1
    once: str = ""
    mark: str = ""

    def is_at(self, *, rank: int | None, step: int | None, microbatch: int | None) -> bool:
        asked = (self.rank, self.step, self.microbatch)
        return all(
            a is None or a == b for a, b in zip(asked, (rank, step, microbatch), strict=True)
        )


def split_setting(setting: str) -> list[str]:
    return [text.strip() for text in setting.split(";") if text.strip()]


def parse_fault(text: str) -> Fault:
    """Read one fault with an address; raises ConfigError naming what is wrong with it."""
    action, _, rest = text.partition("@")
    values: dict[str, int | str] = {}
    for pair in filter(None, rest.split(",")):
        key, _, value = pair.partition("=")
        if key in ("rank", "step", "layer", "microbatch", "times") and value.isdecimal():
            values[key] = int(value)
        elif key in ("phase", "once", "mark") and value:
            values[key] = value
        else:
            raise ConfigError(f"{VARIABLE}: '{pair}' in '{text}' is no key with a value")
    fault = Fault(text=text, action=action, **values)  # type: ignore[arg-type]
    if wrong := _wrong_with(fault):
        raise ConfigError(f"{VARIABLE}: '{text}' {wrong}")
    return fault


def _wrong_with(fault: Fault) -> str:
    if fault.action in NUMBER_ACTIONS:
        if fault.phase not in ("", "evaluate"):
            return "takes no phase but 'evaluate'"
        return (
            "" if (fault.layer is None) != (fault.action in LAYER_ACTIONS) else "misses its layer"
        )
    if fault.action not in ACTIONS:
        return f"must begin with one of {', '.join((*ACTIONS, *NUMBER_ACTIONS))}"
    phases = WORKER_PHASES + (() if fault.action.endswith(("agent", "both")) else OTHER_PHASES)
    if fault.phase not in phases:
        return f"needs a phase of {', '.join(phases)}"
    return "" if (fault.action == "hold") == bool(fault.mark) else "must hold to have a mark"


@dataclass(slots=True, kw_only=True)
class Strikes:
    """The faults of one process or stage, and how often each has struck."""

    faults: tuple[Fault, ...]
    rank: int | None = None
    in_process: bool = False
    _counts: dict[str, int] = field(default_factory=dict)

    def reach(self, phase: str, *, step: int | None = None, microbatch: int | None = None) -> None:
        """Strike with every fault that waits at this point."""
        for fault in self.faults:
            if fault.action not in ACTIONS or fault.phase != phase:
                continue
            here = fault.is_at(rank=self.rank, step=step, microbatch=microbatch)
            if here and self._claims(fault):
                self._strike(fault, step)

    def _claims(self, fault: Fault) -> bool:
        if not fault.once:
            count = self._counts[fault.text] = self._counts.get(fault.text, 0) + 1
            return count <= fault.times
        name = hashlib.sha256(fault.text.encode()).hexdigest()[:12]
        for number in range(fault.times):
            try:
                Path(fault.once, f"{name}-{number}").touch(exist_ok=False)
            except FileExistsError:
                continue
            return True
        return False

    def _strike(self, fault: Fault, step: int | None) -> None:
        match fault.action:
            case "hold":
                _hold(Path(fault.mark), f"{fault.phase} rank={self.rank} step={step}")
            case "oom" if fault.phase == "loading":  # where no stage is there to name it
                raise DoesNotFitError(f"loading ran out of memory ({fault.text})")
            case "oom":
                raise MemoryError(fault.text)
            case "error":
                raise RuntimeError(f"asked for by {VARIABLE}: {fault.text}")
            case _ if self.in_process:
                raise KilledError(fault.text)
            case "exit":
                os._exit(EXIT_CODE)
            case action:
                _signal(action)


def point(
    name: str,
    *,
    rank: int | None = None,
    step: int | None = None,
    setting: str | None = None,
) -> None:
    """Say that this process has come to the phase `name`; nothing happens without a fault there.

    A rank that is a thread gives its own `setting`, which counts its strikes anew each time.
    """
    if setting is None:
        setting = os.environ.get(VARIABLE, "")
        strikes = _strikes_of_process(setting, rank)
    else:
        strikes = Strikes(faults=_addressed(setting), rank=rank, in_process=True)
    strikes.reach(name, step=step)


@functools.lru_cache(maxsize=64)
def _strikes_of_process(setting: str, rank: int | None) -> Strikes:
    return Strikes(faults=_addressed(setting), rank=rank)


def _addressed(setting: str) -> tuple[Fault, ...]:
    return tuple(parse_fault(text) for text in split_setting(setting) if "@" in text)


def _signal(action: str) -> None:
    """Send what `action` says, to oneself last."""
    kind, _, whom = action.partition("-")
    number = {"kill": signal.SIGKILL, "term": signal.SIGTERM, "stop": signal.SIGSTOP}[kind]
    if whom:
        os.kill(os.getppid(), number)
    if whom != "agent":
        os.kill(os.getpid(), number)


def _hold(mark: Path, place: str) -> None:
    new = mark.with_name(f"{mark.name}.new")
    new.write_text(f"{place} pid={os.getpid()}\n", encoding="utf-8")
    new.rename(mark)  # whoever sees it can read all of it
    until_s = time.monotonic() + HOLD_LIMIT_S
    while mark.exists():
        if time.monotonic() > until_s:
            raise RuntimeError(f"{mark} was not removed within {HOLD_LIMIT_S:.0f} s")
        time.sleep(HOLD_POLL_S)
