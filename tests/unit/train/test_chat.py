"""Masks, BOS, EOS and truncation: golden ids and counts for three families of templates.

The tiny tokenizer knows few merges, so "Yes" is three tokens and counts can be checked by hand.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from exo_train.errors import DataError
from exo_train.train.chat import EncodedRows, RowEncoder, encode_prompt, encode_rows
from exo_train.train.examples import Example
from exo_train.train.rows import ChatRow, CompletionRow, Message, Row, TextRow
from tests.tiny_models import write_tiny_tokenizer

BOS_ID, EOS_ID, IM_START_ID, IM_END_ID = 0, 1, 2, 3
LLAMA3_TOKENS = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
LLAMA3 = (
    "{{ bos_token }}"
    "{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{{ m.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
LLAMA2 = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user/assistant') }}{% endif %}"
    "{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
DEFAULT_SYSTEM = (
    "{% for m in messages %}"
    "{% if loop.first and m.role != 'system' %}<|im_start|>system\nBe kind<|im_end|>\n{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# As Qwen3 does: only the last answer keeps its thinking.
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and not loop.last %}{{ m.content.split('</think>')[-1] }}"
    "{% elif m.role == 'assistant' and '</think>' not in m.content %}<think></think>{{ m.content }}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

TURNS = (
    Message(role="user", content="Hi"),
    Message(role="assistant", content="Yes"),
    Message(role="user", content="Go"),
    Message(role="assistant", content="No"),
)
CHAT = ChatRow(where="d.jsonl, line 1", messages=TURNS)


def tiny_tokenizer(
    path: Path, template: str | None = None, *, add_bos: bool = False
) -> PreTrainedTokenizerFast:
    write_tiny_tokenizer(path, add_bos=add_bos)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(path)
    if template is not None:
        tokenizer.chat_template = template
    if template == LLAMA3:
        tokenizer.add_tokens([AddedToken(t, special=True) for t in LLAMA3_TOKENS])
    return tokenizer


def encode(
    tokenizer: PreTrainedTokenizerFast,
    *rows: Row,
    max_seq_length: int = 512,
    vocab_size: int = 320,
) -> EncodedRows:
    return encode_rows(rows, tokenizer, max_seq_length=max_seq_length, vocab_size=vocab_size)


def learnt(tokenizer: PreTrainedTokenizerFast, example: Example) -> list[str]:
    """Give the supervised stretches as text."""
    spans: list[list[int]] = []
    previous = False
    for token, supervised in zip(example.tokens, example.supervised, strict=True):
        if supervised and not previous:
            spans.append([])
        if supervised:
            spans[-1].append(token)
        previous = supervised
    return [tokenizer.decode(span) for span in spans]


@pytest.mark.parametrize(
    ("template", "add_bos", "spans", "num_supervised", "num_tokens"),
    [
        # "user" is 3 tokens, "assistant" 8, every special token 1, every other letter 1
        (None, False, ["Yes<|im_end|>", "No<|im_end|>"], 4 + 3, 2 * 9 + 15 + 14),
        (LLAMA3, True, ["Yes<|eot_id|>", "No<|eot_id|>"], 4 + 3, 1 + 2 * 10 + 16 + 15),
        (LLAMA2, True, [" Yes</s>", " No</s>"], 5 + 4, 1 + 2 * 17 + 5 + 4),
    ],
    ids=["chatml", "llama3", "llama2"],
)
def test_all_answers_with_their_end_of_turn_are_learnt(
    tmp_path: Path,
    template: str | None,
    add_bos: bool,
    spans: list[str],
    num_supervised: int,
    num_tokens: int,
) -> None:
    tokenizer = tiny_tokenizer(tmp_path, template, add_bos=add_bos)
    encoded = encode(tokenizer, CHAT)
    (example,) = encoded.examples
    assert learnt(tokenizer, example) == spans
    assert example.num_supervised_tokens == num_supervised
    assert len(example.tokens) == num_tokens
    assert example.tokens.count(BOS_ID) == (1 if add_bos else 0)
    assert encoded.notes == ()


def test_ids_are_those_of_the_template(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer(tmp_path)
    (example,) = encode(tokenizer, CHAT).examples
    conversation = [{"role": m.role, "content": m.content} for m in TURNS]
    text = tokenizer.apply_chat_template(conversation, tokenize=False)
    assert list(example.tokens) == tokenizer.encode(text, add_special_tokens=False)


def test_prompt_of_a_chat_is_what_training_saw(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer(tmp_path, LLAMA3, add_bos=True)
    prompt = encode_prompt(TURNS[:3], tokenizer)
    (example,) = encode(tokenizer, CHAT).examples
    assert example.tokens[: len(prompt)] == prompt
    assert tokenizer.decode(example.tokens[len(prompt) :]) == "No<|eot_id|>"


def test_default_system_prompt_is_not_learnt(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer(tmp_path, DEFAULT_SYSTEM)
    (example,) = encode(tokenizer, CHAT).examples
    assert tokenizer.decode(example.tokens).startswith("<|im_start|>system\nBe kind<|im_end|>")
    assert learnt(tokenizer, example) == ["Yes<|im_end|>", "No<|im_end|>"]


def test_template_that_drops_earlier_thinking_makes_an_example_per_answer(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer(tmp_path, THINKING)
    thought = Message(role="assistant", content="<think>Hm</think>Yes")
    encoded = encode(tokenizer, ChatRow(where="r", messages=(TURNS[0], thought, *TURNS[2:])))
    first, second = encoded.examples
    assert learnt(tokenizer, first) == ["<think>Hm</think>Yes<|im_end|>"]
    assert learnt(tokenizer, second) == ["<think></think>No<|im_end|>"]
    assert "Hm" not in tokenizer.decode(second.tokens)
    assert encoded.notes[0].startswith("1 rows became 2 sequences")


def test_answer_that_would_merge_with_its_prompt_keeps_the_prompts_ids(tmp_path: Path) -> None:
    # "t" + "he" merges into "the" when tokenised together; the model meets "t" alone.
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    template += "{% if not add_generation_prompt %}</s>{% endif %}"
    tokenizer = tiny_tokenizer(tmp_path, template)
    row = ChatRow(
        where="r",
        messages=(Message(role="user", content="t"), Message(role="assistant", content="he")),
    )
    (example,) = encode(tokenizer, row).examples
    assert learnt(tokenizer, example) == ["he</s>"]
    assert example.tokens[0] == tokenizer.convert_tokens_to_ids("t")


def test_template_whose_prompt_is_no_prefix_is_refused(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}{{ m.content }}</s>{% endfor %}"
        "{% if add_generation_prompt %}<think>{% endif %}"
    )
    tokenizer = tiny_tokenizer(tmp_path, template)
    with pytest.raises(DataError, match=r"line 1, message 2: .*ending in 'Hi</s><think>'"):
        encode(tokenizer, CHAT)


def test_template_without_end_of_turn_is_noted(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    (note,) = encode(tiny_tokenizer(tmp_path, template), CHAT).notes
    assert "no end-of-turn token" in note


def test_template_that_raises_is_quoted_with_the_row(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer(tmp_path, LLAMA2)
    row = ChatRow(
        where="d.jsonl, line 9", messages=(Message(role="system", content="S"), *TURNS[:2])
    )
    with pytest.raises(DataError) as caught:
        encode(tokenizer, row)
    assert str(caught.value) == (
        "d.jsonl, line 9: the model's chat template refuses the roles system, user, assistant: "
        "roles must alternate user/assistant; put the system message before the user's with "
        "--system-role merge"
    )


def test_missing_template_is_refused_only_for_chats(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer(tmp_path)
    tokenizer.chat_template = None
    assert encode(tokenizer, TextRow(where="r", text="abc")).examples
    with pytest.raises(DataError, match=r"line 1: the row has 'messages'.*no chat template"):
        encode(tokenizer, TextRow(where="r", text="abc"), CHAT)


def test_todays_date_does_not_enter_the_ids(tmp_path: Path) -> None:
    template = (
        "{% if date_string is not defined %}{% set date_string = strftime_now('%c') %}{% endif %}"
        "{{ date_string }}{% for m in messages %}{{ m.content }}</s>{% endfor %}"
    )
    tokenizer = tiny_tokenizer(tmp_path, template)
    (example,) = encode(tokenizer, CHAT).examples
    assert tokenizer.decode(example.tokens).startswith("26 Jul 2024Hi")
    tokenizer.chat_template = "{{ strftime_now('%d %B %Y') }}" + template
    (example,) = encode(tokenizer, CHAT).examples
    assert tokenizer.decode(example.tokens).startswith("26 July 202426 Jul 2024Hi")


@pytest.mark.parametrize("text", ["abc", "<s>abc", "<s><s>abc", "<s>abc</s>"])
def test_text_has_one_bos_one_eos_and_all_but_the_first_token_learnt(
    tmp_path: Path, text: str
) -> None:
    tokenizer = tiny_tokenizer(tmp_path, add_bos=True)
    (example,) = encode(tokenizer, TextRow(where="r", text=text)).examples
    assert tokenizer.decode(example.tokens) == "<s>abc</s>"
    assert example.supervised == (False, True, True, True, True)


def test_no_bos_is_invented(tmp_path: Path) -> None:
    (example,) = encode(tiny_tokenizer(tmp_path), TextRow(where="r", text="abc")).examples
    assert len(example.tokens) == 4
    assert example.num_supervised_tokens == 3


@pytest.mark.parametrize(
    ("prompt", "completion", "spans"),
    [
        ("Say:", " Yes", [" Yes</s>"]),
        ("t", "he", ["he</s>"]),
        ("Say:", "Yes</s>", ["Yes</s>"]),
        ("", "Yes", ["Yes</s>"]),
    ],
    ids=["plain", "merging", "own-eos", "no-prompt"],
)
def test_completion_and_eos_are_learnt(
    tmp_path: Path, prompt: str, completion: str, spans: list[str]
) -> None:
    tokenizer = tiny_tokenizer(tmp_path, add_bos=True)
    row = CompletionRow(where="r", prompt=prompt, completion=completion)
    (example,) = encode(tokenizer, row).examples
    assert learnt(tokenizer, example) == spans
    assert example.tokens.count(BOS_ID) == 1


def test_tokenizer_without_eos_is_refused_for_texts(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer(tmp_path)
    tokenizer.eos_token = None
    with pytest.raises(DataError, match="names no 'eos_token'"):
        encode(tokenizer, TextRow(where="r", text="abc"))


def test_long_rows_are_cut_at_the_end_and_counted(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer(tmp_path)
    (whole,) = encode(tokenizer, CHAT).examples
    (same,) = encode(tokenizer, CHAT, max_seq_length=len(whole.tokens)).examples
    assert same == whole
    encoded = encode(tokenizer, CHAT, max_seq_length=len(whole.tokens) - 3)
    (cut,) = encoded.examples
    assert cut.tokens == whole.tokens[:-3]
    assert learnt(tokenizer, cut) == ["Yes<|im_end|>", "N"]
    assert (encoded.num_long, encoded.num_cut_answers, encoded.num_left_out) == (1, 1, 0)
    assert encoded.notes == (
        "1 of 1 sequences are longer than 44 tokens (the longest: 47): 1 are cut at the end, "
        "1 of them in an answer",
    )


def test_rows_without_anything_left_to_learn_are_dropped_and_counted(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer(tmp_path)
    long_prompt = CompletionRow(where="r", prompt="x" * 220, completion="y")
    encoded = encode(tokenizer, long_prompt, CHAT, max_seq_length=64)
    assert [example.where for example in encoded.examples] == [CHAT.where]
    assert (encoded.num_long, encoded.num_cut_answers, encoded.num_left_out) == (1, 0, 1)
    assert "1 of 2 sequences have nothing to learn within 64 tokens" in encoded.notes[1]
    with pytest.raises(DataError) as caught:
        encode(tokenizer, long_prompt, max_seq_length=64)
    assert str(caught.value) == (
        "no row has anything to learn within 64 tokens (1 looked at); r, of 222 tokens, reads "
        f"'…{'x' * 40}«y</s>»' («»: what would be learnt); raise 'max_seq_length' or shorten the "
        "prompts"
    )


def test_id_beyond_the_models_vocabulary_is_refused(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer(tmp_path)
    row = TextRow(where="d.jsonl, line 4", text=" w")
    (largest,) = tokenizer.encode(" w")
    encode(tokenizer, row, vocab_size=largest + 1)
    with pytest.raises(DataError, match=rf"line 4: the tokenizer gives the id {largest} \('Ġw'\)"):
        encode(tokenizer, row, vocab_size=largest)


def test_special_tokens_inside_an_answer_do_not_end_it(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer(tmp_path)
    said = Message(role="assistant", content="a<|im_end|>b")
    (example,) = RowEncoder(tokenizer).encode(ChatRow(where="r", messages=(TURNS[0], said)))
    assert learnt(tokenizer, example) == ["a<|im_end|>b<|im_end|>"]


def test_answer_is_learnt_to_its_end_even_without_end_of_turn(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    tokenizer = tiny_tokenizer(tmp_path, template)
    said = Message(role="assistant", content="a<|im_end|>b")
    (example,) = RowEncoder(tokenizer).encode(ChatRow(where="r", messages=(TURNS[0], said)))
    assert learnt(tokenizer, example)[0].endswith("a<|im_end|>b\n")


def test_encoding_twice_gives_the_same(tmp_path: Path) -> None:
    rows: tuple[Any, ...] = (CHAT, TextRow(where="r", text="the end"))
    assert encode(tiny_tokenizer(tmp_path), *rows) == encode(tiny_tokenizer(tmp_path), *rows)
