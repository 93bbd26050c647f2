"""Against TRL's own trainers, where TRL is installed: tokens, masks, losses, gradients, words."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from exo_train.backends.preference import pair_loss
from exo_train.models.tokenizer import load_tokenizer
from exo_train.objective_config import ObjectiveConfig
from exo_train.train.batches import evaluation_batches, split_microbatches
from exo_train.train.chat import encode_rows
from exo_train.train.metrics import PairMetrics
from exo_train.train.row_kinds import read_row
from tests.backends.hand_ring import LORA, OPTIONS, load_ring, relative_error
from tests.backends.test_oracles import model_directory, peft_parameter

WHY = "TRL is no part of the dev install; pip install trl datasets"
peft = pytest.importorskip("peft")
trl = pytest.importorskip("trl", reason=WHY)
datasets = pytest.importorskip("datasets", reason=WHY)

# TRL's and its libraries' words for each other are no matter of ours.
pytestmark = pytest.mark.filterwarnings("ignore")
MODEL = "llama3-rope"
ROWS = [
    {"prompt": "the sea is", "chosen": " deep and old", "rejected": " dry"},
    {"prompt": "a dog", "chosen": " barks", "rejected": " sings a long song of the moon"},
    {"prompt": "rain falls on the", "chosen": " roof at night", "rejected": " fish at noon"},
]


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "hf"))


def trl_trainer(directory: Path, out: Path, objective: ObjectiveConfig) -> Any:
    """Make a DPOTrainer of a base and a fresh LoRA adapter: its reference is the base alone."""
    base = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    tokenizer = load_tokenizer(directory)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    return trl.DPOTrainer(
        model=base,
        args=trl.DPOConfig(
            output_dir=str(out),
            beta=objective.beta,
            loss_type=["sigmoid"],
            per_device_train_batch_size=len(ROWS),
            gradient_checkpointing=False,
            max_length=None,
            report_to=[],
            use_cpu=True,
        ),
        train_dataset=datasets.Dataset.from_list(ROWS),
        processing_class=tokenizer,
        peft_config=peft.LoraConfig(
            r=LORA.rank, lora_alpha=LORA.alpha, target_modules=list(LORA.targets), lora_dropout=0.0
        ),
    )


@pytest.mark.parametrize("backend", ["torch", "mlx"])
def test_dpo_is_trl_s(backend: str, tmp_path: Path) -> None:
    objective = ObjectiveConfig(name="dpo", beta=0.3)
    directory = model_directory(tmp_path, MODEL)
    options = replace(OPTIONS, objective=objective)
    (stage,) = load_ring(MODEL, [backend], options=options)
    trainer = trl_trainer(directory, tmp_path / "out", objective)
    trainer.model.eval()
    with torch.no_grad():
        for name, value in stage.adapter().items():
            peft_parameter(trainer.model, name).copy_(torch.from_numpy(value.T))
    # As its own collator pads rows that it tokenised itself.
    rows = [trainer.train_dataset[index] for index in range(len(ROWS))]
    batch = trainer.data_collator(rows)
    examples = encode_rows(
        [read_row(row, where="row", objective="dpo") for row in ROWS],
        load_tokenizer(directory),
        max_seq_length=64,
        vocab_size=320,
    ).examples
    for number, (row, pair) in enumerate(
        zip(rows, zip(examples[::2], examples[1::2], strict=True), strict=True)
    ):
        for half, example in zip(("chosen_ids", "rejected_ids"), pair, strict=True):
            assert list(example.tokens) == row["prompt_ids"] + row[half], number
            start = len(row["prompt_ids"])
            assert example.supervised.index(True) == start
            assert all(example.supervised[start:])
    loss = trainer.compute_loss(trainer.model, batch)
    loss.backward()
    logged = {key: float(np.mean(values)) for key, values in trainer._metrics["eval"].items()}

    (whole,) = evaluation_batches(examples, batch_size=len(ROWS), has_pairs=True)
    (microbatch,) = split_microbatches(whole, microbatch_size=len(ROWS), max_seq_length=64)
    stage.begin_step(step=0, loss_scale=1 / len(ROWS))
    stage.refer(microbatch.to_input())
    stage.forward(microbatch.to_input())
    stage.backward(0, None)
    assert stage.loss_sum() / len(ROWS) == pytest.approx(loss.item(), rel=1e-5)
    gradients = {
        name: peft_parameter(trainer.model, name).grad.numpy().T for name in stage.gradients()
    }
    assert relative_error(stage.gradients(), gradients) < 3e-5
    metrics = PairMetrics.of(stage.take_pair_sums(), objective)
    assert metrics is not None
    for ours, theirs in (
        (metrics.rewards_chosen, "rewards/chosen"),
        (metrics.rewards_rejected, "rewards/rejected"),
        (metrics.reward_margin, "rewards/margins"),
        (metrics.reward_accuracy, "rewards/accuracies"),
    ):
        assert ours == pytest.approx(logged[theirs], rel=1e-3, abs=1e-6), theirs


def test_the_odds_ratio_is_trl_s() -> None:
    from trl.experimental.orpo import ORPOTrainer

    objective = ObjectiveConfig(name="orpo", beta=0.4)
    rng = np.random.default_rng(0)
    mask_BT = np.arange(9) < np.array([2, 9, 5, 7])[:, None]
    counts_B = mask_BT.sum(axis=1)
    means_B = -3 * rng.random(4) - 0.01
    ours = pair_loss(objective, means_B * counts_B, mask_BT, None)
    theirs = SimpleNamespace(beta=objective.beta, accelerator=SimpleNamespace(device="cpu"))
    losses, chosen, rejected, _, log_odds = ORPOTrainer.odds_ratio_loss(
        theirs, torch.from_numpy(means_B[:2]), torch.from_numpy(means_B[2:])
    )
    # There the ratio's logarithm is a gain, and taken off the loss.
    assert ours.loss_sum - ours.sums.nll == pytest.approx(-losses.sum().item(), rel=1e-5)
    assert ours.sums.nll == pytest.approx(-means_B[:2].sum())
    assert ours.sums.log_odds / 2 == pytest.approx(log_odds.item(), rel=1e-5)
    assert ours.sums.chosen == pytest.approx(chosen.sum().item(), rel=1e-5)
    assert ours.sums.rejected == pytest.approx(rejected.sum().item(), rel=1e-5)
