"""The file of `plan --devices`: devices, owned or not, and the links between them.

Owns the file's form and every refusal that names a place in it. Must not plan.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from exo_train.agent.yaml_file import read_mapping
from exo_train.cluster.hardware import parse_size
from exo_train.config import TrainConfig
from exo_train.errors import ConfigError
from exo_train.peer import has_control_characters
from exo_train.plan.device_memory import Processor
from exo_train.plan.memory import ModelShape, decoder_params
from exo_train.plan.presets import PRESETS, head_flops, layer_flops
from exo_train.plan.profiles import DeviceProfile, Household, LinkProfile

MAX_DEVICES = 16
DEVICE_KEYS = ("name", "preset", "memory", "layer_ms", "embedding_ms", "head_ms")
LINK_KEYS = ("between", "mbit", "latency_ms", "medium")
GIGABIT = LinkProfile(latency_s=0.0005, bytes_per_s=940e6 / 8)


Processors = tuple[Processor | None, ...]


def read_household(
    file: Path, shape: ModelShape, config: TrainConfig
) -> tuple[Household, Processors]:
    """Turn the file into profiles of this model, for microbatches of one sequence.

    Gives what computes on each device too, None where the file gives times and not a preset.
    """
    entries = _read(file)
    layer = layer_flops(
        decoder_params=decoder_params(shape),
        attention_size=shape.attention_size,
        num_sequences=1,
        num_positions=config.max_seq_length,
        checkpoint_activations=config.checkpoint_activations,
    )
    head = head_flops(
        vocab_size=shape.vocab_size, hidden_size=shape.hidden_size, tokens=config.max_seq_length
    )
    place = str(file)
    devices = []
    for number, entry in enumerate(entries["devices"], start=1):
        where = f"{place}: device {number}"
        _check_keys(entry, DEVICE_KEYS, where)
        devices.append(_device(entry, where, layer_flop=layer, head_flop=head))
    names = [device.name for device in devices]
    if len(set(names)) != len(names):
        raise ConfigError(f"{place}: two devices have the same name; give each its own")
    processors = tuple(
        PRESETS[str(entry["preset"])].processor if "preset" in entry else None
        for entry in entries["devices"]
    )
    return Household(devices=tuple(devices), links=_links(entries, names, place)), processors


def _read(file: Path) -> dict[str, Any]:
    content = read_mapping(file, option="--devices")
    if not isinstance(content.get("devices"), list):
        raise ConfigError(f"--devices {file} must have a list called 'devices'")
    _check_keys(content, ("devices", "links"), str(file))
    if not 1 <= len(content["devices"]) <= MAX_DEVICES:
        raise ConfigError(f"--devices {file} must name 1 to {MAX_DEVICES} devices")
    return content


def _device(
    entry: Mapping[str, Any], where: str, *, layer_flop: float, head_flop: float
) -> DeviceProfile:
    name = entry.get("name")
    if not isinstance(name, str) or not name or has_control_characters(name):
        raise ConfigError(f"{where} needs a 'name' without control characters")
    where = f"{where} ({name})"
    memory = entry.get("memory")
    usable_bytes = parse_size(str(memory)) if memory is not None else None
    if "preset" in entry:
        preset = PRESETS.get(str(entry["preset"]))
        if preset is None:
            near = difflib.get_close_matches(str(entry["preset"]), PRESETS, n=1)
            hint = f"; did you mean '{near[0]}'?" if near else ""
            known = ", ".join(PRESETS)
            raise ConfigError(f"{where}: no preset '{entry['preset']}'{hint} (known: {known})")
        return DeviceProfile(
            name=name,
            usable_bytes=preset.usable_bytes if usable_bytes is None else usable_bytes,
            layer_s=layer_flop / preset.flops_per_s,
            embedding_s=0.0,
            head_s=head_flop / preset.flops_per_s,
        )
    if usable_bytes is None or "layer_ms" not in entry:
        raise ConfigError(f"{where} needs a 'preset', or 'memory' and 'layer_ms'")
    layer_s = _number(entry, "layer_ms", where, above=0.0) / 1000
    return DeviceProfile(
        name=name,
        usable_bytes=usable_bytes,
        layer_s=layer_s,
        embedding_s=_number(entry, "embedding_ms", where, default=0.0) / 1000,
        # Without a measurement: by the arithmetic of the head against that of a layer.
        head_s=_number(entry, "head_ms", where, default=1000 * layer_s * head_flop / layer_flop)
        / 1000,
    )


def _links(
    entries: Mapping[str, Any], names: list[str], place: str
) -> dict[tuple[int, int], LinkProfile]:
    """Give a link for every ordered pair: gigabit Ethernet where the file says nothing."""
    listed = entries.get("links") or ()
    if not isinstance(listed, (list, tuple)):
        raise ConfigError(f"{place}: 'links' must be a list")
    links = {(a, b): GIGABIT for a in range(len(names)) for b in range(len(names)) if a != b}
    for number, entry in enumerate(listed, start=1):
        where = f"{place}: link {number}"
        _check_keys(entry, LINK_KEYS, where)
        pair = entry.get("between")
        if not isinstance(pair, list) or len(pair) != 2 or pair[0] == pair[1]:
            raise ConfigError(f"{where} needs 'between: [NAME, NAME]'")
        for name in pair:
            if name not in names:
                raise ConfigError(f"{where}: no device is called '{name}'")
        link = LinkProfile(
            latency_s=_number(entry, "latency_ms", where, default=0.5) / 1000,
            bytes_per_s=_number(entry, "mbit", where, above=0.0) * 1e6 / 8,
            medium=str(entry.get("medium", "")),
        )
        a, b = names.index(pair[0]), names.index(pair[1])
        links[a, b] = links[b, a] = link
    return links


def _check_keys(entry: Any, known: tuple[str, ...], where: str) -> None:
    if not isinstance(entry, dict):
        raise ConfigError(f"{where} must be 'key: value' lines")
    for key in entry:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1)
            hint = f"; did you mean '{near[0]}'?" if near else f" (known: {', '.join(known)})"
            raise ConfigError(f"{where}: unknown key '{key}'{hint}")


def _number(
    entry: Mapping[str, Any],
    key: str,
    where: str,
    *,
    default: float | None = None,
    above: float = -1e-300,
) -> float:
    value = entry.get(key, default)
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise ConfigError(f"{where}: '{key}' must be a number, got {value!r}")
    try:
        number = float(value)  # YAML 1.1 reads 1e-3 as text
    except (ValueError, OverflowError):
        raise ConfigError(f"{where}: '{key}' must be a number, got {str(value)[:40]!r}") from None
    if not above < number < float("inf"):
        least = "above 0" if above == 0 else "at least 0"
        raise ConfigError(f"{where}: '{key}' must be {least} and finite, got {number}")
    return number
