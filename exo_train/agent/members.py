"""Which devices a run gets: waits for as many as were asked for, and says who is missing.

Must not choose layers: that is planning.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from exo_train.agent.local_client import LocalClient
from exo_train.agent.planning import Candidate
from exo_train.config import TrainConfig
from exo_train.errors import PeerError

# A fresh agent needs a moment to hear the others (mDNS: 1.2 to 1.5 s measured on a bridge).
SETTLE_S = 4.0
POLL_S = 0.3


def wait_candidates(
    client: LocalClient,
    config: TrainConfig,
    *,
    on_note: Callable[[str], None] = lambda note: None,
) -> tuple[list[Candidate], dict[str, Any]]:
    """Give the live members that the run may use, and the status they come from.

    Raises PeerError when fewer than `min_devices`, or not all of `devices`, come within
    `device_wait_s`.
    """
    timeout_s = config.device_wait_s
    deadline_s = time.monotonic() + timeout_s
    said = False
    while True:
        status = client.status()
        live = [m for m in status["members"] if m["state"] == "alive"]
        own = next(m for m in live if m["id"] == status["self"])
        missing = [name for name in config.devices if name not in {m["name"] for m in live}]
        settled = own["since_s"] >= SETTLE_S or bool(config.devices) or config.min_devices > 1
        if not missing and len(live) >= config.min_devices and settled:
            chosen = [m for m in live if not config.devices or m["name"] in config.devices]
            _note_versions(chosen, own, on_note)
            return [Candidate.from_status(member) for member in chosen], status
        if time.monotonic() > deadline_s:
            raise PeerError(_missing_sentence(config, live, missing, timeout_s))
        if not said and (missing or len(live) < config.min_devices):
            said = True
            on_note(f"waiting up to {timeout_s:.0f} s for {_wanted(config, missing)}")
        time.sleep(POLL_S)


def _wanted(config: TrainConfig, missing: list[str]) -> str:
    return ", ".join(missing) if missing else f"{config.min_devices} devices"


def _missing_sentence(
    config: TrainConfig, live: list[dict[str, Any]], missing: list[str], timeout_s: float
) -> str:
    here = ", ".join(str(m["name"]) for m in live)
    return (
        f"{_wanted(config, missing)} wanted, but after {timeout_s:.0f} s only these are here: "
        f"{here}; start `exo-train join` on the others, or name one with `join --peer HOST:PORT` "
        f"where multicast does not pass"
    )


def _note_versions(
    chosen: list[dict[str, Any]], own: dict[str, Any], on_note: Callable[[str], None]
) -> None:
    for member in chosen:
        if member["version"] != own["version"]:
            on_note(
                f"{member['name']} has exo-train {member['version']}, this device "
                f"{own['version']}; install the same version if the run is refused"
            )
