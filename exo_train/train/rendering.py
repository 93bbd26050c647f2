"""Conversations to text: the chat template, what becomes of system messages, and what it omits.

Owns what the template is handed and every refusal of it. Must not tokenise and must not know
what is learnt.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import jinja2

from exo_train.errors import DataError
from exo_train.train.rows import ChatRow, Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Templates that write today's date, unless told one, are told this (Llama 3's own fallback): the
# same rows must give the same ids when a run is resumed on another day.
TEMPLATE_DATE = "26 Jul 2024"
_TEMPLATE_DAY = datetime.datetime(2024, 7, 26)
_DAY_PARTS = {
    "%F": "2024-07-26",
    **{f"%-{letter}": _TEMPLATE_DAY.strftime(f"%{letter}").lstrip("0") for letter in "dm"},
    **{f"%{letter}": _TEMPLATE_DAY.strftime(f"%{letter}") for letter in "aAbBcdHIjmMpSxXyY"},
}
# Others ask transformers' `strftime_now`. Functions are not let into a template, so it gets a macro
# of that name; the line break goes with it (`trim_blocks`).
_STILL_CLOCK = (
    "{% macro strftime_now(format) %}{{ format"
    + "".join(f" | replace('{part}', '{value}')" for part, value in _DAY_PARTS.items())
    + " }}{% endmacro %}\n"
)
_JOINT = "\n\n"  # between a system message and the user's, as Gemma 3's template has it
# What a template's own mistakes come out as, beside its refusals.
_TEMPLATE_ERRORS = (jinja2.TemplateError, AttributeError, LookupError, TypeError, ValueError)


class Renderer:
    """A tokenizer's chat template with a rule for system messages (`SYSTEM_ROLES` of config)."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, system_role: str) -> None:
        self._tokenizer = tokenizer
        self._system_role = system_role

    def prepared(self, row: ChatRow) -> ChatRow:
        """Apply the rule for system messages; refuse what the template would silently omit.

        What a row says and the template leaves out would be trained on as if it had not been said.
        """
        messages = with_system_role(row.messages, self._system_role, where=row.where)
        row = replace(row, messages=messages)
        if row.tools or any(m.more.get("tool_calls") or m.role in _OFTEN_OMITTED for m in messages):
            self._check_all_is_written(row)
        return row

    def render(
        self,
        messages: Sequence[Message],
        *,
        answer_next: bool,
        where: str,
        tools: Sequence[Any] = (),
    ) -> str:
        """Render up to and with `messages`, to where the assistant speaks next if asked."""
        try:
            return self._rendered(messages, answer_next=answer_next, tools=tools)
        except _TEMPLATE_ERRORS as error:
            roles = ", ".join(m.role for m in messages)
            raise DataError(
                f"{where}: the model's chat template refuses the roles {roles}: {error}"
                f"{self._hint(messages, tools)}"
            ) from None

    def _rendered(
        self, messages: Sequence[Message], *, answer_next: bool, tools: Sequence[Any]
    ) -> str:
        """Hand a call's arguments over as an object; as JSON where that is no use to the template.

        Most templates expect the object; those that join texts raise TypeError over it.
        """
        try:
            return self._applied(messages, _object, answer_next=answer_next, tools=tools)
        except TypeError:
            if not any(message.more.get("tool_calls") for message in messages):
                raise
        return self._applied(messages, _json_text, answer_next=answer_next, tools=tools)

    def _applied(
        self,
        messages: Sequence[Message],
        arguments_as: Callable[[Any], Any],
        *,
        answer_next: bool,
        tools: Sequence[Any],
    ) -> str:
        given_tools = list(tools) or None
        template = str(self._tokenizer.get_chat_template(tools=given_tools))
        return str(
            self._tokenizer.apply_chat_template(
                [_plain(message, arguments_as) for message in messages],
                tools=given_tools,
                chat_template=_STILL_CLOCK * ("strftime_now" in template) + template,
                tokenize=False,
                add_generation_prompt=answer_next,
                date_string=TEMPLATE_DATE,
            )
        )

    def _hint(self, messages: Sequence[Message], tools: Sequence[Any]) -> str:
        """Offer to merge system messages where the template would take the rest."""
        try:
            merged = with_system_role(messages, "merge", where="")
            if len(merged) < len(messages):
                self._rendered(merged, answer_next=False, tools=tools)
                return "; put the system message before the user's with --system-role merge"
        except (DataError, *_TEMPLATE_ERRORS):
            pass
        return ""

    def _check_all_is_written(self, row: ChatRow) -> None:
        text = self.render(row.messages, answer_next=False, where=row.where, tools=row.tools)
        if row.tools and text == self.render(row.messages, answer_next=False, where=row.where):
            raise _omits(row, "'tools'", "use a model whose template writes them, or remove them")
        for index, message in enumerate(row.messages):
            what = f"message {index + 1} ({message.role})"
            if message.role in _OFTEN_OMITTED and not self._writes(row, index, text):
                remedy = (
                    "use --system-role merge or drop"
                    if message.role == "system"
                    else "use a model whose template writes it, or remove it"
                )
                raise _omits(row, what, remedy)
            for name in _called(message):
                if name not in text:
                    raise _omits(
                        row,
                        f"the call of '{name}' in {what}",
                        "use a model whose template writes tool calls, or remove the row",
                    )

    def _writes(self, row: ChatRow, index: int, text: str) -> bool:
        """Tell whether the rendering `text` of a row depends on the message's content."""
        message = row.messages[index]
        said = message.content.strip()
        if not said or said in text:
            return True
        other = replace(message, content=f"{message.content}x")
        changed = (*row.messages[:index], other, *row.messages[index + 1 :])
        return text != self.render(changed, answer_next=False, where=row.where, tools=row.tools)


_OFTEN_OMITTED = ("system", "tool")


def with_system_role(messages: Sequence[Message], rule: str, *, where: str) -> tuple[Message, ...]:
    """Apply one of `SYSTEM_ROLES` of config to a conversation; raises DataError.

    "merge" puts a system message before the next user's, with an empty line between.
    """
    if rule == "template" or all(message.role != "system" for message in messages):
        return tuple(messages)
    if rule == "error":
        raise DataError(
            f"{where}: the conversation has a system message, and --system-role is error; remove "
            "it, or choose template, merge or drop"
        )
    kept: list[Message] = []
    waiting: list[str] = []
    for message in messages:
        if message.role == "system":
            waiting.append(message.content)
            continue
        if rule == "merge" and waiting and message.role == "user":
            said = [text for text in (*waiting, message.content) if text]
            message = replace(message, content=_JOINT.join(said))
            waiting = []
        kept.append(message)
    if rule == "merge" and waiting:
        raise DataError(
            f"{where}: no user message comes after a system message that it could be merged into; "
            "use --system-role drop, or remove it"
        )
    return tuple(kept)


def _plain(message: Message, arguments_as: Callable[[Any], Any]) -> dict[str, Any]:
    plain = {"role": message.role, "content": message.content, **message.more}
    if isinstance(calls := plain.get("tool_calls"), (list, tuple)):
        plain["tool_calls"] = [_plain_call(call, arguments_as) for call in calls]
    return plain


def _plain_call(call: Any, arguments_as: Callable[[Any], Any]) -> Any:
    if not isinstance(call, dict):
        return call
    if isinstance(function := call.get("function"), dict):
        return {**call, "function": _plain_call(function, arguments_as)}
    if "arguments" not in call:
        return call
    return {**call, "arguments": arguments_as(call["arguments"])}


def _object(arguments: Any) -> Any:
    """Read arguments that are an object's JSON; all else stays as it is."""
    if not isinstance(arguments, str):
        return arguments
    try:
        read = json.loads(arguments)
    except ValueError:
        return arguments
    return read if isinstance(read, dict) else arguments


def _json_text(arguments: Any) -> Any:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _called(message: Message) -> list[str]:
    """Name the functions that a message calls."""
    calls = message.more.get("tool_calls") or ()
    functions = [call.get("function", call) for call in calls if isinstance(call, dict)]
    return [str(f["name"]) for f in functions if isinstance(f, dict) and f.get("name")]


def _omits(row: ChatRow, what: str, remedy: str) -> DataError:
    return DataError(f"{row.where}: the model's chat template leaves out {what}; {remedy}")
