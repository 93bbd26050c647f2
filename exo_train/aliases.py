"""Names that people bring from other fine-tuners: what each is here, or what to say instead.

Owns the table of these names. Pure; must not know a whole mapping (`own_names` does). Names are
those of mlx-lm, TRL and transformers, axolotl and LLaMA-Factory as their documentation has them.
A name that is an option here is never one of these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from exo_train.alias_values import (
    NotHereError,
    Values,
    read_adapter_folder,
    read_all_linear,
    read_bits,
    read_data,
    read_dtype,
    read_dtype_name,
    read_held_out,
    read_kind,
    read_last_layers,
    read_optimizer,
    read_pair_loss,
    read_rate_curve,
    read_steps,
    read_targets,
)
from exo_train.config import OPTIONS

PAIR_LOSSES = ("loss_type", "pref_loss")


@dataclass(frozen=True, slots=True, kw_only=True)
class Renamed:
    """Another name of `option`; `read` turns its value into options here.

    It may raise NotHereError. `about` is for the table in the docs: what becomes of the value.
    """

    names: tuple[str, ...]
    option: str
    read: Callable[[Any], Values] | None = None
    about: str = ""
    is_flag: bool = False  # true where it stands on a command line without a value

    def values(self, value: Any) -> Values:
        return {self.option: value} if self.read is None else self.read(value)

    def cells(self) -> str:
        return f"read as `{self.option}`" + (f": {self.about}" if self.about else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """Accepted with values that ask for what is so anyway; refused with any other."""

    names: tuple[str, ...]
    accepted: tuple[Any, ...]
    because: str
    instead: str

    def values(self, value: Any) -> Values:
        if not any(_same(value, each) for each in self.accepted):
            raise NotHereError(self.instead)
        return {}

    def cells(self) -> str:
        accepted = ", ".join(f"`{str(each).lower()}`" for each in self.accepted)
        return f"{accepted}: accepted, {self.because}; else refused: {self.instead}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    names: tuple[str, ...]
    instead: str

    def values(self, value: Any) -> Values:
        raise NotHereError(self.instead)

    def cells(self) -> str:
        return f"refused: {self.instead}"


Rule = Renamed | Settled | Refused


def _same(value: Any, accepted: Any) -> bool:
    if isinstance(value, bool) or isinstance(accepted, bool):
        return value is accepted
    return str(value).strip().lower() == str(accepted).lower()


_EVERY_STEP = "every step is shown, and a line of metrics.jsonl"
_SUPERVISED = 'of chats and completions the answers are learnt, of {"text": …} rows all'
_TABLE: tuple[Rule, ...] = (
    Renamed(names=("model_name_or_path", "base_model", "model_name"), option="model"),
    Renamed(
        names=("dataset", "datasets", "dataset_name", "train_file"),
        option="data",
        read=read_data,
        about="one file or directory, or a list with one `path`",
    ),
    Renamed(names=("output_dir", "adapter_path"), option="run_dir"),
    Renamed(
        names=("max_length", "cutoff_len", "sequence_len", "max_seq_len", "model_max_length"),
        option="max_seq_length",
    ),
    Renamed(
        names=("micro_batch_size", "per_device_train_batch_size"),
        option="microbatch_size",
        about="with `gradient_accumulation_steps` also `batch_size`, the product of both",
    ),
    Renamed(names=("num_train_epochs", "num_epochs"), option="epochs"),
    Renamed(names=("max_steps",), option="steps", read=read_steps, about="-1: by epochs"),
    Renamed(
        names=("iters",),
        option="steps",
        about="refused beside an accumulation, with which mlx-lm counts microbatches",
    ),
    Renamed(names=("lr",), option="learning_rate"),
    Renamed(
        names=("lr_scheduler_type", "lr_scheduler"),
        option="lr_schedule",
        read=read_rate_curve,
        about="`constant_with_warmup` is `constant`",
    ),
    Renamed(names=("warmup",), option="warmup_steps"),
    Renamed(names=("lora_r", "lora_rank", "lora_parameters.rank"), option="rank"),
    Renamed(names=("lora_alpha", "lora_parameters.alpha"), option="alpha"),
    Renamed(names=("lora_scale", "lora_parameters.scale"), option="scale"),
    Renamed(names=("lora_dropout", "lora_parameters.dropout"), option="dropout"),
    Renamed(
        names=("lora_target_modules", "lora_target", "target_modules", "lora_parameters.keys"),
        option="targets",
        read=read_targets,
        about="`all` and `all-linear` are all projections",
    ),
    Renamed(
        names=("lora_target_linear",),
        option="targets",
        read=read_all_linear,
        is_flag=True,
        about="all",
    ),
    Renamed(
        names=("num_layers", "lora_layers"),
        option="adapter_layers",
        read=read_last_layers,
        about="the last so many; -1: all",
    ),
    Renamed(names=("template",), option="chat_template"),
    Renamed(names=("use_rslora", "peft_use_rslora"), option="rslora"),
    Renamed(names=("use_dora", "peft_use_dora"), option="dora"),
    Renamed(names=("lora_model_dir",), option="init_adapter"),
    Renamed(
        names=("resume_adapter_file",),
        option="init_adapter",
        read=read_adapter_folder,
        about="the folder that the file lies in",
    ),
    Renamed(names=("loraplus_lr_ratio",), option="lora_plus_ratio"),
    Renamed(names=("neftune_noise_alpha",), option="neftune_alpha"),
    Renamed(names=("label_smoothing_factor",), option="label_smoothing"),
    Renamed(
        names=("optim",), option="optimizer", read=read_optimizer, about="any AdamW is `adamw`"
    ),
    Renamed(names=("sample_packing",), option="packing"),
    Renamed(names=("load_in_4bit",), option="quantize", read=read_bits(4), is_flag=True, about="4"),
    Renamed(names=("load_in_8bit",), option="quantize", read=read_bits(8), is_flag=True, about="8"),
    Renamed(
        names=("val_set_size", "val_size"),
        option="val_rows",
        read=read_held_out,
        about="a number of rows",
    ),
    Renamed(names=("eval_steps", "steps_per_eval"), option="eval_every"),
    Renamed(names=("early_stopping_patience",), option="early_stop"),
    Renamed(names=("save_steps",), option="save_every"),
    Renamed(names=("save_total_limit",), option="keep"),
    Renamed(names=("gradient_checkpointing", "grad_checkpoint"), option="checkpoint_activations"),
    Renamed(
        names=("bf16",),
        option="dtype",
        read=read_dtype("bf16"),
        is_flag=True,
        about="`bf16` where true",
    ),
    Renamed(
        names=("fp16",),
        option="dtype",
        read=read_dtype("fp16"),
        is_flag=True,
        about="`fp16` where true",
    ),
    Settled(
        names=("train", "do_train"),
        accepted=(True,),
        because="`train` trains",
        instead="to measure without training there is `exo-train eval`",
    ),
    Settled(
        names=("test", "do_predict"),
        accepted=(False,),
        because="nothing is tested by `train`",
        instead="leave it out, and run `exo-train eval` afterwards",
    ),
    Settled(
        names=("mask_prompt", "completion_only_loss", "assistant_only_loss"),
        accepted=(True,),
        because=_SUPERVISED,
        instead='to learn all tokens, give rows as {"text": …}',
    ),
    Settled(
        names=("train_on_inputs", "train_on_prompt"),
        accepted=(False,),
        because=_SUPERVISED,
        instead='to learn all tokens, give rows as {"text": …}',
    ),
    Renamed(
        names=("fine_tune_type", "finetuning_type", "adapter"),
        option="full",
        read=read_kind,
        about="where it is `full`; `dora` is `dora`",
    ),
    Renamed(names=("stage", "rl"), option="objective", about="`sft`, `dpo` or `orpo`"),
    Renamed(
        names=PAIR_LOSSES,
        option="objective",
        read=read_pair_loss,
        about="`orpo`; of dpo's losses there is `sigmoid`",
    ),
    Renamed(names=("pref_beta", "dpo_beta", "rl_beta", "orpo_alpha"), option="beta"),
    Renamed(names=("dpo_label_smoothing",), option="label_smoothing"),
    Settled(
        names=("pref_ftx", "rpo_alpha"),
        accepted=(0,),
        because="dpo has no loss beside its own",
        instead="for a loss of the chosen answers as well there is 'objective: orpo'",
    ),
    Settled(
        names=("precompute_ref_log_probs", "reference_free"),
        accepted=(False,),
        because="dpo asks the base, step by step",
        instead="leave it out",
    ),
    Refused(
        names=("ref_model", "ref_model_name_or_path"),
        instead="dpo's reference is the model with its adapter off: leave it out",
    ),
    Refused(
        names=("max_prompt_length", "max_completion_length"),
        instead="say 'max_seq_length'; of pairs the prompt is cut, answers never",
    ),
    Settled(
        names=("save_strategy", "eval_strategy", "evaluation_strategy"),
        accepted=("steps",),
        because="`save_every` and `eval_every` count steps",
        instead="say 'save_every' or 'eval_every', in steps",
    ),
    Refused(names=("logging_steps", "steps_per_report"), instead=f"{_EVERY_STEP}; leave it out"),
    Refused(names=("val_batches",), instead="all held-out rows are measured: say 'val_rows'"),
    Refused(
        names=("per_device_eval_batch_size", "eval_batch_size"),
        instead="it changes no number here: leave it out",
    ),
    Refused(
        names=("resume_from_checkpoint",),
        instead="say --resume RUN on the command line, without --config",
    ),
    Refused(names=("wandb", "use_wandb"), instead="say 'report_to: wandb'"),
    Refused(
        names=("project_name", "wandb_project"),
        instead="say it in WANDB_PROJECT, TRACKIO_PROJECT or SWANLAB_PROJECT in the environment",
    ),
    Refused(names=("hf_dataset",), instead="say 'data', a file with its rows"),
    Refused(
        names=("deepspeed", "fsdp", "accelerate"),
        instead="the devices of the cluster are used by themselves: leave it out",
    ),
)
NESTED = "lora_parameters"  # mlx-lm's, with what is in it
ACCUMULATIONS = ("gradient_accumulation_steps", "grad_accumulation_steps")
_ACCUMULATED = "read as `batch_size`: times `microbatch_size`; refused where that is not said"

# Names that are options here, too, with values that only others have.
OWN_VALUES: tuple[Renamed, ...] = (
    Renamed(
        names=("optimizer",), option="optimizer", read=read_optimizer, about="any AdamW is `adamw`"
    ),
    Renamed(
        names=("dtype",),
        option="dtype",
        read=read_dtype_name,
        about="`bfloat16` is `bf16`, and so on",
    ),
)

RULES = {name: rule for rule in _TABLE for name in rule.names}


def is_flag(name: str) -> bool:
    """Say whether a name stands on a command line by itself, as those programs have it."""
    rule = RULES.get(name)
    if isinstance(rule, Renamed):
        return rule.is_flag or (rule.read is None and OPTIONS[rule.option].hint is bool)
    return isinstance(rule, Settled) and isinstance(rule.accepted[0], bool)


def foreign_names() -> Iterator[tuple[str, str]]:
    """Give each row of the table in the docs: names of one meaning, and what they are here."""
    by_meaning: dict[str, list[str]] = {}
    own = {rule.option: rule for rule in OWN_VALUES}
    for name, rule in (RULES | own).items():
        by_meaning.setdefault(rule.cells(), []).append(name)
    for cells, names in by_meaning.items():
        yield ", ".join(f"`{name}`" for name in names), cells
    yield ", ".join(f"`{name}`" for name in ACCUMULATIONS), _ACCUMULATED
