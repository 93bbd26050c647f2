"""What a run's files say of who may go on with it: `takeover.json`.

Owns that file. Must not decide when a run is taken over, nor do it.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from exo_train.peer import NodeId
from exo_train.train.durable import disk_errors, write_durable

TAKEOVER_FILE = "takeover.json"
TAKEOVER_SCHEMA = 1
# For a driver that an agent starts: it saves and ends when its standard input does.
TIED_VARIABLE = "EXO_TRAIN_TIED"
MAX_FILE_BYTES = 64 << 10
MAX_MODEL_NAMES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Succession:
    """Who leads a run, and what another device needs to go on with it.

    `wanted`: a device that has it all is to go on by itself. `models` are names of the model, as
    the user gave it and as a path where it lay.
    """

    run_id: str
    wanted: bool
    models: tuple[str, ...]
    model_hash: str
    coordinator: NodeId
    coordinator_name: str

    def write(self, run_dir: Path) -> None:
        """Put it among the run's files; raises DiskError."""
        plain = {"schema": TAKEOVER_SCHEMA, **dataclasses.asdict(self)}
        text = json.dumps(plain, indent=2, ensure_ascii=False)
        with disk_errors(TAKEOVER_FILE, run_dir):
            write_durable(run_dir / TAKEOVER_FILE, f"{text}\n".encode())


def read_succession(run_dir: Path) -> Succession | None:
    """Give what `write` wrote; None: nothing, or nothing that makes sense."""
    try:
        with (run_dir / TAKEOVER_FILE).open("rb") as file:
            raw = file.read(MAX_FILE_BYTES)
        plain = json.loads(raw)
        return Succession(
            run_id=str(plain["run_id"]),
            wanted=plain["wanted"] is True,
            models=tuple(map(str, plain["models"][:MAX_MODEL_NAMES])),
            model_hash=str(plain["model_hash"]),
            coordinator=NodeId(str(plain["coordinator"])),
            coordinator_name=str(plain["coordinator_name"]),
        )
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def model_names(given: Iterable[str], before: Succession | None) -> tuple[str, ...]:
    """Join the names of a run's model, the oldest first: the user's own is among those."""
    names = (*(before.models if before else ()), *given)
    return tuple(dict.fromkeys(names))[:MAX_MODEL_NAMES]
