"""Packed and grouped runs: any ring equals one device, packed equals unpacked, resume is exact."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from exo_train.errors import InterruptedRunError
from exo_train.train.batches import plan_batches
from exo_train.train.checkpoint import newest_checkpoint
from exo_train.train.watcher import Watcher
from tests.ring.rings import CONFIG, Trained, largest_difference, random_examples, train_ring
from tests.ring.test_ring_equals_one_device import assert_equal_runs
from tests.ring.test_trainer import StopAfter, adapter_of, losses_of, trained

T, M = "torch", "mlx"
NUM_ROWS = 24  # of random_examples
# All rows in each step, however they lie: so each step of the two runs has the same rows.
WHOLE = replace(CONFIG, batch_size=NUM_ROWS, dropout=0.1)
PACKED = replace(WHOLE, packing=True)


@pytest.fixture(scope="module")
def unpacked(tiny_model: Path) -> Trained:
    return train_ring(tiny_model, [T], config=WHOLE, num_steps=4)


@pytest.mark.parametrize("backends", [[T], [M], [M, T, M]], ids="-".join)
def test_a_packed_run_equals_an_unpacked_one(
    backends: list[str], tiny_model: Path, unpacked: Trained
) -> None:
    """F63, over steps with updates and dropout, to the run's own tolerance."""
    packed = train_ring(tiny_model, backends, config=PACKED, num_steps=4)
    assert_equal_runs(packed, unpacked)
    batches = plan_batches(random_examples(320), replace(PACKED, seed=3))
    assert batches.num_sequences < NUM_ROWS / 1.5, "nothing was packed"


def test_a_packed_ring_equals_one_device_where_packs_meet_in_steps(tiny_model: Path) -> None:
    config = replace(PACKED, batch_size=4, checkpoint_activations=True)
    one = train_ring(tiny_model, [T], config=config, num_steps=5)
    ring = train_ring(tiny_model, [T, M], config=replace(config, microbatch_size=1), num_steps=5)
    assert_equal_runs(ring, one)


def test_the_comparison_catches_rows_that_see_each_other(
    tiny_model: Path, unpacked: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control."""
    monkeypatch.setattr(
        "exo_train.backends.torch_stage.attention_arguments", lambda *given, **more: {}
    )
    packed = train_ring(tiny_model, [T], config=PACKED, num_steps=4)
    with pytest.raises(AssertionError):
        assert_equal_runs(packed, unpacked)


@pytest.mark.parametrize("changes", [{"packing": True}, {"group_by_length": True}], ids=str)
def test_a_resumed_run_has_the_rows_of_an_uninterrupted_one(
    changes: dict[str, bool], tiny_model: Path, tmp_path: Path
) -> None:
    """Invariant 9, on another ring; the held-out rows are measured in between."""
    config = replace(CONFIG, dropout=0.1, batch_size=4, eval_every=2, **changes)
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    progress = trained(tiny_model, whole, config=replace(config, eval_every=0))
    stop = Watcher(wants_stop=StopAfter(6))
    with pytest.raises(InterruptedRunError, match="after step 3 of 6"):
        trained(tiny_model, halves, config=config, watcher=stop)
    checkpoint = newest_checkpoint(halves)
    assert checkpoint is not None
    resumed = trained(
        tiny_model, halves, backends=["torch", "mlx"], config=config, resumed=checkpoint
    )
    assert losses_of(halves) == pytest.approx(losses_of(whole), rel=1e-4)
    assert largest_difference(adapter_of(halves), adapter_of(whole)) < 1e-4
    assert [step for step, _ in resumed.held_out_losses] == [0, 2, 4, 6]
    last = [run.held_out_losses[-1][1] for run in (progress, resumed)]
    assert last[0] == pytest.approx(last[1], rel=1e-4)


def test_a_packed_held_out_loss_is_the_unpacked_one(tiny_model: Path, tmp_path: Path) -> None:
    before = [
        trained(tiny_model, tmp_path / str(on), config=replace(CONFIG, packing=on)).held_out_losses[
            0
        ]
        for on in (False, True)
    ]
    assert before[0] == pytest.approx(before[1], rel=1e-5)
