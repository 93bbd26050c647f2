"""Tokenizers that write a word's space into its token and put one before any text: Llama 2's kind.

Pieces are written by hand; those of Mistral's format are what Mistral's own tokenizer code gives
(mistral-common 1.5.4, version 1), but for the vocabulary, which here has letters only.
"""

from __future__ import annotations

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, normalizers, processors
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from exo_train.train.chat import RowEncoder
from exo_train.train.examples import stretches
from exo_train.train.rows import ChatRow, CompletionRow, Message
from exo_train.train.templates import use_template

SPECIAL = ("<unk>", "<s>", "</s>")
BYTES = tuple(f"<0x{byte:02X}>" for byte in range(256))
LETTERS = ("▁", *map(chr, range(33, 127)))
WORDS = ("▁b", "▁H", "▁N", "▁[")


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    pieces = (*SPECIAL, *BYTES, *LETTERS, *WORDS)
    backend = Tokenizer(
        BPE(
            {piece: index for index, piece in enumerate(pieces)},
            [(word[0], word[1]) for word in WORDS],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def pieces(tokenizer: PreTrainedTokenizerFast, row: ChatRow | CompletionRow) -> list[str]:
    """Give each stretch as its pieces joined by blanks; what is learnt stands in brackets."""
    (example,) = RowEncoder(tokenizer).encode(row)
    shown = []
    for is_learnt, ids in stretches(example):
        text = " ".join(tokenizer.convert_ids_to_tokens(list(ids)))
        shown.append(f"[{text}]" if is_learnt else text)
    return shown


CHAT = ChatRow(
    where="r",
    messages=(
        Message(role="user", content="U"),
        Message(role="assistant", content="Hi"),
        Message(role="user", content="V"),
        Message(role="assistant", content="No"),
    ),
)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (
            "mistral",
            [
                "<s> ▁[ I N S T ] ▁ U ▁[ / I N S T ]",
                "[▁H i </s>]",
                "▁[ I N S T ] ▁ V ▁[ / I N S T ]",
                "[▁N o </s>]",
            ],
        ),
        (
            "llama2",
            [
                "<s> ▁[ I N S T ] ▁ U ▁[ / I N S T ]",
                "[▁H i ▁ </s>]",
                "<s> ▁[ I N S T ] ▁ V ▁[ / I N S T ]",
                "[▁N o ▁ </s>]",
            ],
        ),
    ],
)
def test_answer_begins_with_its_word_and_the_words_space(
    template: str, expected: list[str], tokenizer: PreTrainedTokenizerFast
) -> None:
    use_template(tokenizer, template)
    assert pieces(tokenizer, CHAT) == expected


@pytest.mark.parametrize(
    ("prompt", "completion", "expected"),
    [
        ("is", " blue", ["<s> ▁ i s", "[▁b l u e </s>]"]),
        # Together they would be "▁blue": the prompt keeps the ids that it has when it is alone.
        ("is ", "blue", ["<s> ▁ i s ▁", "[b l u e </s>]"]),
        ("is:", "blue", ["<s> ▁ i s :", "[b l u e </s>]"]),
    ],
)
def test_completion_goes_on_where_its_prompt_ends(
    prompt: str, completion: str, expected: list[str], tokenizer: PreTrainedTokenizerFast
) -> None:
    row = CompletionRow(where="r", prompt=prompt, completion=completion)
    assert pieces(tokenizer, row) == expected
