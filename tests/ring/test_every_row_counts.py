"""Each row is trained as often as asked, short batches included, whatever is measured between."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from exo_train.agent.planning import make_plan
from exo_train.config import TrainConfig
from exo_train.plan.history import StepId
from exo_train.train.batches import Microbatch, plan_batches
from exo_train.train.checkpoint import newest_checkpoint
from exo_train.train.evaluation import held_out_loss
from exo_train.train.loop import Data
from exo_train.train.rundir import RunDir
from exo_train.train.watcher import Watcher
from tests.ring.rings import (
    CONFIG,
    TIMEOUT_S,
    candidates,
    manifest_of,
    open_local_ring,
    random_examples,
)
from tests.ring.trainers import make_trainer

BATCH = replace(CONFIG, batch_size=4, epochs=3)
EXAMPLES = random_examples(320, num_rows=12)


@dataclass(frozen=True, slots=True)
class Seen:
    """The row keys of each step, and of each evaluation, as they went to the ring."""

    trained: list[list[int]]
    measured: list[list[int]]
    held_out_loss: float
    held_out_losses_alone: list[float]


def run_seen(model: Path, run_dir: Path, config: TrainConfig, data: Data) -> Seen:
    plan = make_plan(candidates(["torch"]), config, manifest_of(model), cluster="test")
    seen: dict[bool, list[list[int]]] = {False: [], True: []}
    ring, access = open_local_ring(model, plan)
    run_step = ring.run_step

    def remembering(step: int, given: list[Microbatch], **how: Any) -> Any:
        keys = [key for microbatch in given for key in microbatch.row_keys]
        seen[how.get("evaluation", False)].append(keys)
        return run_step(step, given, **how)

    with ring, pytest.MonkeyPatch.context() as patch:
        ring.prepare()
        ring.load(access, step_timeout_s=TIMEOUT_S, at=StepId(generation=0, step=0))
        patch.setattr(ring, "run_step", remembering)
        trainer = make_trainer(
            ring,
            config,
            data,
            run_dir,
            num_steps=config.epochs * data.batches.steps_per_epoch,
            watcher=Watcher(),
        )
        trainer.run()
        patch.undo()
        step = trainer.progress.step
        alone = [held_out_loss(ring, [row], step=step, config=config).loss for row in data.held_out]
    losses = trainer.progress.held_out_losses
    return Seen(seen[False], seen[True], losses[-1][1], alone)


@pytest.mark.parametrize(
    "changes",
    [{}, {"packing": True}, {"group_by_length": True}],
    ids=["drawn", "packed", "grouped"],
)
def test_ten_rows_in_batches_of_four_are_each_trained_three_times(
    changes: dict[str, bool], tiny_model: Path, tmp_path: Path
) -> None:
    """F17 and F54: the short step counts too; and held-out losses in between change no order."""
    config = replace(BATCH, **changes)
    data = Data(batches=plan_batches(EXAMPLES[:10], config), held_out=EXAMPLES[10:])
    seldom = run_seen(tiny_model, tmp_path / "seldom", config, data)
    assert Counter(key for keys in seldom.trained for key in keys) == dict.fromkeys(range(10), 3)
    if not changes:
        assert [len(keys) for keys in seldom.trained] == [4, 4, 2] * 3
    checkpoint = newest_checkpoint(tmp_path / "seldom")
    assert checkpoint is not None
    assert int(checkpoint.optimizer["step"]) == len(seldom.trained)
    often = run_seen(tiny_model, tmp_path / "often", replace(config, eval_every=1), data)
    assert often.trained == seldom.trained
    assert len(often.measured) == len(often.trained) + 1
    assert all(sorted(keys) == [0, 1] for keys in often.measured)
    losses = [
        [row["loss"] for row in RunDir(tmp_path / name).read_metrics()]
        for name in ("seldom", "often")
    ]
    assert losses[0] == losses[1]


def test_three_rows_and_two_held_out_do_for_a_batch_of_four(
    tiny_model: Path, tmp_path: Path
) -> None:
    """F13 and F14: smaller batches, and a held-out loss by tokens, not a mean of rows' means."""
    data = Data(batches=plan_batches(EXAMPLES[:3], BATCH), held_out=EXAMPLES[10:])
    seen = run_seen(tiny_model, tmp_path / "run", BATCH, data)
    assert [sorted(keys) for keys in seen.trained] == [[0, 1, 2]] * 3
    tokens = [row.num_supervised_tokens for row in data.held_out]
    assert tokens[0] != tokens[1]
    pairs = zip(seen.held_out_losses_alone, tokens, strict=True)
    expected = sum(loss * count for loss, count in pairs) / sum(tokens)
    assert seen.held_out_loss == pytest.approx(expected, rel=1e-6)
    mean_of_means = sum(seen.held_out_losses_alone) / 2
    assert abs(expected - mean_of_means) > 1e-4, "this test could not fail"
