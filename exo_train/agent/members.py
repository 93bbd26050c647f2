"""Which devices a run gets: waits for as many as were asked for, and says who is missing.

Must not choose layers: that is planning.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

from exo_train.agent.planning import Candidate
from exo_train.config import TrainConfig
from exo_train.errors import ConfigError, InterruptedRunError, PeerError
from exo_train.peer import NodeId, devices_called, short_id

# A fresh agent needs a moment to hear the others (mDNS: 1.2 to 1.5 s measured on a bridge).
SETTLE_S = 4.0
POLL_S = 0.3


class AsksStatus(Protocol):
    def status(self) -> dict[str, Any]: ...


def wait_candidates(
    client: AsksStatus,
    config: TrainConfig,
    *,
    on_note: Callable[[str], None] = lambda note: None,
    wants_stop: Callable[[], bool] = lambda: False,
) -> tuple[list[Candidate], dict[str, Any]]:
    """Give the live members that the run may use, and the status they come from.

    Raises PeerError when fewer than `min_devices`, or not all of `devices`, come within
    `device_wait_s`.
    """
    deadline_s = time.monotonic() + config.device_wait_s
    said = False
    while True:
        if wants_stop():
            raise InterruptedRunError("stopped while waiting for devices; nothing was begun")
        status = client.status()
        live = [m for m in status["members"] if m["state"] == "alive"]
        own = next(m for m in live if m["id"] == status["self"])
        usable = _usable(live, own)
        chosen, missing = _choose(usable, wanted_names(config))
        is_told = bool(wanted_names(config)) or config.min_devices > 1
        settled = own["since_s"] >= SETTLE_S or is_told
        if not missing and len(chosen) >= config.min_devices and settled:
            if not wanted_names(config):
                _note_left_out(live, usable, own, on_note)
            _note_versions(chosen, own, on_note)
            return _candidates(chosen), status
        if time.monotonic() > deadline_s:
            raise PeerError(_missing_sentence(config, live, usable, missing))
        if not said and (missing or len(chosen) < config.min_devices):
            said = True
            on_note(f"waiting up to {config.device_wait_s:.0f} s for {_wanted(config, missing)}")
        time.sleep(POLL_S)


def candidates_now(status: dict[str, Any], config: TrainConfig) -> list[Candidate]:
    """Give the members of `status` that a run may use now, of those that it asks for if it does.

    Waits for none and refuses nothing: who is missing may come back.
    """
    live = [m for m in status["members"] if m["state"] == "alive"]
    own = next((m for m in live if m["id"] == status["self"]), None)
    if own is None:
        return []
    usable, wanted = _usable(live, own), wanted_names(config)
    names = {NodeId(m["id"]): str(m["name"]) for m in usable}
    asked = {node_id for text in wanted for node_id in devices_called(text, names)}
    return _candidates([m for m in usable if not wanted or m["id"] in asked])


def wanted_names(config: TrainConfig) -> tuple[str, ...]:
    """Give the devices that are named; those with --layers, where --devices names none.

    Of "box cuda:1:10" that is "box": members have names, their GPUs only numbers.
    """
    if config.devices or not config.layers:
        return config.devices
    names = (text.rpartition(":")[0].partition(" cuda:")[0] for text in config.layers)
    return tuple(dict.fromkeys(name for name in names if name))


def _usable(live: list[dict[str, Any]], own: dict[str, Any]) -> list[dict[str, Any]]:
    """Give those that can be connected to; when this device cannot be, it can train just alone.

    Others fetch the model from it, and connect to their neighbours.
    """
    if own["unreachable"]:
        return [own]
    return [m for m in live if not m["unreachable"]]


def _choose(
    live: list[dict[str, Any]], wanted: tuple[str, ...]
) -> tuple[list[dict[str, Any]], list[str]]:
    """Pick members by name, or by the start of their id; gives those, and what is missing.

    Raises ConfigError for a name that several devices have.
    """
    if not wanted:
        return live, []
    names = {NodeId(m["id"]): str(m["name"]) for m in live}
    chosen, missing = [], []
    for text in wanted:
        ids_found = devices_called(text, names)
        found = [m for m in live if m["id"] in ids_found]
        if len(found) > 1:
            ids = ", ".join(short_id(node_id) for node_id in ids_found)
            raise ConfigError(
                f"--devices: {len(found)} devices are called '{text}'; name them by the start of "
                f"their ids: {ids}"
            )
        chosen += [m for m in found if m not in chosen]
        missing += [] if found else [text]
    return chosen, missing


def _candidates(chosen: list[dict[str, Any]]) -> list[Candidate]:
    """Tell devices of one name apart, as every message names them; each GPU is one."""
    names = [m["name"] for m in chosen]
    return [
        candidate
        for m in chosen
        for candidate in Candidate.all_from_status(
            m
            if names.count(m["name"]) == 1
            else {**m, "name": f"{m['name']} ({short_id(m['id'])})"}
        )
    ]


def _wanted(config: TrainConfig, missing: list[str]) -> str:
    return ", ".join(missing) if missing else f"{config.min_devices} devices"


def _missing_sentence(
    config: TrainConfig,
    live: list[dict[str, Any]],
    usable: list[dict[str, Any]],
    missing: list[str],
) -> str:
    here = ", ".join(str(m["name"]) for m in usable)
    cut_off = [m["name"] for m in live if m["unreachable"]]
    doctor = f"; others cannot connect to {_names(cut_off)}: run `exo-train doctor` there"
    return (
        f"{_wanted(config, missing)} wanted, but after {config.device_wait_s:.0f} s only these are "
        f"here: {here}{doctor if cut_off else ''}; start `exo-train join` on the others, or name "
        f"one with `join --peer HOST:PORT` where multicast does not pass"
    )


def _note_left_out(
    live: list[dict[str, Any]],
    usable: list[dict[str, Any]],
    own: dict[str, Any],
    on_note: Callable[[str], None],
) -> None:
    left_out = [m["name"] for m in live if m not in usable]
    if left_out and own["unreachable"]:
        on_note(
            f"others cannot connect to this device, so it trains without {_names(left_out)}; "
            f"`exo-train doctor` says what to do"
        )
    elif left_out:
        on_note(
            f"others cannot connect to {_names(left_out)}, so this run goes without; run "
            f"`exo-train doctor` there"
        )


def _names(names: list[str]) -> str:
    return " and ".join(names)


def _note_versions(
    chosen: list[dict[str, Any]], own: dict[str, Any], on_note: Callable[[str], None]
) -> None:
    for member in chosen:
        if member["version"] != own["version"]:
            on_note(
                f"{member['name']} has exo-train {member['version']}, this device "
                f"{own['version']}; install the same version if the run is refused"
            )
