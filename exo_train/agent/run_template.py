"""The chat template that a run was given, as a file in its directory.

Owns that whoever goes on with a run, tells its result or talks to it renders as training did. A run
that was given none has no such file: its model's own template counts.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from transformers import PreTrainedTokenizerFast

from exo_train.config import TrainConfig
from exo_train.models.tokenizer import load_tokenizer
from exo_train.train.chat import end_of_turn
from exo_train.train.durable import disk_errors, write_durable
from exo_train.train.rundir import TEMPLATE_FILE
from exo_train.train.templates import use_template


def keep_template(run_dir: Path, config: TrainConfig, *, model_path: Path) -> None:
    """Write what `config.chat_template` names, as it is used with the model's tokenizer."""
    if not config.chat_template:
        return
    tokenizer = load_tokenizer(model_path)
    use_template(tokenizer, config.chat_template)
    with disk_errors(TEMPLATE_FILE, run_dir):
        write_durable(run_dir / TEMPLATE_FILE, str(tokenizer.chat_template).encode())


def kept_template(run_dir: Path) -> str:
    """Give what to name as --chat-template to get the run's template; "": it has none kept."""
    path = run_dir / TEMPLATE_FILE
    return str(path) if path.is_file() else ""


def with_kept_template(config: TrainConfig, run_dir: Path) -> TrainConfig:
    """Give a run's options to encode other rows with: what was a file then may be gone by now."""
    kept = kept_template(run_dir)
    return replace(config, chat_template=kept) if kept else config


def tokenizer_of_run(run_dir: Path, *, model_path: Path) -> PreTrainedTokenizerFast:
    """Load the model's tokenizer with the template that the run was given."""
    tokenizer = load_tokenizer(model_path)
    use_template(tokenizer, kept_template(run_dir))
    return tokenizer


def save_tokenizer(run_dir: Path, *folders: Path, model_path: Path) -> None:
    """Write the run's tokenizer files beside its adapters, with the template it was trained with.

    Its EOS is then what ends a turn: other programs stop there. Not where the template writes EOS
    by that name, as it would write another token.
    """
    tokenizer = tokenizer_of_run(run_dir, model_path=model_path)
    if kept_template(run_dir) and "eos_token" not in str(tokenizer.chat_template):
        end = end_of_turn(tokenizer)
        if end is not None:
            tokenizer.eos_token = tokenizer.convert_ids_to_tokens(end)
    for folder in folders:
        tokenizer.save_pretrained(str(folder))
