"""Muon, with AdamW for what is no hidden matrix: any ring equals one device, resumed as well."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from exo_train.errors import InterruptedRunError
from exo_train.train.checkpoint import newest_checkpoint
from exo_train.train.watcher import Watcher
from tests.ring.rings import CONFIG, largest_difference, train_ring
from tests.ring.test_trainer import StopAfter, losses_of, trained

MUON = replace(
    CONFIG, full=True, optimizer="muon", weight_decay=0.1, adam_epsilon=1e-6, learning_rate=1e-3
)


@pytest.mark.parametrize("rate", ["match_rms_adamw", "original"])
@pytest.mark.parametrize("ring", [["torch", "mlx"], ["mlx", "torch", "mlx"]], ids=str)
def test_a_ring_equals_one_device(tiny_model: Path, ring: list[str], rate: str) -> None:
    config = replace(MUON, muon_rate=rate)
    one = train_ring(tiny_model, ["torch"], config=config, num_steps=4)
    found = train_ring(tiny_model, ring, config=config, num_steps=4)
    assert found.losses == pytest.approx(one.losses, rel=1e-5)
    assert found.grad_norms == pytest.approx(one.grad_norms, rel=1e-4)
    assert largest_difference(found.adapter, one.adapter) < 1e-4
    assert one.losses[-1] < one.losses[0]
    by_adamw = train_ring(
        tiny_model, ["torch"], config=replace(MUON, optimizer="adamw"), num_steps=4
    )
    assert by_adamw.losses[-1] != pytest.approx(one.losses[-1], rel=1e-4)


def test_it_is_resumed_on_another_ring(tiny_model: Path, tmp_path: Path) -> None:
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    trained(tiny_model, whole, config=MUON)
    with pytest.raises(InterruptedRunError, match="after step 3 of 6"):
        trained(
            tiny_model, halves, backends=["torch", "mlx"], config=MUON,
            watcher=Watcher(wants_stop=StopAfter(5)),
        )  # fmt: skip
    checkpoint = newest_checkpoint(halves)
    assert checkpoint is not None
    name = "model.layers.0.mlp.up_proj.weight"
    assert {n for n in checkpoint.optimizer if n.startswith(name)} == {f"{name}.momentum"}
    trained(tiny_model, halves, backends=["mlx"], config=MUON, resumed=checkpoint)
    assert losses_of(halves) == pytest.approx(losses_of(whole), rel=1e-4)
