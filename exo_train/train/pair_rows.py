"""Preference pairs as files have them: two answers to one prompt, texts or messages.

Owns where the prompt ends, and what makes a pair unusable. A DataError from here says what is
wrong; the caller says where.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from exo_train.errors import DataError
from exo_train.train.row_messages import SPEAKERS, read_messages, read_text, read_tools, shown
from exo_train.train.rows import ChatRow, CompletionRow, Message, PairRow

ANSWERS = ("chosen", "rejected")
# Where the messages before the answers may lie, beside 'prompt'.
_CONVERSATIONS = ("messages", "conversations")


def read_pair(row: Mapping[str, Any], *, where: str) -> PairRow:
    """Read a row that has both answers; raises DataError for a pair that teaches nothing."""
    answers = [row[name] for name in ANSWERS]
    if all(isinstance(answer, str) for answer in answers) and not _has_messages(row):
        pair = _of_texts(row, where)
    else:
        pair = _of_messages(row, where)
    if _said(pair.chosen) == _said(pair.rejected):
        raise DataError("'chosen' and 'rejected' say the same; a pair needs two different answers")
    return pair


def _of_texts(row: Mapping[str, Any], where: str) -> PairRow:
    if row.get("prompt") is None:
        raise DataError(
            "'chosen' and 'rejected' are texts, so the row needs 'prompt' as well; or write both "
            "as lists of messages that begin alike"
        )
    for name in ("system", "tools"):
        if row.get(name):
            raise DataError(
                f"'{name}' belongs to a chat, and 'prompt' is a text: write the prompt as a list "
                f"of messages, or leave '{name}' out"
            )
    prompt = read_text(row["prompt"], "'prompt'")
    texts = [read_text(row[name], f"'{name}'") for name in ANSWERS]
    for name, text in zip(ANSWERS, texts, strict=True):
        if not text.strip():
            raise DataError(f"'{name}' is empty")
    chosen, rejected = (
        CompletionRow(where=where, prompt=prompt, completion=text) for text in texts
    )
    return PairRow(chosen=chosen, rejected=rejected, form="prompt/chosen/rejected")


def _of_messages(row: Mapping[str, Any], where: str) -> PairRow:
    before, answers = _messages_before(row), [_as_list(row[name], name) for name in ANSWERS]
    own_prompt = row.get("prompt")
    if before is None and isinstance(own_prompt, str) and all(map(_is_answer, answers)):
        before = [{"role": "user", "content": own_prompt}]
    system = row.get("system")
    chosen, rejected = (
        read_messages([*(before or ()), *answer], name, system=system)
        for name, answer in zip(ANSWERS, answers, strict=True)
    )
    if before is None:
        start = _common_start(chosen, rejected)
        _check_prompt(own_prompt, chosen[:start])
    else:
        start = len(read_messages(before, "prompt", system=system))
    for name, messages in zip(ANSWERS, (chosen, rejected), strict=True):
        _check_answer(name, messages, start)
    tools = read_tools(row.get("tools"))
    form = "chosen/rejected" if before is None else "prompt/chosen/rejected"
    halves = (
        ChatRow(where=where, messages=_learnt_from(start, messages), tools=tools, form=form)
        for messages in (chosen, rejected)
    )
    return PairRow(chosen=next(halves), rejected=next(halves), form=form)


def _has_messages(row: Mapping[str, Any]) -> bool:
    return _messages_before(row) is not None


def _messages_before(row: Mapping[str, Any]) -> list[Any] | None:
    """Give the conversation that both answers follow, where it stands by itself."""
    if isinstance(row.get("prompt"), list):
        return list(row["prompt"])
    if any(isinstance(row[name], list) for name in ANSWERS):
        return None  # they hold all of it; published sets repeat it as 'messages'
    for key in _CONVERSATIONS:
        if isinstance(row.get(key), list):
            return list(row[key])
    return None


def _as_list(answer: Any, name: str) -> list[Any]:
    """Take messages, one message, or an answer's text."""
    if isinstance(answer, list):
        return answer
    if isinstance(answer, dict):
        return [answer]
    if isinstance(answer, str):
        return [{"role": "assistant", "content": answer}]
    raise DataError(f"'{name}' must be text or a list of messages, got {shown(answer)}")


def _is_answer(messages: Sequence[Any]) -> bool:
    """Tell whether the assistant speaks first."""
    first = messages[0] if messages and isinstance(messages[0], dict) else {}
    said = first.get("role", first.get("from"))
    return SPEAKERS.get(str(said).strip().lower()) == "assistant"


def _common_start(chosen: Sequence[Message], rejected: Sequence[Message]) -> int:
    """Count the messages that both conversations begin with: their prompt."""
    pairs = zip(chosen, rejected, strict=False)
    same = [_content(one) == _content(other) for one, other in pairs]
    start = same.index(False) if False in same else len(same)
    if len(chosen) == len(rejected) == start:
        raise DataError("'chosen' and 'rejected' say the same; a pair needs two different answers")
    if not start:
        raise DataError(
            "'chosen' and 'rejected' begin with different messages; they must answer one prompt"
        )
    return start


def _check_prompt(prompt: Any, before: Sequence[Message]) -> None:
    """Refuse a prompt beside whole conversations that is none of their words."""
    if isinstance(prompt, str) and prompt.strip() not in (m.content.strip() for m in before):
        raise DataError(
            "'prompt' is none of the messages that 'chosen' and 'rejected' begin with; remove it, "
            "or give the answers alone"
        )


def _check_answer(name: str, messages: Sequence[Message], start: int) -> None:
    if len(messages) == start:
        raise DataError(f"'{name}' is empty after the prompt")
    if messages[start].role != "assistant":
        raise DataError(
            f"after what 'chosen' and 'rejected' share, message {start + 1} of '{name}' is the "
            f"{messages[start].role}'s; they must be answers to one prompt"
        )
    answers = [m for m in messages[start:] if m.role == "assistant"]
    if not any(m.train for m in answers):
        raise DataError(f"nothing of '{name}' is to be learnt")
    if any(m.train and not m.content.strip() and "tool_calls" not in m.more for m in answers):
        raise DataError(f"'{name}' has an empty answer")


def _learnt_from(start: int, messages: Sequence[Message]) -> tuple[Message, ...]:
    return tuple(replace(m, train=m.train and i >= start) for i, m in enumerate(messages))


def _said(half: ChatRow | CompletionRow) -> list[Any]:
    if isinstance(half, CompletionRow):
        return [half.prompt, half.completion]
    return [_content(message) for message in half.messages]


def _content(message: Message) -> tuple[Any, ...]:
    return message.role, message.content, dict(message.more)
