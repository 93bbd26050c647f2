"""A run keeps the template it was given: resumed, asked and exported it renders as in training."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from exo_train.agent.run_data import encode_data, fingerprint
from exo_train.agent.run_template import (
    keep_template,
    kept_template,
    save_tokenizer,
    tokenizer_of_run,
    with_kept_template,
)
from exo_train.config import TrainConfig
from exo_train.errors import DataError
from exo_train.models.open import open_model
from exo_train.models.tokenizer import load_tokenizer
from exo_train.train.chat import encode_prompt
from exo_train.train.data_set import read_data
from exo_train.train.rows import Message
from tests.tiny_models import CHATML, make_tiny_model

QUESTION = (Message(role="user", content="Hi"),)
# Ends a turn with a token that is not EOS, as most chat models do.
TURNS_IN_BRACKETS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant: {% endif %}\n"
)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A base model: its tokenizer has no chat template."""
    model = make_tiny_model(tmp_path / "base", num_layers=1)
    config = json.loads((model / "tokenizer_config.json").read_text("utf-8"))
    del config["chat_template"]
    (model / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")
    return model


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    return folder


def digest(model: Path, data: Path, chat_template: str) -> str:
    config = TrainConfig(data=str(data), chat_template=chat_template)
    spec, _ = open_model(model)
    encoded = encode_data(
        read_data(str(data)), config, model_path=model, spec=spec, on_note=lambda note: None
    )
    return fingerprint(encoded.batches.examples, encoded.held_out)


def test_template_of_a_file_that_is_gone_still_encodes_the_same_rows(
    model: Path, run: Path, tmp_path: Path
) -> None:
    file, data = tmp_path / "mine.jinja", tmp_path / "chats.jsonl"
    file.write_text(TURNS_IN_BRACKETS, "utf-8")
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}]
    data.write_text(json.dumps({"messages": messages}), "utf-8")
    before = digest(model, data, str(file))
    keep_template(run, TrainConfig(chat_template=str(file)), model_path=model)
    file.unlink()
    kept = with_kept_template(TrainConfig(chat_template=str(file)), run).chat_template
    assert digest(model, data, kept) == before
    assert digest(model, data, "chatml") != before
    with pytest.raises(DataError, match="has no chat template; give one with --chat-template"):
        digest(model, data, "")


def test_adapters_tokenizer_renders_as_the_run_and_stops_at_the_end_of_a_turn(
    model: Path, run: Path, tmp_path: Path
) -> None:
    file = tmp_path / "mine.jinja"
    file.write_text(TURNS_IN_BRACKETS, "utf-8")
    keep_template(run, TrainConfig(chat_template=str(file)), model_path=model)
    save_tokenizer(run, tmp_path / "adapter", model_path=model)
    saved = load_tokenizer(tmp_path / "adapter")
    prompt = saved.decode(encode_prompt(QUESTION, saved))
    assert prompt == "<|im_start|>user: Hi<|im_end|><|im_start|>assistant: "
    assert encode_prompt(QUESTION, saved) == encode_prompt(
        QUESTION, tokenizer_of_run(run, model_path=model)
    )
    assert (saved.eos_token, load_tokenizer(model).eos_token) == ("<|im_end|>", "</s>")
    assert (tmp_path / "adapter" / "chat_template.jinja").read_text("utf-8").strip() == (
        TURNS_IN_BRACKETS.strip()
    )
    assert len(saved) == len(load_tokenizer(model))


def test_template_that_writes_eos_keeps_it(model: Path, run: Path, tmp_path: Path) -> None:
    file = tmp_path / "mine.jinja"
    file.write_text("{{ eos_token }}" + TURNS_IN_BRACKETS, "utf-8")
    keep_template(run, TrainConfig(chat_template=str(file)), model_path=model)
    save_tokenizer(run, tmp_path / "adapter", model_path=model)
    saved = load_tokenizer(tmp_path / "adapter")
    prompt = saved.decode(encode_prompt(QUESTION, saved))
    assert prompt == "</s><|im_start|>user: Hi<|im_end|><|im_start|>assistant: "


def test_run_that_was_given_none_has_the_models_own(run: Path, tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "chat", num_layers=1)
    keep_template(run, TrainConfig(), model_path=model)
    assert kept_template(run) == ""
    save_tokenizer(run, tmp_path / "adapter", model_path=model)
    saved = load_tokenizer(tmp_path / "adapter")
    assert (saved.chat_template, saved.eos_token) == (CHATML, "</s>")
