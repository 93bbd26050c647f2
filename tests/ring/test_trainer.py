"""The loop's rules: transactions, held-out loss, checkpoints, resume. In one process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from exo_train.agent.planning import make_plan
from exo_train.config import TrainConfig
from exo_train.errors import InterruptedRunError, NumericsError
from exo_train.plan.history import StepId
from exo_train.plan.prediction import Prediction, RankPrediction
from exo_train.train.batches import PAD_MULTIPLE
from exo_train.train.checkpoint import Checkpoint, newest_checkpoint
from exo_train.train.progress import Progress
from exo_train.train.rundir import RunDir
from exo_train.train.watcher import Watcher
from tests.ring.rings import (
    CONFIG,
    TIMEOUT_S,
    candidates,
    largest_difference,
    manifest_of,
    open_local_ring,
)
from tests.ring.trainers import make_trainer, random_data

STEPS = 6


def trained(
    model: Path,
    run_dir: Path,
    *,
    backends: Sequence[str] = ("torch",),
    faults: dict[int, str] | None = None,
    config: TrainConfig = CONFIG,
    watcher: Watcher | None = None,
    resumed: Checkpoint | None = None,
    prediction: Prediction | None = None,
) -> Progress:
    """Run the loop; what it leaves is in `run_dir`."""
    manifest = manifest_of(model)
    plan = make_plan(candidates(backends), config, manifest, cluster="test")
    data = random_data(manifest.spec.vocab_size, config, num_rows=20)
    ring, access = open_local_ring(model, plan, faults=faults)
    with ring:
        ring.prepare()
        at = StepId(generation=0, step=resumed.step if resumed else 0)
        ring.load(access, step_timeout_s=TIMEOUT_S, at=at)
        trainer = make_trainer(
            ring,
            config,
            data,
            run_dir,
            num_steps=STEPS,
            watcher=watcher or Watcher(),
            resumed=resumed,
            prediction=prediction,
        )
        trainer.run(resumed)
        return trainer.progress


def adapter_of(run_dir: Path) -> dict[str, np.ndarray]:
    checkpoint = newest_checkpoint(run_dir)
    assert checkpoint is not None
    return checkpoint.adapter


def losses_of(run_dir: Path) -> list[float]:
    return [row["loss"] for row in RunDir(run_dir).read_metrics()]


class StopAfter:
    """Wants a stop from the `num_calls`-th question on; one comes before each task,
    of which the first is the held-out loss.
    """

    def __init__(self, num_calls: int) -> None:
        self.left = num_calls

    def __call__(self) -> bool:
        self.left -= 1
        return self.left <= 0


@pytest.mark.parametrize("backends", [["torch"], ["torch", "mlx", "torch"]], ids=len)
@pytest.mark.parametrize("fault", ["", "nan:2"], ids=["", "after a dropped step"])
def test_resumed_equals_never_interrupted(
    backends: list[str], fault: str, tiny_model: Path, tmp_path: Path
) -> None:
    """Invariant 9, to the last digit on the same split: dropout, schedule, order, moments."""
    assert_resumed_exactly(tiny_model, tmp_path, replace(CONFIG, dropout=0.1), backends, fault)


@pytest.mark.parametrize("optimizer", ["adafactor", "sgd"])
def test_each_optimizers_state_is_resumed(optimizer: str, tiny_model: Path, tmp_path: Path) -> None:
    config = replace(CONFIG, optimizer=optimizer, lora_plus_ratio=4.0, lr_schedule="linear")
    assert_resumed_exactly(tiny_model, tmp_path, config, ["mlx", "torch"])


def assert_resumed_exactly(
    tiny_model: Path, tmp_path: Path, config: TrainConfig, backends: list[str], fault: str = ""
) -> None:
    faults = {0: fault}
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    trained(tiny_model, whole, backends=backends, config=config, faults=faults)
    stop = Watcher(wants_stop=StopAfter(5))
    with pytest.raises(InterruptedRunError, match="after step 3 of 6"):
        trained(tiny_model, halves, backends=backends, config=config, faults=faults, watcher=stop)
    checkpoint = newest_checkpoint(halves)
    assert checkpoint is not None
    assert checkpoint.step == 3
    progress = trained(
        tiny_model, halves, backends=backends, config=config, faults=faults, resumed=checkpoint
    )
    assert losses_of(halves) == losses_of(whole)
    assert largest_difference(adapter_of(halves), adapter_of(whole)) == 0.0
    assert [step for step, _ in progress.held_out_losses] == [0, STEPS]
    assert progress.busy_share(0) > 0


@pytest.mark.parametrize(
    ("before", "after"),
    [(["torch", "torch"], ["torch"]), (["torch"], ["torch", "mlx", "torch"]), (["mlx"], ["torch"])],
    ids=["fewer devices", "more devices, two backends", "another backend"],
)
def test_resumed_elsewhere_goes_on_with_the_same_numbers(
    before: list[str], after: list[str], tiny_model: Path, tmp_path: Path
) -> None:
    """Checkpoints speak of layers, so any ring can go on; to float tolerance then."""
    config = replace(CONFIG, dropout=0.1)
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    trained(tiny_model, whole, backends=before, config=config)
    stop = Watcher(wants_stop=StopAfter(5))
    with pytest.raises(InterruptedRunError, match="after step 3 of 6"):
        trained(tiny_model, halves, backends=before, config=config, watcher=stop)
    checkpoint = newest_checkpoint(halves)
    assert checkpoint is not None
    trained(tiny_model, halves, backends=after, config=config, resumed=checkpoint)
    assert losses_of(halves) == pytest.approx(losses_of(whole), rel=1e-4)


def test_a_dropped_step_changes_nothing(tiny_model: Path, tmp_path: Path) -> None:
    """Invariant 5: one rank's bad number keeps every rank from moving."""
    notes: list[str] = []
    progress = trained(
        tiny_model,
        tmp_path / "run",
        backends=["torch", "mlx"],
        faults={1: "nan:1"},
        config=replace(CONFIG, save_every=1),
        watcher=Watcher(on_note=notes.append),
    )
    first = newest_checkpoint(tmp_path / "run")
    assert first is not None
    assert progress.totals.num_dropped == 1
    assert "step 1" in notes[0]
    assert "device1" in notes[0]
    assert int(first.optimizer["step"]) == STEPS - 1


def test_gradients_through_fp16_are_those_of_fp32(tiny_model: Path, tmp_path: Path) -> None:
    """The loss is scaled, nothing that is written down or applied is."""
    config = replace(CONFIG, wire_dtype="fp16")
    progress = trained(tiny_model, tmp_path / "half", backends=["torch", "mlx"], config=config)
    trained(tiny_model, tmp_path / "full", backends=["torch", "mlx"])
    assert progress.totals.loss_scale.num_good == STEPS
    half, full = (RunDir(tmp_path / name).read_metrics() for name in ("half", "full"))
    for name in ("loss", "grad_norm"):
        assert [row[name] for row in half] == pytest.approx([row[name] for row in full], rel=5e-3)
    difference = largest_difference(adapter_of(tmp_path / "half"), adapter_of(tmp_path / "full"))
    assert difference < 0.5 * CONFIG.learning_rate * STEPS


def test_three_bad_steps_in_a_row_stop_the_run(tiny_model: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with pytest.raises(NumericsError, match=r"step 5.*not finite: device0.*3 steps in a row"):
        trained(tiny_model, run_dir, backends=["mlx", "torch"], faults={0: "nans:3"})
    checkpoint = newest_checkpoint(run_dir)
    assert checkpoint is not None
    assert int(checkpoint.optimizer["step"]) == 2, "the state of the last good step is kept"
    assert all(np.isfinite(array).all() for array in checkpoint.adapter.values())


def test_held_out_loss_is_measured_and_does_not_disturb(tiny_model: Path, tmp_path: Path) -> None:
    often = trained(tiny_model, tmp_path / "often", config=replace(CONFIG, eval_every=2))
    trained(tiny_model, tmp_path / "seldom")
    assert [step for step, _ in often.held_out_losses] == [0, 2, 4, 6]
    assert losses_of(tmp_path / "often") == losses_of(tmp_path / "seldom")


def test_a_real_ring_is_held_against_its_promise(tiny_model: Path, tmp_path: Path) -> None:
    """Bytes are known exactly: the middle rank sends a hidden vector up and a gradient down."""
    positions, hidden_bytes = 100, 4 * manifest_of(tiny_model).spec.hidden_size
    promise = Prediction(
        positions=positions,
        step_s=1.0,
        period_s=0.1,
        ranks=tuple(
            RankPrediction(
                name=f"device{rank}",
                busy_share=0.5,
                peak_memory_bytes=10**9,
                sent_bytes=num_neighbours * positions * hidden_bytes,
            )
            for rank, num_neighbours in enumerate((1, 2, 1))
        ),
    )
    progress = trained(
        tiny_model, tmp_path / "run", backends=["torch", "mlx", "torch"], prediction=promise
    )
    found = progress.reckoning.compared()
    assert found is not None
    assert [device["sent_bytes"]["error"] for device in found["devices"]] == [0.0] * 3
    assert all(0 < device["bubble_fraction"]["achieved"] < 1 for device in found["devices"])
    assert all(device["peak_memory_bytes"]["achieved"] > 0 for device in found["devices"])
    for row in RunDir(tmp_path / "run").read_metrics():
        num_microbatches = 3 if row["step"] % 4 else 1  # 20 rows: an epoch's last step has 2
        assert row["positions"] % (PAD_MULTIPLE * 2) == 0
        assert row["positions"] >= row["tokens"]
        assert (row["period_s"] > 0) == (num_microbatches > 1)
        assert (num_microbatches - 1) * row["period_s"] < row["step_s"]
