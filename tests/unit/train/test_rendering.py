"""System messages, tools and whose answers are learnt: by what is rendered, or refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from exo_train.encoding_config import EncodingConfig
from exo_train.errors import DataError
from exo_train.train.chat import EncodedRows, encode_prompt, encode_rows
from exo_train.train.examples import stretches
from exo_train.train.rendering import with_system_role
from exo_train.train.rows import ChatRow, Message
from tests.tiny_models import write_tiny_tokenizer

# As Gemma's: it refuses a system turn.
NO_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}"
    "{% endif %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
# As some published ones: what they do not know, they leave out.
FORGETFUL = (
    "{% for m in messages %}{% if m.role in ['user', 'assistant'] %}<{{ m.role }}>{{ m.content }}"
    "</s>{% endif %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
# As Qwen 2.5's: tools in front, calls as objects, results in the user's name.
TOOLS = (
    "{% if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</s>{% endif %}"
    "{% for m in messages %}"
    "{% if m.role == 'tool' %}<user>result: {{ m.content }}</s>"
    "{% else %}<{{ m.role }}>{{ m.content }}{% for call in m.tool_calls or [] %}"
    "call: {{ call.function.name }} {{ call.function.arguments | tojson }}{% endfor %}</s>"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def user(text: str) -> Message:
    return Message(role="user", content=text)


def assistant(text: str, **options: Any) -> Message:
    return Message(role="assistant", content=text, **options)


def system(text: str) -> Message:
    return Message(role="system", content=text)


CHAT = (user("Hi"), assistant("Yes"), user("Go"), assistant("No"))


@pytest.fixture
def tokenizer(tmp_path: Path) -> PreTrainedTokenizerFast:
    write_tiny_tokenizer(tmp_path)
    return PreTrainedTokenizerFast.from_pretrained(tmp_path)


def encode(
    tokenizer: PreTrainedTokenizerFast,
    *messages: Message,
    template: str = NO_SYSTEM,
    tools: tuple[Any, ...] = (),
    **encoding: str,
) -> EncodedRows:
    tokenizer.chat_template = template
    return encode_rows(
        [ChatRow(where="d.jsonl, line 7", messages=messages, tools=tools)],
        tokenizer,
        max_seq_length=512,
        vocab_size=320,
        encoding=EncodingConfig(**encoding),
    )


def shown(tokenizer: PreTrainedTokenizerFast, encoded: EncodedRows) -> str:
    """Give the one sequence as text, with what is learnt in brackets."""
    (example,) = encoded.examples
    return "".join(
        f"[{tokenizer.decode(ids)}]" if is_learnt else str(tokenizer.decode(ids))
        for is_learnt, ids in stretches(example)
    )


# System messages


def test_system_message_is_put_before_the_users(tokenizer: PreTrainedTokenizerFast) -> None:
    rows = encode(tokenizer, system("Be kind"), *CHAT, system_role="merge")
    assert shown(tokenizer, rows) == (
        "<user>Be kind\n\nHi</s><assistant>[Yes</s>]<user>Go</s><assistant>[No</s>]"
    )
    (note,) = rows.notes
    assert note == "the system messages of 1 rows are put before the user's (--system-role)"


def test_later_system_message_is_put_before_the_next_user(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    rows = encode(tokenizer, *CHAT[:2], system("A"), system("B"), *CHAT[2:], system_role="merge")
    assert "<user>A\n\nB\n\nGo</s>" in shown(tokenizer, rows)


def test_system_message_is_left_out_and_counted(tokenizer: PreTrainedTokenizerFast) -> None:
    rows = encode(tokenizer, system("Be kind"), *CHAT, system_role="drop")
    plain = encode(tokenizer, *CHAT, system_role="drop")
    assert [example.tokens for example in rows.examples] == [e.tokens for e in plain.examples]
    assert rows.notes == ("the system messages of 1 rows are left out (--system-role)",)
    assert plain.notes == ()


def test_what_a_template_refuses_is_said_with_its_own_words_and_the_way_out(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    with pytest.raises(DataError) as refused:
        encode(tokenizer, system("Be kind"), *CHAT[:2])
    assert str(refused.value) == (
        "d.jsonl, line 7: the model's chat template refuses the roles system, user, assistant: "
        "no system; put the system message before the user's with --system-role merge"
    )


@pytest.mark.parametrize(
    ("messages", "rule", "words"),
    [
        ((system("S"), *CHAT), "error", "has a system message, and --system-role is error"),
        ((user("Hi"), system("S"), assistant("Yes")), "merge", "no user message comes after"),
    ],
)
def test_rule_that_cannot_be_kept_names_the_row(
    messages: tuple[Message, ...], rule: str, words: str
) -> None:
    with pytest.raises(DataError, match=f"^line 3: .*{words}"):
        with_system_role(messages, rule, where="line 3")


def test_prompt_follows_the_same_rule(tokenizer: PreTrainedTokenizerFast) -> None:
    rows = encode(tokenizer, system("S"), *CHAT[:2], system_role="merge")
    prompt = encode_prompt((system("S"), user("Hi")), tokenizer, system_role="merge")
    assert rows.examples[0].tokens[: len(prompt)] == prompt


# What a template would leave out without a word

TOOL = {"type": "function", "function": {"name": "look", "parameters": {}}}
CALL = {"tool_calls": [{"type": "function", "function": {"name": "look", "arguments": '{"a": 1}'}}]}
USES_TOOL = (
    user("Hi"),
    assistant("", more=CALL),
    Message(role="tool", content="3"),
    assistant("So 3"),
)


def test_calls_are_learnt_as_answers_and_results_are_not(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    rows = encode(tokenizer, *USES_TOOL, template=TOOLS, tools=(TOOL,))
    assert shown(tokenizer, rows) == (
        '<tools>{"type": "function", "function": {"name": "look", "parameters": {}}}</s>'
        '<user>Hi</s><assistant>[call: look {"a": 1}</s>]<user>result: 3</s>'
        "<assistant>[So 3</s>]"
    )


@pytest.mark.parametrize("arguments", ['{"a": "é"}', {"a": "é"}], ids=["json", "object"])
@pytest.mark.parametrize("written", ["tojson", "string"])
def test_arguments_come_as_the_template_takes_them(
    arguments: Any, written: str, tokenizer: PreTrainedTokenizerFast
) -> None:
    """DeepSeek's distilled models' template joins them to texts, most others write JSON."""
    template = TOOLS
    if written == "string":
        template = TOOLS.replace("arguments | tojson", "arguments + ''")
        assert template != TOOLS
    call = {"tool_calls": [{"function": {"name": "look", "arguments": arguments}}]}
    rows = encode(tokenizer, user("Hi"), assistant("", more=call), template=template)
    assert shown(tokenizer, rows) == '<user>Hi</s><assistant>[call: look {"a": "é"}</s>]'


@pytest.mark.parametrize(
    ("messages", "tools", "what"),
    [
        ((system("S"), *CHAT), (), r"message 1 \(system\); use --system-role merge or drop"),
        (CHAT, (TOOL,), "'tools'; use a model whose template writes them"),
        (USES_TOOL[:2], (), r"the call of 'look' in message 2 \(assistant\)"),
        (
            (user("Hi"), assistant("Yes"), Message(role="tool", content="3"), assistant("So")),
            (),
            r"message 3 \(tool\)",
        ),
    ],
    ids=["system", "tools", "call", "result"],
)
def test_what_the_template_leaves_out_is_refused(
    messages: tuple[Message, ...],
    tools: tuple[Any, ...],
    what: str,
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    words = f"^d.jsonl, line 7: the model's chat template leaves out {what}"
    with pytest.raises(DataError, match=words):
        encode(tokenizer, *messages, template=FORGETFUL, tools=tools)


# Whose answers are learnt


def test_only_the_last_answer_is_learnt_if_asked(tokenizer: PreTrainedTokenizerFast) -> None:
    rows = encode(tokenizer, *CHAT, train_turns="last")
    assert shown(tokenizer, rows) == (
        "<user>Hi</s><assistant>Yes</s><user>Go</s><assistant>[No</s>]"
    )


@pytest.mark.parametrize(
    ("first", "second", "text"),
    [
        (False, True, "<user>Hi</s><assistant>Yes</s><user>Go</s><assistant>[No</s>]"),
        # What comes after the last answer that is learnt is not computed.
        (True, False, "<user>Hi</s><assistant>[Yes</s>]"),
    ],
)
def test_answer_that_says_so_is_not_learnt(
    first: bool, second: bool, text: str, tokenizer: PreTrainedTokenizerFast
) -> None:
    said = (
        user("Hi"),
        assistant("Yes", train=first),
        user("Go"),
        assistant("No", train=second),
    )
    assert shown(tokenizer, encode(tokenizer, *said)) == text


def test_nothing_to_learn_anywhere_shows_a_sample(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(DataError) as refused:
        encode(tokenizer, user("Hi"), assistant("Yes", train=False))
    assert str(refused.value) == (
        "no row has anything to learn (1 looked at); d.jsonl, line 7, of 22 tokens, reads "
        "'<user>Hi</s><assistant>Yes</s>' («»: what would be learnt); remove \"train\": false from "
        "an answer, or use --train-turns all"
    )
