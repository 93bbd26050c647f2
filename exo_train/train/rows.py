"""What a row of the data is, once it is read and found good.

Owns the row types and their words. Must not read files, recognise rows, or tokenise.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """`train`: an assistant's message is learnt; `more`: what the chat template is handed as well
    (tool calls, a tool's name)."""

    role: str
    content: str
    train: bool = True
    more: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRow:
    """`where` is the file and the line (or the item of an array), for messages.

    `form` is the kind of row that it was written as.
    """

    where: str
    messages: tuple[Message, ...]
    tools: tuple[Any, ...] = ()
    form: str = "messages"


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRow:
    where: str
    prompt: str
    completion: str

    @property
    def form(self) -> str:
        return "prompt/completion"


@dataclass(frozen=True, slots=True, kw_only=True)
class TextRow:
    where: str
    text: str

    @property
    def form(self) -> str:
        return "text"


@dataclass(frozen=True, slots=True, kw_only=True)
class PairRow:
    """Two answers to one prompt, of which `chosen` is the better one.

    Of a chat what follows the common prompt is learnt.
    """

    chosen: ChatRow | CompletionRow
    rejected: ChatRow | CompletionRow
    form: str

    @property
    def where(self) -> str:
        return self.chosen.where


Row = ChatRow | CompletionRow | TextRow | PairRow


def row_digest(row: Row) -> bytes:
    """Digest what a row says, not where it stands: equal ones are duplicates."""
    match row:
        case ChatRow(messages=messages, tools=tools):
            content: list[Any] = [[[m.role, m.content, m.train, m.more] for m in messages], tools]
        case CompletionRow(prompt=prompt, completion=completion):
            content = [prompt, completion]
        case TextRow(text=text):
            content = [text]
        case PairRow(chosen=chosen, rejected=rejected):
            content = [row_digest(half).hex() for half in (chosen, rejected)]
    # `more` may hold what JSON has no word for, such as a date of a parquet file.
    said = json.dumps([type(row).__name__, *content], sort_keys=True, default=str)
    return hashlib.blake2b(said.encode("ascii"), digest_size=16).digest()
