"""Starting a run from an adapter that is there: which options it settles, and its values.

Owns reading it from an adapter folder or a run, and the comparison with what was asked for and
with the base. Must not train; the run goes on from it as from a checkpoint of step 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from exo_train.backends.lora import adapter_shapes, is_adapter
from exo_train.config import OPTIONS, TrainConfig
from exo_train.errors import ConfigError
from exo_train.export.adapter_formats import Adapter, layer_and_target
from exo_train.export.adapters import read_adapter
from exo_train.lora_config import LoraConfig, placements, said_over
from exo_train.models.spec import ModelSpec
from exo_train.options import plain_values
from exo_train.plan.stages import StageSpec
from exo_train.train.checkpoint import (
    Checkpoint,
    checkpoint_of,
    load_checkpoint,
    newest_checkpoint,
    save_checkpoint,
)
from exo_train.train.progress import Progress
from exo_train.train.rundir import CONFIG_FILE, RunDir
from exo_train.train.state_copies import state_layout

SETTLED = (
    "rank", "alpha", "scale", "rslora", "dora", "targets", "adapter_layers", "rank_pattern",
    "alpha_pattern",
)  # fmt: skip


def with_adapter(values: Mapping[str, Any], *, source: str) -> dict[str, Any]:
    """Give options with what their `init_adapter` settles; raises ConfigError naming conflicts.

    What was said in other words is no conflict.
    """
    path = values.get("init_adapter")
    if not path:
        return dict(values)
    adapter = find_adapter(Path(path))
    settled = _options_of(adapter.lora)
    said = plain_values(OPTIONS, {k: v for k, v in values.items() if k in SETTLED}, source=source)
    whole = said_over(settled, values)
    asked = TrainConfig.from_mapping(whole, source=source)
    num_layers = 1 + max(layer_and_target(name)[0] for name in adapter.arrays)
    if not _are_alike(asked.lora, adapter.lora, num_layers):
        conflicts = ", ".join(
            f"--{name.replace('_', '-')} {_shown(value)} (the adapter has "
            f"{_shown(settled.get(name, adapter.lora.scale))})"
            for name, value in said.items()
            if value != settled.get(name)
        )
        raise ConfigError(
            f"{source}: --init-adapter {path} is another kind of adapter than asked for: "
            f"{conflicts}; leave these options out"
        )
    return whole


def find_adapter(path: Path, *, num_layers: int | None = None) -> Adapter:
    """Read an adapter's folder, or a run's newest state; raises ConfigError.

    Of a run that is done, what it has ended with: after an early end that is its best step.
    """
    path = path.expanduser()
    if not (path / CONFIG_FILE).is_file():
        return read_adapter(path, num_layers=num_layers)
    run = RunDir.open(path)
    config = TrainConfig.from_stored(run.read_config(), source=f"{path}/config.yaml")
    if config.full:
        raise ConfigError(
            f"{path} trained all weights and has no adapter; name its model instead: "
            f"{path / 'model'}"
        )
    step = run.step_left()
    checkpoint = newest_checkpoint(path) if step is None else checkpoint_of(path, step)
    if checkpoint is None:
        return read_adapter(path / "adapters" / "peft", num_layers=num_layers)
    return Adapter(arrays=checkpoint.adapter, lora=config.lora, base_model=config.model)


def first_checkpoint(
    run_dir: Path, config: TrainConfig, spec: ModelSpec, identity: Mapping[str, Any]
) -> Checkpoint:
    """Save the adapter that the run starts from as its step 0, without any update behind it.

    Raises ConfigError where the adapter is not what the options say, or of another base.
    """
    adapter = find_adapter(Path(config.init_adapter), num_layers=spec.num_layers)
    if not _are_alike(config.lora, adapter.lora, spec.num_layers):
        raise ConfigError(
            f"--init-adapter {config.init_adapter} is another kind of adapter than the run's; give "
            f"its rank, alpha, targets and layers, or leave them all out"
        )
    check_fits(adapter, config, spec)
    whole = StageSpec(start=0, end=spec.num_layers, embedding=True, head=True)
    layout = state_layout(spec, config.lora, config.optimizer_rule, whole)
    path = save_checkpoint(
        run_dir,
        step=0,
        adapter={name: adapter.arrays[name] for name in layout if is_adapter(name)},
        optimizer={
            name: np.zeros(shape, dtype)
            for name, (dtype, shape) in layout.items()
            if not is_adapter(name)
        },
        state={**identity, **Progress().to_state(), "best": None},
    )
    return load_checkpoint(path)


def check_adapter_options(config: TrainConfig, spec: ModelSpec) -> None:
    """Refuse adapters that the model has no place for, or cannot start from, before it is loaded.

    Raises ConfigError.
    """
    placements(config.lora, spec.num_layers)
    if config.init_adapter:
        path = Path(config.init_adapter)
        check_fits(find_adapter(path, num_layers=spec.num_layers), config, spec)


def check_fits(adapter: Adapter, config: TrainConfig, spec: ModelSpec) -> None:
    """Refuse an adapter whose arrays are not those that this base would have."""
    whole = StageSpec(start=0, end=spec.num_layers, embedding=True, head=True)
    expected = adapter_shapes(spec, whole, config.lora)
    for name in sorted(expected.keys() | adapter.arrays.keys()):
        found = tuple(adapter.arrays[name].shape) if name in adapter.arrays else None
        if found != expected.get(name):
            made_for = f"; it was made for {adapter.base_model}" if adapter.base_model else ""
            raise ConfigError(
                f"--init-adapter {config.init_adapter} does not fit this model: its {name} is "
                f"{_shape(found)}, the model's would be {_shape(expected.get(name))}{made_for}"
            )


def _shape(shape: tuple[int, ...] | None) -> str:
    return "missing" if shape is None else " x ".join(map(str, shape))


def _options_of(lora: LoraConfig) -> dict[str, Any]:
    return {
        "rank": lora.rank,
        "alpha": lora.alpha,
        "rslora": lora.rslora,
        "dora": lora.dora,
        "targets": list(lora.targets),
        "adapter_layers": list(lora.layers),
        "rank_pattern": [f"{name}={rank}" for name, rank in lora.rank_pattern],
        "alpha_pattern": [f"{name}={alpha!r}" for name, alpha in lora.alpha_pattern],
    }


def _are_alike(asked: LoraConfig, found: LoraConfig, num_layers: int) -> bool:
    try:
        ours, theirs = placements(asked, num_layers), placements(found, num_layers)
    except ConfigError:  # of layers that the adapter, or the model, does not have
        return False
    return (
        asked.dora == found.dora
        and [(p.prefix, p.rank) for p in ours] == [(p.prefix, p.rank) for p in theirs]
        and bool(np.allclose([p.scale for p in ours], [p.scale for p in theirs], rtol=1e-6))
    )


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return ",".join(map(str, value)) or "none"
    return f"{value:g}" if isinstance(value, float) else str(value)
