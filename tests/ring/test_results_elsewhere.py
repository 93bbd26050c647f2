"""What a mixed ring trained works in PEFT and mlx-lm, and gives the live model's numbers."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pytest

from exo_train.agent.planning import make_plan
from exo_train.export.adapters import AdapterPaths, write_adapters
from exo_train.train.batches import BatchPlan, Microbatch, split_microbatches
from exo_train.train.collecting import merged
from exo_train.wire.pb import control_pb2 as pb
from tests.ring.rings import (
    CONFIG,
    TIMEOUT_S,
    candidates,
    manifest_of,
    open_local_ring,
    random_examples,
)

LEARNING_RATE = 1e-2  # large, so that an adapter that is not applied would show


@pytest.fixture(scope="module")
def trained(
    tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[AdapterPaths, list[Microbatch], float, float]:
    """Adapters on disk, a held-out batch, and the live ring's loss on it before and after."""
    manifest = manifest_of(tiny_model)
    plan = make_plan(candidates(["torch", "mlx", "torch"]), CONFIG, manifest, cluster="test")
    examples = random_examples(manifest.spec.vocab_size)
    batch = BatchPlan(examples=examples, batch_size=6, seed=1).batch_for_step(0)
    microbatches = split_microbatches(batch, microbatch_size=2, max_seq_length=32)
    supervised = batch.num_supervised_tokens
    ring, access = open_local_ring(tiny_model, plan)
    with ring:
        ring.prepare()
        ring.load(access, step_timeout_s=TIMEOUT_S)
        losses = []
        for step in range(4):
            if step:
                ring.run_step(step, microbatches, loss_scale=1 / supervised, timeout_s=TIMEOUT_S)
                ring.commit(
                    step,
                    apply=True,
                    learning_rate=LEARNING_RATE,
                    grad_scale=1.0,
                    timeout_s=TIMEOUT_S,
                )
            reports = ring.run_step(
                step, microbatches, loss_scale=1.0, evaluation=True, timeout_s=TIMEOUT_S
            )
            losses.append(reports[-1].loss_sum / supervised)
        adapter = merged(ring.collect(pb.ADAPTER))
    paths = write_adapters(
        tmp_path_factory.mktemp("adapters"),
        adapter,
        lora=plan.lora,
        base_model=str(tiny_model),
        num_layers=plan.num_layers,
        steps=3,
    )
    assert losses[-1] < losses[0] - 0.1
    return paths, microbatches, losses[0], losses[-1]


def mean_loss(logits: list[np.ndarray], microbatches: list[Microbatch]) -> float:
    """Cross-entropy over supervised positions, written out in NumPy."""
    total, count = 0.0, 0
    for logits_BTV, microbatch in zip(logits, microbatches, strict=True):
        wide_BTV = logits_BTV.astype(np.float64)
        top_BT = wide_BTV.max(-1)
        log_sum_BT = top_BT + np.log(np.exp(wide_BTV - top_BT[..., None]).sum(-1))
        chosen_BT = np.take_along_axis(wide_BTV, microbatch.targets_BT[..., None], -1)[..., 0]
        total += float(((log_sum_BT - chosen_BT) * microbatch.mask_BT).sum())
        count += int(microbatch.mask_BT.sum())
    return total / count


def test_peft_gives_the_live_loss(
    trained: tuple[AdapterPaths, list[Microbatch], float, float], tiny_model: Path
) -> None:
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # PEFT's own, about transformers
        from peft import PeftModel
        from transformers import AutoModelForCausalLM

        base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
        model = PeftModel.from_pretrained(base, str(trained[0].peft))
    _, microbatches, before, after = trained
    with torch.no_grad():
        logits = [model(torch.from_numpy(m.tokens_BT).long()).logits.numpy() for m in microbatches]
        with model.disable_adapter():
            plain = [
                model(torch.from_numpy(m.tokens_BT).long()).logits.numpy() for m in microbatches
            ]
    assert mean_loss(logits, microbatches) == pytest.approx(after, rel=1e-5)
    assert mean_loss(plain, microbatches) == pytest.approx(before, rel=1e-5)


def test_mlx_lm_gives_the_live_loss(
    trained: tuple[AdapterPaths, list[Microbatch], float, float], tiny_model: Path
) -> None:
    from exo_train.backends.fast_blas import load_fast_blas

    load_fast_blas()
    import mlx.core as mx
    import mlx_lm

    model, _ = mlx_lm.load(str(tiny_model), adapter_path=str(trained[0].mlx))
    _, microbatches, _, after = trained
    logits = [np.array(model(mx.array(m.tokens_BT)).astype(mx.float32)) for m in microbatches]
    assert mean_loss(logits, microbatches) == pytest.approx(after, rel=1e-5)
