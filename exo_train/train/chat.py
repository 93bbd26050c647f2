"""Rows to token ids with a mask of what is learnt.

Owns the supervised mask and its proof, BOS and EOS, and the order rendering, masking, length.
Must not read files, add tokens, or know batches.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from exo_train.encoding_config import EncodingConfig
from exo_train.errors import DataError
from exo_train.models.tokenizer import adds_bos
from exo_train.train.examples import LEARNT_MARKS, Example, marked_sample, stretches
from exo_train.train.lengths import fit_lengths
from exo_train.train.pair_lengths import fit_pairs
from exo_train.train.rendering import Renderer, with_system_role
from exo_train.train.rows import ChatRow, CompletionRow, Message, PairRow, Row, TextRow
from exo_train.train.templates import fitting_templates

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedRows:
    """What is left to train on, what was lost on the way, and sentences about it.

    The counts are those of `Fitted`.
    """

    examples: tuple[Example, ...]
    num_long: int
    num_cut_answers: int
    num_left_out: int
    notes: tuple[str, ...]


def encode_rows(
    rows: Sequence[Row],
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_seq_length: int,
    vocab_size: int,
    encoding: EncodingConfig = EncodingConfig(),  # noqa: B008 - frozen
) -> EncodedRows:
    """Encode all rows and fit them into `max_seq_length` tokens; raises DataError.

    Of pairs, which do not come with other rows, two examples follow each other: chosen, rejected.
    """
    encoder = RowEncoder(tokenizer, encoding)
    encoder.check_template(rows)
    whole = [example for row in rows for example in encoder.encode(row)]
    are_pairs = any(isinstance(row, PairRow) for row in rows)
    fit = fit_pairs if are_pairs else fit_lengths
    fitted = fit(whole, max_seq_length=max_seq_length, on_long=encoding.on_long)
    check_vocabulary(fitted.examples, tokenizer, vocab_size=vocab_size)
    if not fitted.examples:
        raise _nothing_to_learn(whole, tokenizer, max_seq_length)
    notes = []
    if len(whole) > len(rows) and not are_pairs:
        notes.append(
            f"{len(rows)} rows became {len(whole)} sequences, because the chat template writes "
            "earlier answers differently from the last one"
        )
    if not encoder.ends_turns:
        notes.append(
            "the chat template writes no end-of-turn token after an answer, so the model does "
            "not learn where to stop"
        )
    notes += encoder.notes
    return EncodedRows(
        examples=fitted.examples,
        num_long=fitted.num_long,
        num_cut_answers=fitted.num_cut_answers,
        num_left_out=fitted.num_left_out,
        notes=(*notes, *fitted.notes),
    )


def _nothing_to_learn(
    whole: Sequence[Example], tokenizer: PreTrainedTokenizerBase, max_seq_length: int
) -> DataError:
    """Say so with a sample: what is wrong with a mask is seen at once when it is looked at."""
    sample = ""
    if whole:
        text = marked_sample(whole[0], tokenizer.decode)
        opening, closing = LEARNT_MARKS
        sample = (
            f"; {whole[0].where}, of {len(whole[0].tokens)} tokens, reads {text!r} "
            f"({opening}{closing}: what would be learnt)"
        )
    if any(example.num_supervised_tokens for example in whole):
        return DataError(
            f"no row has anything to learn within {max_seq_length} tokens ({len(whole)} looked at)"
            f"{sample}; raise 'max_seq_length' or shorten the prompts"
        )
    return DataError(
        f'no row has anything to learn ({len(whole)} looked at){sample}; remove "train": false '
        "from an answer, or use --train-turns all"
    )


def encode_prompt(
    messages: Sequence[Message],
    tokenizer: PreTrainedTokenizerBase,
    *,
    system_role: str = "template",
) -> tuple[int, ...]:
    """Give the ids after which the model answers, exactly as training sees them."""
    encoder = RowEncoder(tokenizer, EncodingConfig(system_role=system_role))
    messages = with_system_role(messages, system_role, where="the conversation")
    text = encoder.renderer.render(messages, answer_next=True, where="the conversation")
    return tuple(encoder.tokens(text))


def end_of_turn(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Give the id that the chat template writes after an answer; None: no such token."""
    turns = (Message(role="user", content="a"), Message(role="assistant", content="a"))
    encoder = RowEncoder(tokenizer)
    try:
        (example,) = encoder.encode(ChatRow(where="", messages=turns))
    except DataError:
        return None
    ids = [ids for is_learnt, ids in stretches(example) if is_learnt]
    return ids[-1][-1] if ids and encoder.ends_turns else None


class RowEncoder:
    """One tokenizer with what must be known of it; `ends_turns` turns False on a bad template."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        encoding: EncodingConfig = EncodingConfig(),  # noqa: B008 - frozen
    ) -> None:
        self._tokenizer = tokenizer
        self._only_last = encoding.train_turns == "last"
        self._system_role = encoding.system_role
        self.renderer = Renderer(tokenizer, system_role=encoding.system_role)
        self._bos: int | None = tokenizer.bos_token_id
        self._adds_bos = adds_bos(tokenizer)
        added = tokenizer.added_tokens_decoder
        self._special = {token_id for token_id, token in added.items() if token.special}
        if tokenizer.eos_token_id is not None:
            self._special.add(int(tokenizer.eos_token_id))
        self.ends_turns = True
        self._num_with_system = 0

    @property
    def notes(self) -> list[str]:
        """Say what became of system messages, unless they are the template's."""
        if not self._num_with_system or self._system_role == "template":
            return []
        fate = "left out" if self._system_role == "drop" else "put before the user's"
        return [f"the system messages of {self._num_with_system} rows are {fate} (--system-role)"]

    def check_template(self, rows: Iterable[Row]) -> None:
        """Refuse `messages` rows early when the tokenizer cannot render them."""
        if self._tokenizer.chat_template:
            return
        for row in rows:
            if _chats(row):
                fitting = ", ".join(fitting_templates(self._tokenizer))
                known = f" (this tokenizer can do {fitting})" if fitting else ""
                raise DataError(
                    f"{row.where}: the row has 'messages', but the model's tokenizer has no chat "
                    f"template; give one with --chat-template NAME or FILE{known}, use the "
                    "instruct version of the model, or rows with 'prompt' and 'completion'"
                )

    def encode(self, row: Row) -> tuple[Example, ...]:
        """Give one example, or one per answer where a template rewrites earlier turns.

        Of a pair two: the chosen answer with its prompt, then the rejected one.
        """
        self._num_with_system += any(m.role == "system" for c in _chats(row) for m in c.messages)
        return self._encode(row)

    def _encode(self, row: Row) -> tuple[Example, ...]:
        match row:
            case ChatRow():
                return self._encode_chat(self.renderer.prepared(row))
            case CompletionRow(where=where, prompt=prompt, completion=completion):
                tokens, start = self._continue(prompt, prompt + completion, where=where)
                return (self._ended(tokens, start, where=where),)
            case TextRow(where=where, text=text):
                return (self._ended(self.tokens(text), 0, where=where),)
            case PairRow(chosen=chosen, rejected=rejected):
                return self._pair(self._encode(chosen), self._encode(rejected))

    def _pair(
        self, chosen: tuple[Example, ...], rejected: tuple[Example, ...]
    ) -> tuple[Example, Example]:
        where = chosen[0].where
        if len(chosen) > 1 or len(rejected) > 1:
            raise DataError(
                f"{where}: the chat template writes earlier answers differently from the last one; "
                "let each answer of the pair be one message, or use --train-turns last"
            )
        if chosen[0].tokens == rejected[0].tokens:
            raise DataError(f"{where}: 'chosen' and 'rejected' are the same tokens")
        return chosen[0], rejected[0]

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
        templates that drop earlier thinking break that, and start a new example there. Where
        nothing is learnt, the conversation is one example all the same, and is counted.
        """
        examples: list[Example] = []
        for index in self._learnt_turns(row.messages):
            prompt = self.renderer.render(
                row.messages[:index], answer_next=True, where=row.where, tools=row.tools
            )
            through = self.renderer.render(
                row.messages[: index + 1], answer_next=False, where=row.where, tools=row.tools
            )
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
        if not examples:
            text = self.renderer.render(
                row.messages, answer_next=False, where=row.where, tools=row.tools
            )
            ids = tuple(self.tokens(text))
            examples.append(Example(tokens=ids, supervised=(False,) * len(ids), where=row.where))
        return tuple(examples)

    def _learnt_turns(self, messages: Sequence[Message]) -> list[int]:
        """Give the places of the assistant's messages that are learnt."""
        answers = [index for index, message in enumerate(messages) if message.role == "assistant"]
        chosen = answers[-1:] if self._only_last else answers
        return [index for index in chosen if messages[index].train]

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
            for rest in self._ways_on(whole[len(prompt) :]):
                if self._tokenizer.decode(prompt_ids + rest) == self._tokenizer.decode(ids):
                    return prompt_ids + rest, border
        raise DataError(
            f"{where}: the answer cannot be told from its prompt, because the prompt's rendering "
            f"(ending in {prompt[-30:]!r}) is not how the rendering with the answer begins; use "
            "another template with --chat-template, or rows with 'prompt' and 'completion'"
        )

    def _ways_on(self, text: str) -> Iterator[list[int]]:
        """Give tokenisations of a text that goes on in the middle of a line.

        SentencePiece's tokenizers put a space before whatever they are given, so the second way
        lets a line break come first, and takes it off again.
        """
        yield self._raw(text)
        line_break, behind_it = self._raw("\n"), self._raw(f"\n{text}")
        if behind_it[: len(line_break)] == line_break:
            yield behind_it[len(line_break) :]

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


def _chats(row: Row) -> tuple[ChatRow, ...]:
    """Give the conversations of a row."""
    halves = (row.chosen, row.rejected) if isinstance(row, PairRow) else (row,)
    return tuple(half for half in halves if isinstance(half, ChatRow))


def check_vocabulary(
    examples: Iterable[Example], tokenizer: PreTrainedTokenizerBase, *, vocab_size: int
) -> None:
    """Refuse an id that the model has no row for; raises DataError."""
    for example in examples:
        largest = max(example.tokens, default=0)
        if largest >= vocab_size:
            token = tokenizer.convert_ids_to_tokens(largest)
            raise DataError(
                f"{example.where}: the tokenizer gives the id {largest} ({token!r}), but the model "
                f"knows only ids below {vocab_size}; use the tokenizer that belongs to the model"
            )
