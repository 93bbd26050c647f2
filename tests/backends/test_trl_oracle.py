"""Against TRL's SFTTrainer: the same rows must give the same ids, masks, loss and packs.

Left out is what TRL 1.16 has otherwise, and should not:
* prompts whose last token merges with the completion's first: it drops the end of the prompt;
* the line break that a template writes behind an answer's end: it is learnt as part of a chat's
  completion, though nobody generates it, so such rows are masked by their answers as well;
* packed rows without FlashAttention: they see each other, so only the packs are compared;
* templates without generation marks: no answers are known in them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerFast

from exo_train.train.chat import encode_rows
from exo_train.train.examples import Example
from exo_train.train.packing import pack
from exo_train.train.row_kinds import read_row
from tests.backends.hand_ring import Row, accumulate
from tests.backends.test_packed_bases import BACKENDS, load
from tests.tiny_models import make_tiny_model

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]
MARKED_CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ m['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def turns(*contents: str) -> list[dict[str, str]]:
    roles = ("user", "assistant") * len(contents)
    return [{"role": r, "content": c} for r, c in zip(roles, contents, strict=False)]


CHATS = [
    {"messages": turns("Where is it?", "In the house.")},
    {
        "messages": [
            {"role": "system", "content": "Be short."},
            *turns("And then?", "The end, and on.", "What?", "Yes: é, 東, 12."),
        ]
    },
]
COMPLETIONS = [
    {"prompt": "The capital of the north:\n", "completion": "an inn on the water"},
    {"prompt": "Q: and?\nA:", "completion": " there, in the end"},
]
CHAT_COMPLETIONS = [
    {"prompt": turns("Hi", "Not learnt.", "And?"), "completion": turns("", "Learnt.")[1:]},
    {"prompt": turns("Where?"), "completion": turns("", "There.")[1:]},
]
TEXTS = [{"text": "The house on the water."}, {"text": "In the end: 東, and then\n\nnone."}]
KINDS: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "assistant only": (CHATS, {"assistant_only_loss": True}),
    "completion only": (COMPLETIONS, {"completion_only_loss": True}),
    "completion of a chat": (
        CHAT_COMPLETIONS,
        {"completion_only_loss": True, "assistant_only_loss": True},
    ),
    "text": (TEXTS, {}),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("trl") / "model", num_layers=2)


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> PreTrainedTokenizerFast:
    loaded = PreTrainedTokenizerFast.from_pretrained(model)
    loaded.chat_template = MARKED_CHATML
    loaded.pad_token = loaded.eos_token
    return loaded


def trl_trainer(
    model: Path,
    tokenizer: PreTrainedTokenizerFast,
    rows: list[dict[str, Any]],
    folder: Path,
    **options: Any,
) -> Any:
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    args = trl.SFTConfig(
        output_dir=str(folder),
        use_cpu=True,
        bf16=False,
        report_to=[],
        gradient_checkpointing=False,
        model_init_kwargs={"dtype": "float32"},
        **{"max_length": 256, **options},
    )
    return trl.SFTTrainer(
        model=str(model),
        args=args,
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=tokenizer,
    )


def ours(tokenizer: PreTrainedTokenizerFast, rows: list[dict[str, Any]]) -> tuple[Example, ...]:
    read = [read_row(row, where="") for row in rows]
    return encode_rows(read, tokenizer, max_seq_length=256, vocab_size=320).examples


@pytest.mark.parametrize("kind", KINDS)
def test_ids_and_masks_are_those_of_trl(
    kind: str, model: Path, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    rows, options = KINDS[kind]
    theirs = trl_trainer(model, tokenizer, rows, tmp_path, **options).train_dataset
    examples = ours(tokenizer, rows)
    assert len(theirs) == len(examples) == len(rows)
    for their, example in zip(theirs, examples, strict=True):
        assert their["input_ids"] == list(example.tokens)
        # The first token has no input that it could be predicted from.
        learnt = [label != -100 for label in their["labels"][1:]]
        assert learnt == list(example.supervised[1:])
        assert any(learnt)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["assistant only", "completion only"])
def test_a_loss_is_that_of_trl(
    kind: str, backend: str, model: Path, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    rows, options = KINDS[kind]
    trainer = trl_trainer(model, tokenizer, rows, tmp_path, **options)
    with torch.no_grad():
        batch = trainer.data_collator(list(trainer.train_dataset))
        expected = trainer.compute_loss(trainer.model, batch).item()
    (stage,) = load(model, [backend])
    stage.load_adapter({name: 0 * value for name, value in stage.adapter().items()})
    ring_rows = [
        Row(
            key=key,
            tokens=np.array(example.tokens, np.int32),
            supervised=np.array(example.supervised[1:]),
        )
        for key, example in enumerate(ours(tokenizer, rows))
    ]
    assert accumulate([stage], ring_rows) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("seed", range(5))
def test_packs_are_as_few_as_trls(seed: int) -> None:
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    sizes = np.random.default_rng(seed).integers(1, 65, 200).tolist()
    rows = datasets.Dataset.from_dict({"input_ids": [[row] * n for row, n in enumerate(sizes)]})
    theirs = trl.pack_dataset(rows, 64, "bfd")
    packs = pack(sizes, range(len(sizes)), room=64)
    assert sorted(row for each in packs for row in each) == list(range(len(sizes)))
    filled = sorted(sum(sizes[row] for row in each) for each in packs)
    assert filled == sorted(map(len, theirs["input_ids"]))
