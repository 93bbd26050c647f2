"""Names of other programs: what each becomes, what is refused, and which place wins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from exo_train.agent.chosen_options import choose_options
from exo_train.aliases import RULES, is_flag
from exo_train.cli.main import app
from exo_train.config import OPTIONS, TrainConfig
from exo_train.errors import ConfigError
from exo_train.lora_config import ALL_TARGETS
from exo_train.own_names import is_foreign, to_own_names
from exo_train.train.rundir import RunDir

MLX_LM = """
model: mistral
train: true
mask_prompt: true
data: ./data
iters: 40
batch_size: 4
learning_rate: 1e-5
grad_checkpoint: false
max_seq_length: 2048
save_every: 100
steps_per_eval: 200
adapter_path: adapters
resume_adapter_file: null
lora_parameters: {rank: 4, scale: 3.0, dropout: 0.1, keys: [q_proj, v_proj]}
"""
TRL = {
    "model_name_or_path": "llama",
    "datasets": [{"path": "rows.jsonl", "type": "chat_template"}],
    "output_dir": "out",
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 4,
    "num_train_epochs": 3.0,
    "max_steps": -1,
    "lora_r": 16,
    "lora_alpha": 32,
    "lora_target_modules": "all-linear",
    "lr_scheduler_type": "constant_with_warmup",
    "gradient_checkpointing": True,
    "bf16": True,
    "val_set_size": 20,
}


def _read(**values: Any) -> dict[str, Any]:
    return to_own_names(values, source="ours.yaml").values


def _refusal(**values: Any) -> str:
    with pytest.raises(ConfigError) as refused:
        to_own_names(values, source="ours.yaml")
    assert refused.value.exit_code == 2
    return str(refused.value)


def test_file_of_mlx_lm_alone_is_enough(tmp_path: Path) -> None:
    (tmp_path / "lora.yaml").write_text(MLX_LM, "utf-8")
    chosen = choose_options(tmp_path / "lora.yaml", {})
    chosen.require_model_and_data()
    config = chosen.config
    assert (config.model, config.data, config.run_dir) == ("mistral", "./data", "adapters")
    assert (config.steps, config.batch_size, config.eval_every) == (40, 4, 200)
    assert (config.rank, config.lora.alpha, config.dropout) == (4, 12.0, 0.1)
    assert config.lora.scale == 3.0
    assert config.targets == ("q_proj", "v_proj")
    assert "'lora_parameters.scale' is read as 'scale'" in chosen.notes
    assert chosen.sources["rank"] == "file, as lora_parameters.rank"


def test_names_of_trl_and_axolotl() -> None:
    config = TrainConfig(**_read(**TRL))
    assert (config.model, config.data, config.run_dir) == ("llama", "rows.jsonl", "out")
    assert (config.microbatch_size, config.batch_size) == (2, 8)
    assert (config.epochs, config.steps) == (3, 0)
    assert (config.rank, config.alpha, config.targets) == (16, 32.0, ALL_TARGETS)
    assert (config.lr_schedule, config.dtype) == ("constant", "bf16")
    assert config.checkpoint_activations
    assert config.val_rows == 20


@pytest.mark.parametrize("name", sorted(RULES))
def test_no_name_of_the_table_is_ignored(name: str) -> None:
    """Each is read as an option, so anyway, or refused by its own name."""
    assert name not in OPTIONS
    for value in (True, 3, "lora"):
        said = _notes_or_refusal(name, value)
        assert said.startswith(f"'{name}'"), said


def _notes_or_refusal(name: str, value: Any) -> str:
    try:
        return to_own_names({name: value}, source="").notes[0]
    except ConfigError as error:
        return str(error).removeprefix(": ")


def test_what_was_read_as_what_is_said() -> None:
    read = to_own_names({"lora_r": 8, "bf16": True}, source="")
    assert read.notes == ("'lora_r' is read as 'rank'", "'bf16' is read as 'dtype' bf16")


def test_two_names_of_one_option_must_agree() -> None:
    assert _read(lora_r=8, rank="8", **{"lora-rank": 8.0})["rank"] == 8
    assert _refusal(lora_r=8, rank=16) == (
        "ours.yaml: 'lora_r' and 'rank' both say 'rank', 8 and 16; leave one out"
    )
    assert "'bf16' and 'fp16' both say 'dtype', bf16 and fp16" in _refusal(bf16=True, fp16=True)
    assert "both say 'batch_size', 4 and 8" in _refusal(
        batch_size=4, micro_batch_size=2, gradient_accumulation_steps=4
    )


def test_wrong_value_is_refused_under_the_name_that_was_used() -> None:
    assert _refusal(lora_r="many") == "ours.yaml: 'lora_r': 'rank' must be a number, got 'many'"
    assert "'val_size': it must" not in str(_read(val_size=3))
    assert "'val_size' is refused: it must be a number of rows" in _refusal(val_size="few")


def test_accumulation_alone_is_refused_and_one_says_nothing() -> None:
    said = _refusal(gradient_accumulation_steps=4)
    assert "'gradient_accumulation_steps' is refused: alone it does not say" in said
    assert "say 'batch_size'" in said
    assert _read(gradient_accumulation_steps=1) == {}


def test_iterations_are_updates_only_without_accumulation() -> None:
    assert _read(iters=40, grad_accumulation_steps=1) == {"steps": 40}
    said = _refusal(iters=40, batch_size=2, grad_accumulation_steps=4)
    assert "'iters' is refused: with 'grad_accumulation_steps' it counts microbatches" in said


@pytest.mark.parametrize("value", [True, "true", "True"])
def test_training_and_masked_prompts_are_so_anyway(value: Any) -> None:
    spoken = value if value is True else {"true": True, "True": True}[value]
    assert _read(train=spoken, mask_prompt=spoken, train_on_inputs=False) == {}


def test_what_cannot_be_meant_is_refused() -> None:
    assert "exo-train eval" in _refusal(train=False)
    assert "'mask_prompt' is refused: to learn all tokens" in _refusal(mask_prompt=False)
    assert "'train_on_inputs' is refused" in _refusal(train_on_inputs=True)
    assert "metrics.jsonl" in _refusal(logging_steps=5)
    assert "'lr_schedule' is refused: as a mapping" in _refusal(lr_schedule={"name": "cosine"})
    assert "say 'data'" in _refusal(datasets=[{"path": "a"}, {"path": "b"}])


def test_what_has_a_meaning_here_by_now_is_read() -> None:
    assert _read(optim="paged_adamw_8bit") == {"optimizer": "adamw"}
    assert _read(resume_adapter_file="out/adapters.safetensors") == {"init_adapter": "out"}
    assert _read(fine_tune_type="dora") == {"dora": True}
    assert not is_flag("fine_tune_type")  # its value is a word
    assert _read(adapter="qlora", load_in_4bit=True) == {"full": False, "quantize": 4}
    rslora = TrainConfig.from_mapping(
        _read(lora_parameters={"rank": 16, "scale": 20}, use_rslora=True), source=""
    )
    assert (rslora.lora.alpha, rslora.lora.scale) == (80.0, 20.0)


@pytest.mark.parametrize(
    ("said", "own"),
    [
        ({"optimizer": "adamw_torch_fused"}, {"optimizer": "adamw"}),
        ({"optimizer": "adafactor"}, {"optimizer": "adafactor"}),
        ({"dtype": "bfloat16"}, {"dtype": "bf16"}),
    ],
)
def test_our_own_names_are_read_with_others_values(
    said: dict[str, Any], own: dict[str, Any]
) -> None:
    read = to_own_names(said, source="")
    assert read.values == own
    ((name, value),) = said.items()
    assert read.notes == ((f"'{name}' {value} is read as {own[name]}",) if said != own else ())
    with pytest.raises(ConfigError, match="'optimizer' must be one of"):
        choose_options(None, {"model": "m", "data": "d", "optimizer": "lion"})


def test_unknown_name_is_refused_with_the_nearest_of_all() -> None:
    assert _refusal(lora_rr=8) == "ours.yaml: unknown key 'lora_rr'; did you mean 'lora_r'?"
    assert _refusal(zzz=1) == "ours.yaml: unknown key 'zzz'"


def test_scale_and_accumulation_take_the_other_half_from_the_file(tmp_path: Path) -> None:
    file = tmp_path / "options.yaml"
    file.write_text("micro_batch_size: 2\nrank: 4\nlora_alpha: 99\n", "utf-8")
    config = choose_options(file, {"grad_accumulation_steps": "3", "lora_scale": "2"}).config
    assert (config.batch_size, config.lora.alpha) == (6, 8.0)


# The command line


def _printed(*words: str) -> dict[str, Any]:
    result = CliRunner().invoke(app, ["train", *words, "--print-config"])
    assert result.exit_code == 0, result.output
    printed = yaml.safe_load(result.stdout)
    assert isinstance(printed, dict)
    return printed


def test_flags_of_other_programs_on_the_command_line() -> None:
    printed = _printed(
        "--lora-r", "16", "--mask-prompt", "m", "--lora-alpha=32", "--bf16", "True",
        "--grad-checkpoint", "--data", "--train", "--cutoff-len", "64", "--max-steps", "-1",
    )  # fmt: skip
    assert printed["model"] == "m"  # no flag took it for its value
    assert printed["data"] == "--train"  # a value, whatever it looks like
    assert (printed["rank"], printed["alpha"], printed["dtype"]) == (16, 32.0, "bf16")
    assert (printed["max_seq_length"], printed["checkpoint_activations"]) == (64, True)


def test_own_flags_stay_own() -> None:
    assert not any(is_foreign(name) for name in OPTIONS)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--lora-rr", "8"), "unknown option '--lora-rr'; did you mean '--lora-r'?"),
        (("--stepz", "8"), "unknown option '--stepz'; did you mean '--steps'?"),
        (("--lora-r", "8", "--rank", "9"), "both say 'rank'"),
        (("--lora-r", "8", "--lora-r", "9"), "--lora-r is there twice"),
        (("--logging-steps", "9"), "'logging_steps' is refused"),
    ],
)
def test_refusals_on_the_command_line(words: tuple[str, ...], said: str) -> None:
    result = CliRunner().invoke(app, ["train", "m", "--data", "d", *words])
    assert isinstance(result.exception, ConfigError)
    assert said in str(result.exception)


# --print-config


def test_printed_options_are_a_file_for_config(tmp_path: Path) -> None:
    file = tmp_path / "options.yaml"
    file.write_text("lora_r: 4\ndata: 'a # b.jsonl'\nlearning_rate: 1e-5\n", "utf-8")
    first = choose_options(file, {"model": "m", "devices": "attic,den-pc", "seed": 3})
    text = first.to_yaml()
    lines = dict(line.split(": ", 1) for line in text.splitlines())
    assert lines["rank"] == "4  # file, as lora_r"
    assert lines["seed"] == "3  # command line"
    assert lines["epochs"] == "1  # default"
    again = tmp_path / "again.yaml"
    again.write_text(text, "utf-8")
    assert choose_options(again, {}).config == first.config
    assert first.config.learning_rate == 1e-5


def test_print_config_as_json_and_without_model(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["train", "--rank", "4", "--print-config", "--json"])
    assert result.exit_code == 0
    options = yaml.safe_load(result.stdout)["options"]
    assert options["rank"] == {"value": 4, "source": "command line"}
    assert options["model"] == {"value": "", "source": "default"}


def test_resumed_run_takes_foreign_names_as_its_own(tmp_path: Path) -> None:
    RunDir(tmp_path).write_config(TrainConfig(model="m", rank=4).to_dict())
    chosen = choose_options(None, {"save_steps": "7"}, resume=tmp_path)
    assert (chosen.config.save_every, chosen.config.rank) == (7, 4)
    assert chosen.sources["save_every"] == "command line, as save_steps"
    assert chosen.sources["rank"] == "the run"
    with pytest.raises(ConfigError, match="--rank cannot change on --resume: the run has 4"):
        choose_options(None, {"lora_r": "8"}, resume=tmp_path)


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ({"rl": "dpo", "rl_beta": 0.2}, {"objective": "dpo", "beta": 0.2}),
        ({"rl": "orpo", "orpo_alpha": 0.3}, {"objective": "orpo", "beta": 0.3}),
        (
            {"stage": "dpo", "pref_beta": 0.2, "pref_loss": "sigmoid", "pref_ftx": 0},
            {"objective": "dpo", "beta": 0.2},
        ),
        ({"pref_loss": "orpo"}, {"objective": "orpo"}),
        ({"stage": "dpo", "pref_loss": "orpo"}, {"objective": "orpo"}),
        ({"stage": "sft"}, {"objective": "sft"}),
        (
            {"objective": "dpo", "beta": 0.2, "loss_type": ["sigmoid"], "reference_free": False},
            {"objective": "dpo", "beta": 0.2},
        ),
        ({"dpo_label_smoothing": 0.1}, {"label_smoothing": 0.1}),
    ],
    ids=str,
)
def test_preference_tuning_by_other_names(theirs: dict[str, Any], ours: dict[str, Any]) -> None:
    assert _read(**theirs) == ours


def test_what_preference_tuning_has_not_is_refused_with_what_it_has() -> None:
    assert "of the losses for pairs there are dpo's sigmoid, and orpo" in _refusal(loss_type="ipo")
    assert "'objective: orpo'" in _refusal(rpo_alpha=1.0)
    assert "of pairs the prompt is cut" in _refusal(max_prompt_length=100)
    assert "with its adapter off" in _refusal(ref_model="other")
    said = _refusal(stage="sft", pref_loss="orpo")
    assert "'stage' and 'pref_loss' both say 'objective', sft and orpo" in said
