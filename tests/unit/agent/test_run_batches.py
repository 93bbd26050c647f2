"""The options of batches reach a run's steps, from its data and from the rows that it keeps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from exo_train.agent.resuming import kept_data, resumed_options
from exo_train.agent.run_data import encode_data, rows_of_run
from exo_train.config import TrainConfig
from exo_train.errors import ConfigError
from exo_train.models.open import open_model
from exo_train.train.kept_rows import write_rows
from tests.tiny_models import make_tiny_model


@pytest.mark.parametrize("option", ["packing", "group_by_length"])
def test_a_run_s_steps_are_packed_or_grouped_and_the_same_when_resumed(
    option: str, tmp_path: Path
) -> None:
    model = make_tiny_model(tmp_path / "model", num_layers=1, hidden_size=16)
    data = tmp_path / "rows.jsonl"
    rows = [{"text": "word " * (1 + number * 7 % 11)} for number in range(20)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    config = TrainConfig(
        model=str(model), data=str(data), batch_size=4, max_seq_length=96, **{option: True}
    )
    notes: list[str] = []
    encoded = encode_data(
        rows_of_run(config),
        config,
        model_path=model,
        spec=open_model(model)[0],
        on_note=notes.append,
    )
    batches = encoded.batches
    assert (batches.packed_length, batches.group_by_length) == (
        (96, False) if option == "packing" else (0, True)
    )
    assert (batches.num_sequences < 20) == (option == "packing")
    assert any("packed into" in note for note in notes) == (option == "packing")
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text(yaml.safe_dump(config.to_dict()), encoding="utf-8")
    write_rows(run, train=batches.examples, held_out=())
    again = kept_data(run, resumed_options(run, {}), vocab_size=320).batches
    steps = range(2 * batches.steps_per_epoch)
    keys = [[source.batch_for_step(step).row_keys for step in steps] for source in (batches, again)]
    assert keys[0] == keys[1]
    flag = option.replace("_", "-")
    with pytest.raises(ConfigError, match=f"--{flag} cannot change on --resume"):
        resumed_options(run, {option: False})
