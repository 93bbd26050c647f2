"""Which kind of row a JSON object is, and what it then says.

Owns the kinds, the mapping of foreign columns, and what makes a row empty. A DataError from here
says what is wrong; the caller says where. Must not read files.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from exo_train.errors import ConfigError, DataError
from exo_train.options import nearest
from exo_train.train.pair_rows import ANSWERS, read_pair
from exo_train.train.row_messages import (
    read_messages,
    read_text,
    read_tools,
    refuse_old_keys,
    shown,
)
from exo_train.train.rows import ChatRow, CompletionRow, Message, PairRow, Row, TextRow

MAX_LISTED = 8  # names listed in one message

# A row's kind is the first of which it has all keys. Published sets often carry an extra 'prompt'
# or 'text' beside 'messages': the richest kind comes first.
KINDS: tuple[tuple[str, ...], ...] = (
    ANSWERS,
    ("messages",),
    ("conversations",),
    ("prompt", "completion"),
    ("instruction", "output"),
    ("text",),
)
ROW_KEYS = tuple(key for kind in KINDS for key in kind)
COLUMN_TARGETS = (*ROW_KEYS, "input", "system", "tools")
ALPACA = "instruction/input/output"


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """Our key for each foreign column, as `--columns prompt=question` says it."""

    sources: Mapping[str, str]

    @classmethod
    def read(cls, pairs: Sequence[str]) -> Columns:
        """Read `ours=theirs` pairs; raises ConfigError for what is no key of a row."""
        sources: dict[str, str] = {}
        for pair in pairs:
            target, sign, source = (part.strip() for part in pair.partition("="))
            if not (target and sign and source):
                raise ConfigError(
                    f"'columns' must be pairs such as prompt=question, got '{pair}': ours before "
                    f"the sign, the file's behind it"
                )
            if target not in COLUMN_TARGETS:
                raise ConfigError(
                    f"'columns': a row has no '{target}'{nearest(target, COLUMN_TARGETS)}; known: "
                    f"{', '.join(COLUMN_TARGETS)}"
                )
            if target in sources:
                raise ConfigError(f"'columns' names '{target}' twice")
            sources[target] = source
        return cls(sources=sources)

    def mapped(self, row: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
        """Give the row with our keys, and those of them that came of foreign columns."""
        found = {ours: row[theirs] for ours, theirs in self.sources.items() if theirs in row}
        taken = {self.sources[ours] for ours in found}
        return {k: v for k, v in row.items() if k not in taken} | found, tuple(found)


NO_COLUMNS = Columns(sources={})


def read_row(value: Any, *, where: str, columns: Columns = NO_COLUMNS, objective: str = "") -> Row:
    """Recognise one row; one that `objective` cannot learn is refused, with "" none is."""
    if not isinstance(value, dict):
        raise DataError(f"a row must be a JSON object, got {shown(value)}")
    row, mapped = columns.mapped(value)
    refuse_old_keys(row)
    _refuse_row_weights(row)
    kind = _kind(row, mapped, pairs_last=objective == "sft")
    if objective and kind:
        _check_kind(kind, objective)
    match kind:
        case ("chosen", "rejected"):
            return read_pair(row, where=where)
        case ("messages" | "conversations") as key, *_:
            return _chat(row, read_messages(row[key], key, system=row.get("system")), where, key)
        case ("prompt", "completion"):
            if isinstance(row["prompt"], list) and isinstance(row["completion"], list):
                return _chat(row, _prompt_messages(row), where, "prompt/completion")
            prompt, completion = (read_text(row[k], f"'{k}'") for k in ("prompt", "completion"))
            return CompletionRow(where=where, prompt=prompt, completion=completion)
        case ("instruction", "output"):
            return _chat(row, _alpaca_messages(row), where, ALPACA)
        case ("text",):
            return TextRow(where=where, text=read_text(row["text"], "'text'"))
    raise DataError(_unknown(row))


def nothing_to_learn(row: Row) -> str:
    """Say why a well-formed row teaches nothing, or give an empty string."""
    match row:
        case ChatRow(messages=messages):
            answers = [m for m in messages if m.role == "assistant"]
            if not messages:
                return "empty 'messages'"
            if not answers:
                return "no assistant message"
            learnt = [m for m in answers if m.train]
            if not learnt:
                return "no assistant message is to be learnt"
            is_empty = any(not m.content.strip() and "tool_calls" not in m.more for m in learnt)
            return "an empty assistant message" if is_empty else ""
        case CompletionRow(completion=completion):
            return "" if completion.strip() else "empty 'completion'"
        case TextRow(text=text):
            return "" if text.strip() else "empty 'text'"
        case PairRow():
            return ""  # refused when it was read


def _check_kind(kind: tuple[str, ...], objective: str) -> None:
    is_pair = kind == ANSWERS
    if is_pair and objective == "sft":
        raise DataError(
            "the row is a preference pair ('chosen' and 'rejected'), which sft cannot learn; train "
            "with --objective dpo or orpo, or write the answer to learn as 'messages' or "
            "'completion'"
        )
    if not is_pair and objective != "sft":
        raise DataError(
            f"--objective {objective} learns from preference pairs, and the row has no 'chosen' "
            f"and 'rejected', but {' and '.join(map(repr, kind))}; use --objective sft for it"
        )


def _kind(row: Mapping[str, Any], mapped: Iterable[str], *, pairs_last: bool) -> tuple[str, ...]:
    """Choose the kind: of mapped columns first, and null counts as absent where it can."""
    kinds = sorted(
        KINDS,
        key=lambda kind: (not any(key in kind for key in mapped), pairs_last and kind == ANSWERS),
    )
    filled = {key for key, value in row.items() if value is not None}
    for keys in (filled, row.keys()):
        for kind in kinds:
            if all(key in keys for key in kind):
                return kind
    return ()


def _chat(row: Mapping[str, Any], messages: tuple[Message, ...], where: str, form: str) -> ChatRow:
    return ChatRow(where=where, messages=messages, tools=read_tools(row.get("tools")), form=form)


def _prompt_messages(row: Mapping[str, Any]) -> tuple[Message, ...]:
    """Take TRL's conversational form: both are lists of messages, the completion's are learnt."""
    count = len(row["prompt"])
    messages = read_messages([*row["prompt"], *row["completion"]], "prompt and completion")
    return tuple(replace(m, train=m.train and i >= count) for i, m in enumerate(messages))


def _alpaca_messages(row: Mapping[str, Any]) -> tuple[Message, ...]:
    """Make a user's and an assistant's turn; the input follows the instruction after a blank line.

    The frame of words that Stanford's prompts have around both is the chat template's work.
    """
    if row.get("history") not in (None, [], ""):
        raise DataError("'history' is not supported; write the row as 'messages'")
    instruction, output = (read_text(row[key], f"'{key}'") for key in ("instruction", "output"))
    context = row.get("input")
    context = "" if context is None else read_text(context, "'input'")
    question = f"{instruction}\n\n{context}" if context.strip() else instruction
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": output}]
    return read_messages(messages, "messages", system=row.get("system"))


def _refuse_row_weights(row: Mapping[str, Any]) -> None:
    """Refuse weights of whole rows: ignoring them would learn what the file says not to."""
    for key in ("train", "weight"):
        if row.get(key) not in (None, True, 1):
            raise DataError(
                f"'{key}' of a whole row is not supported; put it at its messages, or remove "
                "the row"
            )


def _unknown(row: Mapping[str, Any]) -> str:
    for here, other in (ANSWERS, ANSWERS[::-1]):
        if here in row:
            return f"a preference pair needs '{other}' beside '{here}'"
    keys = [str(key) for key in row][:MAX_LISTED]
    hints = [hint for key in keys if (hint := nearest(key, ROW_KEYS)) and key not in ROW_KEYS]
    return (
        "a row needs 'messages', 'prompt' and 'completion', 'instruction' and 'output', 'text', or "
        f"'chosen' and 'rejected'; its keys are {', '.join(repr(key) for key in keys) or 'none'}"
        + (hints[0] if hints else "")
        + ("" if hints or not keys else "; --columns names others, such as prompt=question")
    )
