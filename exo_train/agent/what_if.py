"""`exo-train plan`: who would get which layers, and how fast, for devices in a file.

Owns the file's form and the way from a model's config to a verdict. Nothing is loaded or trained
and no device is asked: the file says how fast devices are, by preset or by measured times.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from exo_train.agent.planning import DTYPE_BYTES, model_shape
from exo_train.agent.yaml_file import read_mapping
from exo_train.cluster.hardware import parse_size
from exo_train.cluster.home import Home
from exo_train.config import TrainConfig
from exo_train.errors import ConfigError
from exo_train.models.hub import resolve_config
from exo_train.models.spec import ModelSpec
from exo_train.peer import has_control_characters
from exo_train.plan.memory import (
    ModelShape,
    adapter_params,
    boundary_cost,
    decoder_params,
    pseudo_layer_costs,
)
from exo_train.plan.presets import PRESETS, head_flops, layer_flops
from exo_train.plan.profiles import DeviceProfile, Household, LinkProfile, Workload
from exo_train.plan.strategy import StrategyCandidate, Verdict, compare
from exo_train.train.batches import choose_microbatch_size

MAX_DEVICES = 16
SCHEMA = 1
DEVICE_KEYS = ("name", "preset", "memory", "layer_ms", "embedding_ms", "head_ms")
LINK_KEYS = ("between", "mbit", "latency_ms", "medium")
GIGABIT = LinkProfile(latency_s=0.0005, bytes_per_s=940e6 / 8)
GRADIENT_BYTES = 4  # adapters are trained in fp32


def plan_report(home: Home, config: TrainConfig, devices_file: Path) -> dict[str, Any]:
    """Give what `plan --json` prints; raises DoesNotFitError with numbers when nothing fits."""
    spec = ModelSpec.from_config(
        resolve_config(config.model, cache_dir=home.cache), place=config.model
    )
    spec.validate_max_seq_length(config.max_seq_length)
    shape = model_shape(spec)
    entries = _read(devices_file)
    dtype = "bf16" if config.dtype == "auto" else config.dtype
    size = config.microbatch_size or choose_microbatch_size(
        config.batch_size, num_stages=len(entries["devices"])
    )
    size = min(size, config.batch_size)
    household = read_household(
        entries, shape, config, microbatch_size=size, place=str(devices_file)
    )
    workload = _workload(shape, config, dtype=dtype, microbatch_size=size)
    num_values = shape.num_layers * adapter_params(
        shape, lora_rank=config.rank, targets=config.targets
    )
    verdict = compare(household, workload, gradient_bytes=num_values * GRADIENT_BYTES)
    return _report(config, spec, household, workload, verdict, dtype=dtype, microbatch_size=size)


def read_household(
    entries: Mapping[str, Any],
    shape: ModelShape,
    config: TrainConfig,
    *,
    microbatch_size: int,
    place: str,
) -> Household:
    """Turn the file's devices and links into profiles of this model's microbatch."""
    tokens = microbatch_size * config.max_seq_length
    layer = layer_flops(
        decoder_params=decoder_params(shape),
        attention_size=shape.attention_size,
        num_sequences=microbatch_size,
        num_positions=config.max_seq_length,
        checkpoint_activations=config.checkpoint_activations,
    )
    head = head_flops(vocab_size=shape.vocab_size, hidden_size=shape.hidden_size, tokens=tokens)
    devices = []
    for number, entry in enumerate(entries["devices"], start=1):
        where = f"{place}: device {number}"
        _check_keys(entry, DEVICE_KEYS, where)
        devices.append(_device(entry, where, layer_flop=layer, head_flop=head))
    names = [device.name for device in devices]
    if len(set(names)) != len(names):
        raise ConfigError(f"{place}: two devices have the same name; give each its own")
    return Household(devices=tuple(devices), links=_links(entries, names, place))


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


def _workload(
    shape: ModelShape, config: TrainConfig, *, dtype: str, microbatch_size: int
) -> Workload:
    value_bytes = DTYPE_BYTES[dtype]
    tokens = microbatch_size * config.max_seq_length
    return Workload(
        costs=pseudo_layer_costs(
            shape,
            weight_bytes_per_param=value_bytes,
            lora_rank=config.rank,
            targets=config.targets,
            microbatch_tokens=tokens,
            activation_bytes=value_bytes,
            checkpoint_activations=config.checkpoint_activations,
        ),
        boundary_bytes=tokens * shape.hidden_size * value_bytes,
        num_microbatches=-(-config.batch_size // microbatch_size),
        schedule="1f1b" if config.pipeline_schedule == "1f1b" else "gpipe",
        per_stage=boundary_cost(
            hidden_size=shape.hidden_size, microbatch_tokens=tokens, wire_bytes=value_bytes
        ),
    )


def _report(
    config: TrainConfig,
    spec: ModelSpec,
    household: Household,
    workload: Workload,
    verdict: Verdict,
    *,
    dtype: str,
    microbatch_size: int,
) -> dict[str, Any]:
    plan = verdict.plan
    tokens = config.batch_size * config.max_seq_length
    hops = len(plan.stages) - 1
    return {
        "schema": SCHEMA,
        "model": config.model,
        "architecture": json.loads(spec.config_json).get("model_type"),
        "dtype": dtype,
        "strategy": verdict.strategy,
        "verdict": verdict.reason,
        "runner_up": _candidate(verdict.runner_up, household) if verdict.runner_up else None,
        "candidates": [_candidate(c, household) for c in verdict.candidates],
        "stages": [
            {
                "device": household.devices[stage.device].name,
                "layers": [stage.stage.start, stage.stage.end],
                "embedding": stage.stage.embedding,
                "head": stage.stage.head,
                "time_s": stage.time_s,
                "busy_share": stage.time_s * workload.num_microbatches / plan.step_s,
                "memory_bytes": stage.memory_bytes,
                "usable_memory_bytes": stage.usable_bytes,
            }
            for stage in plan.stages
        ],
        "period_s": plan.period_s,
        "step_s": plan.step_s,
        "tokens_per_s": tokens / plan.step_s,
        "microbatch_size": microbatch_size,
        "num_microbatches": workload.num_microbatches,
        "link_bytes_per_step": [2 * workload.boundary_bytes * workload.num_microbatches] * hops,
        "all_orders_tried": plan.exact,
        "inputs": _inputs(household, workload),
    }


def _inputs(household: Household, workload: Workload) -> dict[str, Any]:
    """Give all numbers that went in, so that a script can check the plan."""
    return {
        "layer_costs": [
            {
                "static_bytes": cost.static_bytes,
                "per_microbatch_bytes": cost.per_microbatch_bytes,
                "workspace_bytes": cost.workspace_bytes,
                "tied_bytes": cost.tied_bytes,
            }
            for cost in workload.costs
        ],
        "per_stage_bytes_per_microbatch": workload.per_stage.per_microbatch_bytes,
        "boundary_bytes": workload.boundary_bytes,
        "schedule": workload.schedule,
        "devices": [
            {
                "name": device.name,
                "usable_memory_bytes": device.usable_bytes,
                "layer_s": device.layer_s,
                "embedding_s": device.embedding_s,
                "head_s": device.head_s,
            }
            for device in household.devices
        ],
        "links": [
            {
                "from": household.devices[a].name,
                "to": household.devices[b].name,
                "latency_s": link.latency_s,
                "bytes_per_s": link.bytes_per_s,
                "medium": link.medium,
            }
            for (a, b), link in sorted(household.links.items())
        ],
    }


def _candidate(candidate: StrategyCandidate, household: Household) -> dict[str, Any]:
    return {
        "strategy": candidate.strategy,
        "devices": [household.devices[index].name for index in candidate.devices],
        "step_s": candidate.step_s,
        "available": candidate.available,
        "note": candidate.note,
    }
