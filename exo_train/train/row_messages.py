"""The messages of a row: OpenAI's form, ShareGPT's, and the two mixed.

Owns roles and speakers, parts, tool calls, and which messages are learnt. A DataError from here
says what is wrong; the caller says where.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from exo_train.errors import DataError
from exo_train.train.rows import ROLES, Message

# ShareGPT's names for the speakers, "hummany" included: it occurs in published files.
SPEAKERS = {
    "system": "system",
    "human": "user",
    "hummany": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "assistant": "assistant",
    "tool": "tool",
    "observation": "tool",
}
# Ignoring these would train on something else than the row says.
_OLD_KEYS = {
    "function_call": "'tool_calls'",
    "functions": "'tools'",
}
_OWN_KEYS = ("role", "from", "content", "value", "train", "weight")


def read_messages(value: Any, key: str, *, system: Any = None) -> tuple[Message, ...]:
    """Read a list of messages; `system` is the row's own field beside them, if there is one."""
    messages = [
        _message(item, number, is_sharegpt=key == "conversations")
        for number, item in enumerate(_objects(value, key), start=1)
    ]
    if system not in (None, "") and not (messages and messages[0].role == "system"):
        messages.insert(0, Message(role="system", content=read_text(system, "'system'")))
    if messages and messages[0].role == "assistant":
        raise DataError("the first message is the assistant's; put the user's message before it")
    return tuple(messages)


def read_tools(value: Any) -> tuple[Any, ...]:
    """Read the tools that a chat may call: a list of objects, perhaps as JSON text."""
    if value in (None, "", []):
        return ()
    tools = _json_text(value, "'tools'")
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise DataError(f"'tools' must be a list of JSON objects, got {shown(value)}")
    _check_letters(tools, "'tools'")
    return tuple(tools)


def refuse_old_keys(item: Mapping[str, Any]) -> None:
    """Refuse what OpenAI's earlier form said in other words."""
    for key, instead in _OLD_KEYS.items():
        if item.get(key) not in (None, [], {}, ""):
            raise DataError(f"'{key}' is not supported; write it as {instead}, or remove the row")


def read_text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise DataError(f"{name} must be text, got {shown(value)}")
    _check_letters(value, name)
    return value


def shown(value: Any) -> str:
    """Show a value as the file has it, cut short."""
    text = json.dumps(value, default=str)
    return text if len(text) <= 40 else text[:37] + "..."


def _message(item: Mapping[str, Any], number: int, *, is_sharegpt: bool) -> Message:
    refuse_old_keys(item)
    role = _role(item, number, is_sharegpt=is_sharegpt)
    more = {k: v for k, v in item.items() if k not in (*_OWN_KEYS, *_OLD_KEYS) and v is not None}
    if more.pop("tool_calls", None):
        more["tool_calls"] = _tool_calls(item["tool_calls"], role, number)
    if more:
        _check_letters(more, f"{role} message {number}")
    content = item.get("content", item.get("value"))
    if isinstance(content, list):
        content = "".join(_part(part, number) for part in content)
    if content is None and "tool_calls" in more:
        content = ""
    return Message(
        role=role,
        content=read_text(content, f"the content of {role} message {number}"),
        train=_is_learnt(item, role, number),
        more=more,
    )


def _role(item: Mapping[str, Any], number: int, *, is_sharegpt: bool) -> str:
    said = item.get("from") if "from" in item else item.get("role")
    role = SPEAKERS.get(said.strip().lower()) if isinstance(said, str) else None
    if role is not None:
        return role
    if is_sharegpt:
        raise DataError(
            f"message {number} is from {shown(said)}; known speakers: {', '.join(SPEAKERS)}"
        )
    raise DataError(f"message {number} has the role {shown(said)}; known roles: {', '.join(ROLES)}")


def _tool_calls(value: Any, role: str, number: int) -> list[dict[str, Any]]:
    """Check that each call names its function and that its arguments are JSON, as text or not.

    They stay as they are: which of the two a chat template wants, its rendering finds out.
    """
    place = f"'tool_calls' of message {number}"
    if role != "assistant":
        raise DataError(f"{place} are the {role}'s; only the assistant calls tools")
    calls = _json_text(value, place)
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise DataError(f"{place} must be a list of JSON objects, got {shown(value)}")
    for call in calls:
        function = call.get("function", call)
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise DataError(f"{place} name no function: {shown(call)}")
        _json_text(function.get("arguments") or "{}", f"the arguments in {place}")
    return calls


def _is_learnt(item: Mapping[str, Any], role: str, number: int) -> bool:
    """Read `train` (true or false) or `weight` (1 or 0), OpenAI's and others' words for it."""
    train, weight = item.get("train"), item.get("weight")
    if train is not None and not isinstance(train, bool):
        raise DataError(f"'train' of message {number} must be true or false, got {shown(train)}")
    if weight is not None and weight not in (0, 1):
        raise DataError(f"'weight' of message {number} must be 0 or 1, got {shown(weight)}")
    said = {bool(value) for value in (train, weight) if value is not None}
    if len(said) == 2:
        raise DataError(f"'train' and 'weight' of message {number} contradict each other")
    if said == {True} and role != "assistant":
        raise DataError(
            f"message {number} asks to be learnt, but it is the {role}'s; only the assistant's "
            "messages are: remove its 'train' or 'weight'"
        )
    return said != {False}


def _part(part: Any, number: int) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind != "text":
        raise DataError(
            f"message {number} has a part of type {shown(kind)}; only 'text' parts can be trained"
        )
    return read_text(part.get("text"), f"a text part of message {number}")


def _objects(value: Any, key: str) -> Sequence[Mapping[str, Any]]:
    if not isinstance(value, list):
        raise DataError(f"'{key}' must be a list, got {shown(value)}")
    for number, item in enumerate(value, start=1):
        if not isinstance(item, dict):
            raise DataError(f"message {number} must be a JSON object, got {shown(item)}")
    return value


def _json_text(value: Any, name: str) -> Any:
    """Give what JSON text says; what is no text is given as it is."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        raise DataError(f"{name} must be JSON, got {shown(value)}") from None


def _check_letters(value: Any, name: str) -> None:
    said = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    try:
        said.encode("utf-8")
    except UnicodeEncodeError:
        raise DataError(f"{name} holds half of a surrogate pair, which is no character") from None
