"""Rows to token ids with a mask of what is learnt.

Owns rendering through the chat template, the supervised mask and its proof, BOS and EOS,
truncation. Must not read files, add tokens, or know batches.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import jinja2

from exo_train.errors import DataError
from exo_train.train.rows import ChatRow, CompletionRow, Message, Row, TextRow

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SAMPLE_TOKENS = 60
# Llama 3's templates write today's date unless told one (this is their own fallback): the same
# rows must give the same ids when a run is resumed on another day.
TEMPLATE_DATE = "26 Jul 2024"


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One token sequence; `supervised[t]` means: learn to predict `tokens[t]` (never t = 0)."""

    tokens: tuple[int, ...]
    supervised: tuple[bool, ...]
    where: str

    @property
    def num_supervised_tokens(self) -> int:
        return sum(self.supervised)


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedRows:
    """What is left to train on, what was lost on the way, and sentences about it."""

    examples: tuple[Example, ...]
    num_truncated: int
    num_dropped: int
    notes: tuple[str, ...]


def encode_rows(
    rows: Sequence[Row],
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_seq_length: int,
    vocab_size: int,
) -> EncodedRows:
    """Encode all rows, cut at the end to `max_seq_length` tokens."""
    encoder = RowEncoder(tokenizer)
    encoder.check_template(rows)
    whole = [example for row in rows for example in encoder.encode(row)]
    cut = [_truncated(example, max_seq_length) for example in whole]
    check_vocabulary(cut, tokenizer, vocab_size=vocab_size)
    kept = [example for example in cut if example.num_supervised_tokens]
    if not kept:
        sample = tokenizer.decode(whole[0].tokens[:SAMPLE_TOKENS]) if whole else ""
        raise DataError(
            f"no row has anything to learn within {max_seq_length} tokens "
            f"({len(whole)} looked at, the first begins {sample!r}); "
            "raise 'max_seq_length' or shorten the prompts"
        )
    lengths = [len(example.tokens) for example in whole if len(example.tokens) > max_seq_length]
    num_dropped = len(whole) - len(kept)
    notes = []
    if len(whole) > len(rows):
        notes.append(
            f"{len(rows)} rows became {len(whole)} sequences, because the chat template writes "
            "earlier answers differently from the last one"
        )
    if not encoder.ends_turns:
        notes.append(
            "the chat template writes no end-of-turn token after an answer, so the model does "
            "not learn where to stop"
        )
    notes += _losses(lengths, num_dropped, num_all=len(whole), max_seq_length=max_seq_length)
    return EncodedRows(
        examples=tuple(kept),
        num_truncated=len(lengths),
        num_dropped=num_dropped,
        notes=tuple(notes),
    )


def _losses(
    lengths: list[int], num_dropped: int, *, num_all: int, max_seq_length: int
) -> Iterator[str]:
    """Say what the length limit costs; `lengths` are those above it."""
    if lengths:
        yield (
            f"{len(lengths)} of {num_all} sequences are longer than {max_seq_length} tokens "
            f"(the longest: {max(lengths)}) and are cut at the end"
        )
    if num_dropped:
        yield (
            f"{num_dropped} of {num_all} sequences have nothing to learn within "
            f"{max_seq_length} tokens and are left out; raise 'max_seq_length' to train on them"
        )


def encode_prompt(
    messages: Sequence[Message], tokenizer: PreTrainedTokenizerBase
) -> tuple[int, ...]:
    """Give the ids after which the model answers, exactly as training sees them."""
    encoder = RowEncoder(tokenizer)
    text = encoder.render(messages, answer_next=True, where="the conversation")
    return tuple(encoder.tokens(text))


class RowEncoder:
    """One tokenizer with what must be known of it; `ends_turns` turns False on a bad template."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._bos: int | None = tokenizer.bos_token_id
        # Ids decide, not settings: what the tokenizer itself puts before a plain text.
        self._adds_bos = self._bos is not None and tokenizer.encode("a")[0] == self._bos
        added = tokenizer.added_tokens_decoder
        self._special = {token_id for token_id, token in added.items() if token.special}
        self.ends_turns = True

    def check_template(self, rows: Iterable[Row]) -> None:
        """Refuse `messages` rows early when the tokenizer cannot render them."""
        if self._tokenizer.chat_template:
            return
        for row in rows:
            if isinstance(row, ChatRow):
                raise DataError(
                    f"{row.where}: the row has 'messages', but the model's tokenizer has no chat "
                    "template; use the instruct version of the model, or rows with 'prompt' and "
                    "'completion'"
                )

    def encode(self, row: Row) -> tuple[Example, ...]:
        """Give one example, or one per answer where a template rewrites earlier turns."""
        match row:
            case ChatRow():
                return self._encode_chat(row)
            case CompletionRow(where=where, prompt=prompt, completion=completion):
                tokens, start = self._continue(prompt, prompt + completion, where=where)
                return (self._ended(tokens, start, where=where),)
            case TextRow(where=where, text=text):
                return (self._ended(self.tokens(text), 0, where=where),)

    def render(self, messages: Sequence[Message], *, answer_next: bool, where: str) -> str:
        """Render through the chat template, up to where the assistant speaks next if asked."""
        conversation = [{"role": m.role, "content": m.content} for m in messages]
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    conversation,
                    tokenize=False,
                    add_generation_prompt=answer_next,
                    date_string=TEMPLATE_DATE,
                )
            )
        except (jinja2.TemplateError, AttributeError, LookupError, TypeError, ValueError) as error:
            roles = ", ".join(m.role for m in messages)
            raise DataError(
                f"{where}: the model's chat template refuses the roles {roles}: {error}"
            ) from None

    def tokens(self, text: str) -> list[int]:
        """Tokenise a sequence from its beginning: one BOS if the model has one, never two."""
        ids = self._raw(text)
        while len(ids) > 1 and ids[0] == ids[1] == self._bos:
            ids = ids[1:]
        if self._adds_bos and self._bos is not None and ids[:1] != [self._bos]:
            ids = [self._bos, *ids]
        return ids

    def _raw(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids

    def _encode_chat(self, row: ChatRow) -> tuple[Example, ...]:
        """Mask by difference: a turn's tokens are its rendering less the prompt before it.

        A conversation stays one example as long as each prompt begins with what came before;
        templates that drop earlier thinking break that, and start a new example there.
        """
        examples: list[Example] = []
        for index, message in enumerate(row.messages):
            if message.role != "assistant":
                continue
            prompt = self.render(row.messages[:index], answer_next=True, where=row.where)
            through = self.render(row.messages[: index + 1], answer_next=False, where=row.where)
            tokens, start = self._continue(
                prompt, through, where=f"{row.where}, message {index + 1}"
            )
            end = self._answer_end(tokens, start)
            before: tuple[bool, ...] = (False,) * start
            if examples and tuple(tokens[: len(examples[-1].tokens)]) == examples[-1].tokens:
                earlier = examples.pop().supervised
                before = earlier + (False,) * (start - len(earlier))
            after = (False,) * (len(tokens) - end)
            supervised = before + (True,) * (end - start) + after
            examples.append(Example(tokens=tuple(tokens), supervised=supervised, where=row.where))
        return tuple(examples)

    def _continue(self, prompt: str, whole: str, *, where: str) -> tuple[list[int], int]:
        """Tokenise `whole` so that it begins with the ids of `prompt`; give both lengths' border.

        The model meets the prompt's ids alone when it answers. Where the answer's first letters
        would merge with the prompt's last, both are tokenised apart, if that means the same text.
        """
        prompt_ids, ids = self.tokens(prompt), self.tokens(whole)
        border = len(prompt_ids)
        if ids[:border] == prompt_ids:
            return ids, border
        if whole.startswith(prompt):
            apart = prompt_ids + self._raw(whole[len(prompt) :])
            if self._tokenizer.decode(apart) == self._tokenizer.decode(ids):
                return apart, border
        raise DataError(
            f"{where}: the answer cannot be told from its prompt, because the prompt's rendering "
            f"(ending in {prompt[-30:]!r}) is not how the rendering with the answer begins; use a "
            "model with another chat template, or rows with 'prompt' and 'completion'"
        )

    def _answer_end(self, ids: list[int], start: int) -> int:
        """Give the place after the end-of-turn token; white space after it is never generated."""
        for end in range(len(ids), start, -1):
            if ids[end - 1] in self._special:
                tail = self._tokenizer.decode(ids[end:])
                if not tail.strip():
                    return end
                break
        self.ends_turns = False
        return len(ids)

    def _ended(self, ids: list[int], start: int, *, where: str) -> Example:
        """Close a plain text with EOS and supervise from `start`; the first token has no input."""
        eos: int | None = self._tokenizer.eos_token_id
        if eos is None:
            raise DataError(
                f"{where}: the model's tokenizer names no 'eos_token', so the model could not "
                "learn where to stop; name it in tokenizer_config.json"
            )
        if ids[-1:] != [eos]:
            ids = [*ids, eos]
        start = max(start, 1)
        supervised = (False,) * start + (True,) * (len(ids) - start)
        return Example(tokens=tuple(ids), supervised=supervised[: len(ids)], where=where)


def _truncated(example: Example, max_seq_length: int) -> Example:
    if len(example.tokens) <= max_seq_length:
        return example
    return replace(
        example,
        tokens=example.tokens[:max_seq_length],
        supervised=example.supervised[:max_seq_length],
    )


def check_vocabulary(
    examples: Iterable[Example], tokenizer: PreTrainedTokenizerBase, *, vocab_size: int
) -> None:
    for example in examples:
        largest = max(example.tokens, default=0)
        if largest >= vocab_size:
            token = tokenizer.convert_ids_to_tokens(largest)
            raise DataError(
                f"{example.where}: the tokenizer gives the id {largest} ({token!r}), but the model "
                f"knows only ids below {vocab_size}; use the tokenizer that belongs to the model"
            )
