"""Six families of chat templates: what is rendered, which ids are learnt, what is refused.

The texts and counts are written by hand from the families' published formats. The second oracle is
transformers' own assistant mask over templates with generation marks.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
from tokenizers import AddedToken, processors
from transformers import PreTrainedTokenizerFast

from exo_train.encoding_config import EncodingConfig
from exo_train.errors import ConfigError, DataError
from exo_train.train.chat import encode_prompt, encode_rows, end_of_turn
from exo_train.train.examples import Example, stretches
from exo_train.train.rows import ChatRow, Message
from exo_train.train.templates import (
    KNOWN_TEMPLATES,
    MAX_TEMPLATE_BYTES,
    fitting_templates,
    read_template,
    use_template,
)
from tests.tiny_models import write_tiny_tokenizer

SYSTEM = Message(role="system", content="Be kind")
TURNS = (
    Message(role="user", content="Hi"),
    Message(role="assistant", content="Yes"),
    Message(role="user", content="Go"),
    Message(role="assistant", content="No"),
)
CHATML_ANSWERS = (
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nYes<|im_end|>\n"
    "<|im_start|>user\nGo<|im_end|>\n<|im_start|>assistant\nNo<|im_end|>\n"
)
# SmolLM2's and Qwen 2.5's own templates differ from ChatML in the system message they begin with.
WITH_DEFAULT_SYSTEM = (
    "{% for m in messages %}{% if loop.first and m.role != 'system' %}"
    "<|im_start|>system\nDEFAULT<|im_end|>\n{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True, kw_only=True)
class Family:
    """`marked` is the template with generation marks; `bos` is put before texts if `adds_bos`."""

    template: str
    rendered: str
    spans: tuple[str, str]
    num_supervised: int
    marked: str
    marks: tuple[str, ...] = ()
    bos: str | None = "<s>"
    eos: str = "</s>"
    adds_bos: bool = True
    merges_system: bool = False
    num_bos: int = 1


CHATML_MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{% else %}{{ m.content }}"
    "<|im_end|>{% endif %}{{ '\n' }}{% endfor %}"
)
FAMILIES = {
    # Special tokens are one token each, all other letters of the answers one token each.
    "SmolLM2": Family(
        template="chatml",
        rendered="<|im_start|>system\nBe kind<|im_end|>\n" + CHATML_ANSWERS,
        spans=("Yes<|im_end|>", "No<|im_end|>"),
        num_supervised=4 + 3,
        marked=CHATML_MARKED,
        bos="<|im_start|>",  # as its tokenizer names it; never put before a text
        eos="<|im_end|>",
        adds_bos=False,
        num_bos=5,
    ),
    "Qwen": Family(
        template="chatml",
        rendered="<|im_start|>system\nBe kind<|im_end|>\n" + CHATML_ANSWERS,
        spans=("Yes<|im_end|>", "No<|im_end|>"),
        num_supervised=4 + 3,
        marked=CHATML_MARKED,
        marks=("<|endoftext|>",),
        bos=None,
        eos="<|endoftext|>",
        adds_bos=False,
        num_bos=0,
    ),
    "Llama 2": Family(
        template="llama2",
        rendered=(
            "<s>[INST] <<SYS>>\nBe kind\n<</SYS>>\n\nHi [/INST] Yes </s>"
            "<s>[INST] Go [/INST] No </s>"
        ),
        spans=(" Yes </s>", " No </s>"),
        num_supervised=6 + 5,
        marked=(
            "{% for m in messages[1:] %}{% if m.role == 'user' %}<s>[INST] {% if loop.first %}"
            "<<SYS>>\n{{ messages[0].content }}\n<</SYS>>\n\n{% endif %}{{ m.content }} [/INST]"
            "{% else %}{% generation %} {{ m.content }} </s>{% endgeneration %}{% endif %}"
            "{% endfor %}"
        ),
        num_bos=2,  # one a turn, as Meta's own code has it
    ),
    "Llama 3": Family(
        template="llama3",
        rendered=(
            "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nBe kind<|eot_id|>"
            "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\nYes<|eot_id|>"
            "<|start_header_id|>user<|end_header_id|>\n\nGo<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\nNo<|eot_id|>"
        ),
        spans=("Yes<|eot_id|>", "No<|eot_id|>"),
        num_supervised=4 + 3,
        marked=(
            "<|begin_of_text|>{% for m in messages %}<|start_header_id|>{{ m.role }}"
            "<|end_header_id|>\n\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
            "<|eot_id|>{% endgeneration %}{% else %}{{ m.content }}<|eot_id|>{% endif %}"
            "{% endfor %}"
        ),
        marks=(
            "<|begin_of_text|>",
            "<|end_of_text|>",
            "<|start_header_id|>",
            "<|end_header_id|>",
            "<|eot_id|>",
        ),
        bos="<|begin_of_text|>",
        eos="<|end_of_text|>",
    ),
    "Mistral": Family(
        template="mistral",
        rendered="<s>[INST] Be kind\n\nHi [/INST] Yes</s>[INST] Go [/INST] No</s>",
        spans=(" Yes</s>", " No</s>"),
        num_supervised=5 + 4,
        marked=(
            "<s>{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
            "{% else %}{% generation %} {{ m.content }}</s>{% endgeneration %}{% endif %}"
            "{% endfor %}"
        ),
        merges_system=True,
    ),
    "Gemma": Family(
        template="gemma",
        rendered=(
            "<bos><start_of_turn>user\nBe kind\n\nHi<end_of_turn>\n"
            "<start_of_turn>model\nYes<end_of_turn>\n<start_of_turn>user\nGo<end_of_turn>\n"
            "<start_of_turn>model\nNo<end_of_turn>\n"
        ),
        spans=("Yes<end_of_turn>", "No<end_of_turn>"),
        num_supervised=4 + 3,
        marked=(
            "<bos>{% for m in messages %}<start_of_turn>"
            "{{ 'model' if m.role == 'assistant' else m.role }}\n{% if m.role == 'assistant' %}"
            "{% generation %}{{ m.content }}<end_of_turn>{% endgeneration %}{% else %}"
            "{{ m.content }}<end_of_turn>{% endif %}{{ '\n' }}{% endfor %}"
        ),
        marks=("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"),
        bos="<bos>",
        eos="<eos>",
        merges_system=True,
    ),
    "Zephyr": Family(
        template="zephyr",
        rendered=(
            "<s><|system|>\nBe kind</s>\n<|user|>\nHi</s>\n<|assistant|>\nYes</s>\n"
            "<|user|>\nGo</s>\n<|assistant|>\nNo</s>\n"
        ),
        spans=("Yes</s>", "No</s>"),
        num_supervised=4 + 3,
        marked=(
            "<s>{% for m in messages %}<|{{ m.role }}|>\n{% if m.role == 'assistant' %}"
            "{% generation %}{{ m.content }}</s>{% endgeneration %}{% else %}{{ m.content }}</s>"
            "{% endif %}{{ '\n' }}{% endfor %}"
        ),
    ),
}


def family_tokenizer(path: Path, family: Family) -> PreTrainedTokenizerFast:
    """Give a byte-level tokenizer with the family's special tokens and no template."""
    write_tiny_tokenizer(path)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(path)
    tokenizer.add_tokens([AddedToken(mark, special=True) for mark in family.marks])
    tokenizer.bos_token, tokenizer.eos_token = family.bos, family.eos
    if family.adds_bos and family.bos is not None:
        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{family.bos} $A", special_tokens=[(family.bos, tokenizer.bos_token_id)]
        )
    tokenizer.chat_template = None
    return tokenizer


def encoded(tokenizer: PreTrainedTokenizerFast, *messages: Message, rule: str) -> Example:
    row = ChatRow(where="d.jsonl, line 1", messages=messages)
    (example,) = encode_rows(
        [row],
        tokenizer,
        max_seq_length=512,
        vocab_size=400,
        encoding=EncodingConfig(system_role=rule),
    ).examples
    return example


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> Family:
    return FAMILIES[request.param]


@pytest.fixture
def tokenizer(family: Family, tmp_path: Path) -> PreTrainedTokenizerFast:
    tokenizer = family_tokenizer(tmp_path, family)
    use_template(tokenizer, family.template)
    return tokenizer


def test_answers_and_their_ends_are_learnt_and_nothing_else(
    family: Family, tokenizer: PreTrainedTokenizerFast
) -> None:
    rule = "merge" if family.merges_system else "template"
    example = encoded(tokenizer, SYSTEM, *TURNS, rule=rule)
    assert tokenizer.decode(example.tokens) == family.rendered
    assert list(example.tokens) == tokenizer.encode(family.rendered, add_special_tokens=False)
    spans = [tokenizer.decode(ids) for is_learnt, ids in stretches(example) if is_learnt]
    assert tuple(spans) == family.spans
    assert example.num_supervised_tokens == family.num_supervised
    if family.bos is not None:
        assert example.tokens.count(tokenizer.bos_token_id) == family.num_bos
    assert tokenizer.decode([end_of_turn(tokenizer)]) == (
        KNOWN_TEMPLATES[family.template].end_of_turn or family.eos
    )


def test_mask_is_that_of_a_template_with_generation_marks(
    family: Family, tokenizer: PreTrainedTokenizerFast
) -> None:
    rule = "merge" if family.merges_system else "template"
    example = encoded(tokenizer, SYSTEM, *TURNS, rule=rule)
    conversation = [{"role": m.role, "content": m.content} for m in (SYSTEM, *TURNS)]
    if family.merges_system:
        conversation[0:2] = [{"role": "user", "content": "Be kind\n\nHi"}]
    oracle = tokenizer.apply_chat_template(
        conversation,
        chat_template=family.marked,
        tokenize=True,
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    assert list(example.tokens) == oracle["input_ids"]
    assert [int(learnt) for learnt in example.supervised] == oracle["assistant_masks"]


def test_other_programs_render_what_was_trained(
    family: Family, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    """They take the saved template and add no BOS of their own."""
    tokenizer.save_pretrained(tmp_path / "saved")
    elsewhere = PreTrainedTokenizerFast.from_pretrained(tmp_path / "saved")
    question = [{"role": "user", "content": "Hi"}]
    ids = elsewhere.apply_chat_template(question, add_generation_prompt=True, return_dict=False)
    assert tuple(ids) == encode_prompt([TURNS[0]], tokenizer)
    assert encoded(tokenizer, *TURNS, rule="template").tokens[: len(ids)] == tuple(ids)


def test_pad_that_is_eos_changes_no_mask(
    family: Family, tokenizer: PreTrainedTokenizerFast
) -> None:
    before = encoded(tokenizer, *TURNS, rule="template")
    tokenizer.pad_token = tokenizer.eos_token
    assert encoded(tokenizer, *TURNS, rule="template") == before


def test_system_message_that_a_template_adds_is_not_learnt(tmp_path: Path) -> None:
    tokenizer = family_tokenizer(tmp_path, FAMILIES["Qwen"])
    tokenizer.chat_template = WITH_DEFAULT_SYSTEM
    example = encoded(tokenizer, *TURNS, rule="template")
    assert tokenizer.decode(example.tokens) == (
        "<|im_start|>system\nDEFAULT<|im_end|>\n" + CHATML_ANSWERS
    )
    assert example.num_supervised_tokens == 4 + 3


# What is chosen, and what is refused


def test_named_template_wins_over_the_models_own(tmp_path: Path) -> None:
    tokenizer = family_tokenizer(tmp_path, FAMILIES["Llama 2"])
    tokenizer.chat_template = WITH_DEFAULT_SYSTEM
    use_template(tokenizer, "")
    assert tokenizer.chat_template == WITH_DEFAULT_SYSTEM
    use_template(tokenizer, "zephyr")
    example = encoded(tokenizer, *TURNS, rule="template")
    assert tokenizer.decode(example.tokens).startswith("<s><|user|>\nHi</s>\n<|assistant|>\n")


def test_file_is_read_with_windows_ends_and_byte_order_mark(tmp_path: Path) -> None:
    tokenizer = family_tokenizer(tmp_path, FAMILIES["Qwen"])
    file = tmp_path / "modèle.jinja"
    text = "{% for m in messages %}<{{ m.role }}>\n{{ m.content }}<|im_end|>{% endfor %}\n"
    text += "{% if add_generation_prompt %}<assistant>\n{% endif %}\n"
    file.write_bytes(b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode())
    use_template(tokenizer, str(file))
    example = encoded(tokenizer, *TURNS[:2], rule="template")
    assert tokenizer.decode(example.tokens) == "<user>\nHi<|im_end|><assistant>\nYes<|im_end|>"


@pytest.mark.parametrize(
    ("family", "name", "missing"),
    [
        ("Llama 2", "llama3", "<|start_header_id|>, <|end_header_id|>, <|eot_id|>"),
        ("Llama 2", "gemma", "<start_of_turn>, <end_of_turn>"),
    ],
)
def test_known_template_whose_marks_are_no_tokens_is_refused(
    family: str, name: str, missing: str, tmp_path: Path
) -> None:
    tokenizer = family_tokenizer(tmp_path, FAMILIES[family])
    with pytest.raises(ConfigError) as refused:
        use_template(tokenizer, name)
    assert str(refused.value) == (
        f"--chat-template {name} needs {missing}, which the model's tokenizer does not have as a "
        "single token; it has what these need: chatml, llama2, mistral, zephyr"
    )
    assert tokenizer.chat_template is None


def test_template_that_ends_turns_with_eos_needs_one(tmp_path: Path) -> None:
    tokenizer = family_tokenizer(tmp_path, FAMILIES["Qwen"])
    tokenizer.eos_token = None
    assert fitting_templates(tokenizer) == ["chatml"]
    with pytest.raises(ConfigError, match="--chat-template mistral needs an 'eos_token'"):
        use_template(tokenizer, "mistral")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"{% for m in messages %}\n{{ m.content }}\n{% endif %}", r"bad\.jinja, line 3: .*endif"),
        (b"caf\xe9", r"bad\.jinja is not UTF-8 text \(byte 3\)"),
        (b" \n", r"bad\.jinja is empty"),
        (b"x" * (MAX_TEMPLATE_BYTES + 1), r"bad\.jinja is longer than 1,000,000 bytes"),
    ],
    ids=["mistake", "latin-1", "empty", "long"],
)
def test_file_that_is_no_template_is_refused(content: bytes, words: str, tmp_path: Path) -> None:
    tokenizer = family_tokenizer(tmp_path, FAMILIES["Qwen"])
    file = tmp_path / "bad.jinja"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=words):
        use_template(tokenizer, str(file))


def test_unknown_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError) as refused:
        read_template("llama-3")
    assert str(refused.value) == (
        "--chat-template: there is no file 'llama-3', and no known template of that name; did you "
        "mean 'llama3'?; known are chatml, gemma, llama2, llama3, mistral, zephyr"
    )


def test_base_model_without_template_is_offered_what_fits_it(tmp_path: Path) -> None:
    tokenizer = family_tokenizer(tmp_path, FAMILIES["Llama 3"])
    with pytest.raises(DataError) as refused:
        encoded(tokenizer, *TURNS, rule="template")
    assert str(refused.value) == (
        "d.jsonl, line 1: the row has 'messages', but the model's tokenizer has no chat template; "
        "give one with --chat-template NAME or FILE (this tokenizer can do chatml, llama3, llama2, "
        "mistral, zephyr), use the instruct version of the model, or rows with 'prompt' and "
        "'completion'"
    )
