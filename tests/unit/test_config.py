"""Options of a run: what is refused and with which words, and which source wins."""

from __future__ import annotations

import dataclasses
import json
import re
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from exo_train.agent.chosen_options import choose_options
from exo_train.agent.resuming import RESUME_MAY_CHANGE
from exo_train.config import OPTIONS, TrainConfig
from exo_train.errors import ConfigError
from exo_train.export.adapters import write_adapters
from exo_train.lora_config import placements
from exo_train.options import Option
from exo_train.train.rundir import RunDir

NAMES = [field.name for field in dataclasses.fields(TrainConfig)]
DEFAULTS = TrainConfig().to_dict()
NUMBERS = [name for name, value in DEFAULTS.items() if type(value) in (int, float)]
WHOLE_NUMBERS = [name for name, value in DEFAULTS.items() if type(value) is int]
FRACTIONS = [name for name in NUMBERS if name not in WHOLE_NUMBERS]

_ADAPTERS = tempfile.TemporaryDirectory()


def _adapter(name: str) -> str:
    """Write an adapter of the usual kind, for a model of one tiny layer."""
    usual = TrainConfig().lora
    arrays = {
        f"{place.prefix}.lora_{part}": np.ones((8, 8), np.float32)
        for place in placements(usual, 1)
        for part in "ab"
    }
    paths = write_adapters(
        Path(_ADAPTERS.name) / name, arrays, lora=usual, base_model="tiny", num_layers=1, steps=1
    )
    return str(paths.peft)


# Two different values of an option, the file's and the command line's: those that cannot be made
# of its range.
CHOSEN: dict[str, tuple[Any, Any]] = {
    "model": ("file-model", "line-model"),
    "data": ("file.jsonl", "line.jsonl"),
    "columns": (["prompt=question"], ["prompt=q", "completion=a"]),
    "chat_template": ("file.jinja", "chatml"),
    "targets": (["q_proj"], ["q_proj", "self_attn.o_proj"]),
    "adapter_layers": (["last:8"], ["0-3", "7"]),
    "rank_pattern": (["q_proj=16"], ["q_proj=4"]),
    "alpha_pattern": (["q_proj=32.5"], ["q_proj=8"]),
    # Two that would disagree if rank, alpha and scale were chosen each for itself.
    "rank": (16, 4),
    "alpha": (32.0, 64.0),
    "scale": (8.0, 16.0),
    "rslora": (True, False),
    # Read as soon as they are named; of the usual kind, so that they settle nothing else.
    "init_adapter": (_adapter("file"), _adapter("line")),
    "shadow": ("off", "4"),
    "min_devices": (2, 3),
    "devices": (["den-pc", "attic"], ["kitchen-mac", "den-pc", "attic"]),
    "layers": (["den-pc:3", "attic:5"], ["attic:8"]),
    "report_to": (["wandb"], ["tensorboard", "trackio"]),
    "run_dir": ("file-run", "line-run"),
}


# Beside what an option is of use, where the defaults leave it without one.
BESIDE: dict[str, dict[str, Any]] = {
    "momentum": {"optimizer": "sgd"},
    "beta": {"objective": "orpo"},
    "muon_momentum": {"optimizer": "muon", "full": True},
    "muon_rate": {"optimizer": "muon", "full": True},
}


def _two_values(option: Option) -> tuple[Any, Any]:
    about, default = option.about, option.default
    if option.name in CHOSEN:
        return CHOSEN[option.name]
    if option.hint is bool:
        return (True, False)
    if about.choices:
        others = [choice for choice in about.choices if choice != default]
        return others[0], others[1] if len(others) > 1 else default
    assert option.hint in (int, float), f"{option.name}: two values of it belong into CHOSEN"
    if option.hint is int:
        return default + 3, default + 5
    lowest = about.minimum if about.minimum is not None else about.above
    highest = about.maximum if about.maximum is not None else about.below
    assert lowest is not None, option.name
    width = (lowest + 8 if highest is None else highest) - lowest
    return lowest + width / 4, lowest + width / 8


def _empty_value(option: Option) -> Any:
    """Give what is false to Python and may be said all the same; None: there is nothing."""
    about, empty = option.about, option.hint() if option.hint is not tuple else ()
    if option.hint in (int, float) and (
        about.above is not None or (about.minimum is not None and about.minimum > 0)
    ):
        return None
    if option.hint is str and (about.choices or option.default):
        return None
    return [] if isinstance(empty, tuple) else empty


REQUIRED = {"model": "m", "data": "d.jsonl"}
NEVER_EMPTY = ("targets", "adapter_layers")
FILE_AND_COMMAND_LINE = {name: _two_values(option) for name, option in OPTIONS.items()}
# Values that are false to Python and all the same said on purpose.
FALSE_AND_MEANT: dict[str, Any] = {
    name: empty
    for name, option in OPTIONS.items()
    if name not in (*REQUIRED, *NEVER_EMPTY) and (empty := _empty_value(option)) is not None
}


def read_options(
    file: Path | None, given: dict[str, Any], *, resume: Path | None = None
) -> TrainConfig:
    chosen = choose_options(file, given, resume=resume)
    if resume is None:
        chosen.require_model_and_data()
    return chosen.config


def _from(**values: Any) -> TrainConfig:
    return TrainConfig.from_mapping(values, source="ours.yaml")


def _write(folder: Path, values: dict[str, Any]) -> Path:
    path = folder / "options.yaml"
    path.write_text(yaml.safe_dump(values), "utf-8")
    return path


# Unknown keys


@pytest.mark.parametrize("name", NAMES)
def test_unknown_key_is_refused_with_the_nearest_name(name: str) -> None:
    with pytest.raises(ConfigError) as refused:
        _from(**{f"{name}x": 1})
    assert str(refused.value) == f"ours.yaml: unknown key '{name}x'; did you mean '{name}'?"


def test_unknown_key_near_nothing_gets_no_guess() -> None:
    with pytest.raises(ConfigError, match=r"^ours\.yaml: unknown key 'zzz'$"):
        _from(zzz=1)


def test_key_that_is_no_text_is_refused() -> None:
    with pytest.raises(ConfigError, match="unknown key '8'"):
        TrainConfig.from_mapping({8: 1}, source="ours.yaml")  # type: ignore[dict-item]


def test_dashes_as_on_the_command_line_are_accepted() -> None:
    assert TrainConfig.from_mapping({"max-seq-length": 64}, source="").max_seq_length == 64


# Numbers


@pytest.mark.parametrize("text", ["5e-5", '"5e-5"', "5E-5", "5.0e-5", "0.00005", ".5e-4"])
def test_every_spelling_of_a_learning_rate_is_the_same_number(text: str) -> None:
    """YAML 1.1 reads `5e-5` as text; to a person it is a number."""
    config = TrainConfig.from_mapping(yaml.safe_load(f"learning_rate: {text}"), source="")
    assert config.learning_rate == 5e-5
    assert type(config.learning_rate) is float


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("value", [True, False, None, [1], {}, "many", ""])
def test_what_is_no_number_is_refused(name: str, value: Any) -> None:
    with pytest.raises(ConfigError) as refused:
        _from(**{name: value})
    assert str(refused.value) == f"ours.yaml: '{name}' must be a number, got {value!r}"


@pytest.mark.parametrize("name", WHOLE_NUMBERS)
def test_half_a_sequence_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"'{name}' must be a whole number, got 8\.5"):
        _from(**{name: 8.5})


@pytest.mark.parametrize("value", [8, 8.0, "8", "8.0", "8e0"])
def test_whole_number_is_whole_however_it_is_written(value: Any) -> None:
    assert _from(rank=value).rank == 8
    assert type(_from(rank=value).rank) is int


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), "nan", "1e999"])
def test_endless_and_undefined_numbers_are_refused(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"^ours\.yaml: '{name}' must "):
        _from(**{name: value})


@pytest.mark.parametrize("name", FRACTIONS)
def test_number_too_large_for_a_float_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"^ours\.yaml: '{name}' must "):
        _from(**{name: 10**400})


def test_large_seed_is_kept_to_the_last_digit() -> None:
    assert _from(seed=2**53 + 1).seed == 2**53 + 1


# Other types


@pytest.mark.parametrize("value", [1, 0, "true", "no", None])
def test_what_is_not_true_or_false_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match="'checkpoint_activations' must be true or false"):
        _from(checkpoint_activations=value)


@pytest.mark.parametrize("name", ["model", "dtype", "run_dir"])
@pytest.mark.parametrize("value", [1, True, None, ["a"]])
def test_what_is_no_text_is_refused(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"'{name}' must be text"):
        _from(**{name: value})


@pytest.mark.parametrize(
    "value", ["den-pc,kitchen-mac", "den-pc, kitchen-mac ,", ["den-pc", "kitchen-mac"]]
)
def test_list_may_be_written_with_commas(value: Any) -> None:
    assert _from(devices=value).devices == ("den-pc", "kitchen-mac")


@pytest.mark.parametrize("value", [1, None, [1], {"a": 1}])
def test_what_is_no_list_of_names_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match="'devices' must be a list of names"):
        _from(devices=value)


# Ranges


@pytest.mark.parametrize(
    ("name", "accepted", "refused"),
    [
        *[(name, 1, 0) for name in ("batch_size", "max_seq_length", "rank", "epochs")],
        ("min_devices", 1, 0),
        *[(name, 0, -1) for name in ("steps", "microbatch_size", "warmup_steps", "seed")],
        *[(name, 0, -1) for name in ("val_rows", "eval_every", "save_every")],
        *[(name, 0.0, -0.1) for name in ("weight_decay", "max_grad_norm", "dropout", "alpha")],
        *[(name, 1e-9, 0.0) for name in ("learning_rate", "step_timeout_s", "device_wait_s")],
        ("dropout", 0.99, 1.0),
        ("min_lr_ratio", 0.0, -0.1),
        ("min_lr_ratio", 1.0, 1.1),
    ],
)
def test_range_ends_where_it_says(name: str, accepted: float, refused: float) -> None:
    assert getattr(_from(**{name: accepted}), name) == accepted
    with pytest.raises(ConfigError, match=rf"^ours\.yaml: '{name}' must .*got {refused}$"):
        _from(**{name: refused})


@pytest.mark.parametrize("name", ["dtype", "wire_dtype", "lr_schedule", "pipeline_schedule"])
def test_choice_outside_the_list_is_refused_with_the_list(name: str) -> None:
    with pytest.raises(ConfigError) as refused:
        _from(**{name: "fancy"})
    assert f"'{name}' must be one of " in str(refused.value)
    assert DEFAULTS[name] in str(refused.value)
    assert "got 'fancy'" in str(refused.value)


def test_unknown_projection_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match="no projection is called 'q_prj'; did you mean 'q_proj'"):
        _from(targets="q_prj,v_proj")


def test_training_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="'targets' is empty"):
        _from(targets=[])


def test_values_given_in_code_are_checked_too() -> None:
    with pytest.raises(ConfigError, match="'rank' must be at least 1, got 0"):
        TrainConfig(rank=0)


# What is made of it


@pytest.mark.parametrize("source", [0, 1])
def test_round_trip_through_yaml_and_json(source: int) -> None:
    values = {name: FILE_AND_COMMAND_LINE[name][source] for name in NAMES}
    values["val_split"] = 0.0  # val_rows says the same otherwise
    values |= {"objective": "sft", "beta": 0.1}  # pairs go with neither packing nor smoothing
    values |= {"optimizer": "adamw", "momentum": 0.9, "lr_schedule": "linear"}
    values |= {name: DEFAULTS[name] for name in ("muon_momentum", "muon_rate")}
    values |= {"full": False, "scale": 0.0}  # adapters' options; alpha says the same as scale
    config = _from(**values)
    assert config.to_dict() == values
    assert _from(**yaml.safe_load(yaml.safe_dump(config.to_dict()))) == config
    assert _from(**json.loads(json.dumps(config.to_dict()))) == config


# Which source wins


@pytest.mark.parametrize("name", NAMES)
def test_command_line_beats_file_beats_default(name: str, tmp_path: Path) -> None:
    in_file, on_line = FILE_AND_COMMAND_LINE[name]
    file = _write(tmp_path, {**REQUIRED, **BESIDE.get(name, {}), name: in_file})
    assert read_options(file, {name: on_line}).to_dict()[name] == on_line
    assert read_options(file, {}).to_dict()[name] == in_file
    if name not in REQUIRED:
        assert read_options(None, dict(REQUIRED)).to_dict()[name] == DEFAULTS[name]


@pytest.mark.parametrize("name", FALSE_AND_MEANT)
def test_zero_no_and_nothing_count_as_said(name: str, tmp_path: Path) -> None:
    meant = FALSE_AND_MEANT[name]
    in_file, _ = FILE_AND_COMMAND_LINE[name]
    assert in_file
    beside = BESIDE.get(name, {})
    file = _write(tmp_path, {name: in_file, **beside})
    over_file = read_options(file, {**REQUIRED, name: meant})
    assert over_file.to_dict()[name] == meant
    over_default = read_options(_write(tmp_path, {name: meant, **beside}), dict(REQUIRED))
    assert over_default.to_dict()[name] == meant


def test_dashed_key_of_the_file_loses_to_the_command_line_too(tmp_path: Path) -> None:
    file = _write(tmp_path, {**REQUIRED, "batch-size": 4})
    assert read_options(file, {}).batch_size == 4
    assert read_options(file, {"batch_size": 6}).batch_size == 6


def test_message_names_the_source_that_is_wrong(tmp_path: Path) -> None:
    file = _write(tmp_path, {"rank": 0})
    with pytest.raises(ConfigError, match=re.escape(f"{file}: 'rank' must be at least 1")):
        read_options(file, dict(REQUIRED))
    with pytest.raises(ConfigError, match=r"^command line: 'rank' must be at least 1"):
        read_options(None, {**REQUIRED, "rank": 0})


@pytest.mark.parametrize("name", REQUIRED)
def test_model_and_data_must_be_said_somewhere(name: str) -> None:
    rest = {key: value for key, value in REQUIRED.items() if key != name}
    with pytest.raises(ConfigError, match="is missing; see `exo-train train --help`"):
        read_options(None, rest)


@pytest.mark.parametrize(
    ("content", "problem"),
    [(b"- a\n- b\n", "must hold"), (b"a: [1", "is no YAML"), (b"a: \xff\xfe", "is no YAML")],
)
def test_file_that_is_no_options_file_is_named(
    content: bytes, problem: str, tmp_path: Path
) -> None:
    file = tmp_path / "options.yaml"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=re.escape(f"--config {file} {problem}")):
        read_options(file, dict(REQUIRED))


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml cannot be read"):
        read_options(tmp_path / "nowhere.yaml", dict(REQUIRED))


def test_file_made_on_windows_is_read(tmp_path: Path) -> None:
    file = tmp_path / "options.yaml"
    file.write_bytes(b"\xef\xbb\xbflearning_rate: 5e-5\r\nrank: 4\r\n")
    config = read_options(file, dict(REQUIRED))
    assert (config.learning_rate, config.rank) == (5e-5, 4)


def test_empty_file_says_nothing(tmp_path: Path) -> None:
    file = tmp_path / "options.yaml"
    file.write_text("# nothing yet\n", "utf-8")
    assert read_options(file, dict(REQUIRED)) == TrainConfig.from_mapping(REQUIRED, source="")


@pytest.mark.parametrize("name", NAMES)
def test_resumed_run_keeps_what_decides_its_numbers(name: str, tmp_path: Path) -> None:
    stored, asked = FILE_AND_COMMAND_LINE[name]
    RunDir(tmp_path).write_config(_from(**{name: stored, **BESIDE.get(name, {})}).to_dict())
    # A split that was laid down is in the run's plan from then on, rows are with the run.
    kept = {"layers": [], "data": ""}.get(name, stored)
    assert read_options(None, {}, resume=tmp_path).to_dict()[name] in (kept, str(tmp_path))
    if name in RESUME_MAY_CHANGE:
        assert read_options(None, {name: asked}, resume=tmp_path).to_dict()[name] == asked
    else:
        with pytest.raises(ConfigError, match=f"--{name.replace('_', '-')} cannot change"):
            read_options(None, {name: asked}, resume=tmp_path)
