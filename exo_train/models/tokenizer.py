"""Loads the tokenizer of a model directory or GGUF file as a transformers fast tokenizer.

Owns the rebuilding of a tokenizer from GGUF metadata. Must not import a tensor framework; so not
transformers' AutoTokenizer either, which imports PyTorch where it is installed.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    normalizers,
    pre_tokenizers,
    processors,
)
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from exo_train.errors import ModelError
from exo_train.models.gguf_file import metadata, open_reader

# Token types of `tokenizer.ggml.token_type` (llama.cpp's llama_token_type).
_CONTROL = 3
_USER_DEFINED = 4
# llama.cpp, src/llama-vocab.cpp: the splits of these two vocabularies, as Hugging Face has them.
_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")


def load_tokenizer(path: Path) -> PreTrainedTokenizerFast:
    """Load from a Hugging Face directory (tokenizer.json) or rebuild from a .gguf file."""
    if path.is_dir():
        return _load_directory(path)
    if path.suffix.lower() == ".gguf" and path.is_file():
        return _from_gguf(path)
    raise ModelError(f"{path}: no tokenizer to read; give a model directory or a .gguf file")


def adds_bos(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Tell whether the tokenizer itself puts BOS before a text: ids decide, not settings."""
    bos: int | None = tokenizer.bos_token_id
    return bos is not None and bool(tokenizer.encode("a")[:1] == [bos])


def is_one_token(tokenizer: PreTrainedTokenizerBase, text: str) -> bool:
    """Tell whether `text` has an id of its own, wherever it stands."""
    ids: list[int] = tokenizer.encode(f"a{text}a", add_special_tokens=False)
    unknown: int | None = tokenizer.unk_token_id
    own = tokenizer.convert_tokens_to_ids(text)
    return own is not None and own != unknown and own in ids


def _load_directory(path: Path) -> PreTrainedTokenizerFast:
    file = path / "tokenizer.json"
    if not file.is_file():
        raise ModelError(
            f"{path}: has no tokenizer.json; save the tokenizer with transformers' "
            "save_pretrained, which writes it"
        )
    try:
        return PreTrainedTokenizerFast.from_pretrained(path, local_files_only=True)
    except Exception as error:  # noqa: BLE001 - the Rust side raises bare Exception
        raise ModelError(f"{file}: cannot be read as a tokenizer ({error})") from None


def _from_gguf(path: Path) -> PreTrainedTokenizerFast:
    reader = open_reader(path)

    def read(key: str) -> Any:
        return metadata(reader, f"tokenizer.ggml.{key}")

    model = read("model")
    if model != "gpt2":
        raise ModelError(
            f"{path}: tokenizer model '{model}' is not supported, only byte-level BPE ('gpt2'); "
            "use the model's safetensors directory"
        )
    tokens, merges = read("tokens"), read("merges")
    if not tokens or not merges:
        raise ModelError(f"{path}: the metadata has no tokenizer tokens or merges")
    types = read("token_type") or []
    pre = str(read("pre") or "default")
    tokenizer = _build(path, tokens, merges, types, pre)
    named = {
        role: tokens[index]
        for role, key in (
            ("bos_token", "bos_token_id"),
            ("eos_token", "eos_token_id"),
            ("unk_token", "unknown_token_id"),
            ("pad_token", "padding_token_id"),
        )
        if (index := read(key)) is not None and 0 <= index < len(tokens)
    }
    add_bos = read("add_bos_token")
    if add_bos is None:
        add_bos = pre in _LLAMA3_NAMES  # as llama.cpp does
    _add_template(
        tokenizer,
        before=[named["bos_token"]] if add_bos and "bos_token" in named else [],
        after=[named["eos_token"]] if read("add_eos_token") and "eos_token" in named else [],
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **named
    )
    fast.chat_template = metadata(reader, "tokenizer.chat_template")
    return fast


def _build(
    path: Path, tokens: list[str], merges: list[str], types: list[int], pre: str
) -> Tokenizer:
    splitter = _SPLITTERS.get(pre)
    if splitter is None:
        raise ModelError(
            f"{path}: pre-tokenizer '{pre}' is not supported (supported: "
            f"{', '.join(_SPLITTERS)}); use the model's safetensors directory"
        )
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    vocab = {token: index for index, token in enumerate(tokens)}
    try:
        bpe = BPE(vocab=vocab, merges=pairs, ignore_merges=pre in _LLAMA3_NAMES)
    except Exception as error:  # noqa: BLE001 - the Rust side raises bare Exception
        raise ModelError(f"{path}: the tokenizer's merges are damaged ({error})") from None
    tokenizer = Tokenizer(bpe)
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = splitter()
    tokenizer.decoder = decoders.ByteLevel()
    kinds = zip(tokens, types, strict=False)
    added = [
        AddedToken(token, special=kind == _CONTROL, normalized=False)
        for token, kind in kinds
        if kind in (_CONTROL, _USER_DEFINED)
    ]
    tokenizer.add_tokens(added)
    return tokenizer


def _add_template(tokenizer: Tokenizer, *, before: list[str], after: list[str]) -> None:
    """Put BOS and EOS where the model was trained to see them."""
    if before or after:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*before, "$A", *after],
            special_tokens=[(token, tokenizer.token_to_id(token)) for token in {*before, *after}],
        )


def _gpt2_splitter() -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _smollm_splitter() -> Any:
    return pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), _gpt2_splitter()]
    )


def _regex_splitter(pattern: str) -> Any:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


_LLAMA3_NAMES = ("llama-bpe", "llama3", "llama-v3")
_SPLITTERS: dict[str, Callable[[], Any]] = {
    "smollm": _smollm_splitter,
    "gpt-2": _gpt2_splitter,
    "default": _gpt2_splitter,
    **dict.fromkeys(_LLAMA3_NAMES, lambda: _regex_splitter(_LLAMA3_SPLIT)),
    "qwen2": lambda: _regex_splitter(_QWEN2_SPLIT),
}
