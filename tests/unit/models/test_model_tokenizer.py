"""Tokenizers from directories and GGUF files agree, keep every text, and know their specials."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from exo_train.errors import ModelError
from exo_train.models.tokenizer import load_tokenizer
from tests.tiny_models import make_tiny_gguf, make_tiny_model, write_tiny_tokenizer

TEXT = "In 2024 the naïve cat's tail,\n\n\t日本語 🎉  two  spaces and I'LL <|im_start|>x"
PRE_TOKENIZERS = ["gpt-2", "default", "smollm", "llama-bpe", "qwen2"]


def test_directory_tokenizer_round_trips_and_renders(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(make_tiny_model(tmp_path, num_layers=1))
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1)
    chat = [{"role": "user", "content": "hi"}]
    assert (
        tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("pre_tokenizer", PRE_TOKENIZERS)
def test_gguf_tokenizer_round_trips_with_single_specials(
    tmp_path: Path, pre_tokenizer: str
) -> None:
    file = make_tiny_gguf(tmp_path / "m.gguf", num_layers=1, pre_tokenizer=pre_tokenizer)
    tokenizer = load_tokenizer(file)
    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    assert tokenizer.decode(ids) == TEXT
    assert tokenizer.encode("<|im_end|>", add_special_tokens=False) == [3]
    assert tokenizer.convert_tokens_to_ids(["<s>", "</s>"]) == [0, 1]
    assert tokenizer.chat_template is not None
    assert len(tokenizer) == 320
    saved = tmp_path / "saved"
    tokenizer.save_pretrained(saved)
    again = load_tokenizer(saved)
    assert again.encode(TEXT) == tokenizer.encode(TEXT)
    assert again.chat_template == tokenizer.chat_template


def test_gguf_and_directory_give_the_same_ids(tmp_path: Path) -> None:
    write_tiny_tokenizer(tmp_path)
    from_gguf = load_tokenizer(make_tiny_gguf(tmp_path / "m.gguf", num_layers=1))
    assert from_gguf.encode(TEXT) == load_tokenizer(tmp_path).encode(TEXT)


@pytest.mark.parametrize(
    ("pre_tokenizer", "pieces"),
    [
        ("gpt-2", ["Ġ2024"]),
        ("smollm", ["Ġ", "2", "0", "2", "4"]),
        ("llama-bpe", ["Ġ", "202", "4"]),
        ("qwen2", ["Ġ", "2", "0", "2", "4"]),
    ],
)
def test_digits_are_split_as_the_model_was_trained(
    tmp_path: Path, pre_tokenizer: str, pieces: list[str]
) -> None:
    file = make_tiny_gguf(tmp_path / "m.gguf", num_layers=1, pre_tokenizer=pre_tokenizer)
    backend = load_tokenizer(file).backend_tokenizer
    found = [piece for piece, _ in backend.pre_tokenizer.pre_tokenize_str(" 2024")]
    assert found == pieces


def test_bos_is_added_where_llama3_expects_it(tmp_path: Path) -> None:
    llama3 = make_tiny_gguf(tmp_path / "l.gguf", num_layers=1, pre_tokenizer="llama-bpe")
    gpt2 = make_tiny_gguf(tmp_path / "g.gguf", num_layers=1)
    assert load_tokenizer(llama3).encode("the")[0] == 0
    assert 0 not in load_tokenizer(gpt2).encode("the")


def test_unknown_pre_tokenizer_is_refused_by_name(tmp_path: Path) -> None:
    file = make_tiny_gguf(tmp_path / "m.gguf", num_layers=1, pre_tokenizer="tekken")
    with pytest.raises(ModelError, match=r"m\.gguf: pre-tokenizer 'tekken' is not supported"):
        load_tokenizer(file)


def test_missing_and_damaged_tokenizers_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no tokenizer\.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"model": 3}')
    with pytest.raises(ModelError, match=r"tokenizer\.json: cannot be read as a tokenizer"):
        load_tokenizer(tmp_path)
    with pytest.raises(ModelError, match="no tokenizer to read"):
        load_tokenizer(tmp_path / "nowhere")


def test_loading_a_tokenizer_imports_no_tensor_framework(tmp_path: Path) -> None:
    make_tiny_model(tmp_path, num_layers=1)
    program = (
        "import sys; from pathlib import Path\n"
        "from exo_train.models.tokenizer import load_tokenizer\n"
        f"load_tokenizer(Path({str(tmp_path)!r})).apply_chat_template("
        "[{'role': 'user', 'content': 'hi'}])\n"
        "print(sorted({'torch', 'mlx', 'mlx.core'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.strip() == "[]"
