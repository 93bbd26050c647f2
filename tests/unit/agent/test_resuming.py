"""Taking up a run: what may be given anew, what is refused by name, and what is said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from exo_train.agent.resuming import check_same, kept_data, newest, resumed_options
from exo_train.agent.run_data import fingerprint
from exo_train.config import TrainConfig
from exo_train.errors import ConfigError
from exo_train.train.chat import Example
from exo_train.train.checkpoint import load_checkpoint, save_checkpoint
from exo_train.train.kept_rows import write_rows
from exo_train.train.rundir import RunDir

ROWS = tuple(
    Example(tokens=(1, n, 2), supervised=(False, True, True), where=f"line {n}")
    for n in range(3, 8)
)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Give the copy of a run that was led by another device: its paths are nothing here."""
    path = tmp_path / "dônnées é"
    path.mkdir()
    config = TrainConfig(
        model="/home/ann/llama", data="/home/ann/chats.jsonl", rank=4, batch_size=2, seed=5,
        run_dir="/home/ann/run", layers=("den-pc:3", "attic:3"),
    )  # fmt: skip
    RunDir(path).write_config(config.to_dict())
    return path


def test_model_and_data_may_lie_elsewhere(run: Path) -> None:
    options = resumed_options(run, {"model": "/m", "data": "/d.jsonl"})
    assert (options.model, options.data, options.run_dir) == ("/m", "/d.jsonl", str(run))
    assert (options.rank, options.seed) == (4, 5)


def test_conflicts_are_listed_with_both_values(run: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        resumed_options(
            run, {"learning_rate": "1e-3", "rank": 8, "targets": "q_proj", "devices": "den-pc"}
        )
    said = str(caught.value)
    cannot = "cannot change on --resume"
    assert f"--learning-rate {cannot}: the run has 0.0002, the command line says 0.001" in said
    assert f"--rank {cannot}: the run has 4, the command line says 8" in said
    assert "--targets cannot change" in said
    assert "--devices" not in said


def test_what_is_as_it_was_is_no_conflict(run: Path) -> None:
    """The command that started the run, with --resume put behind it."""
    options = resumed_options(run, {"rank": 4, "learning_rate": "2e-4", "keep": 5})
    assert (options.rank, options.keep) == (4, 5)


def test_a_file_of_options_is_refused(run: Path) -> None:
    with pytest.raises(ConfigError, match="--config cannot change on --resume"):
        resumed_options(run, {"config": Path("x.yaml")})


def test_it_is_said_what_comes_from_where(run: Path) -> None:
    notes: list[str] = []
    options = resumed_options(run, {"data": "/d.jsonl", "save_every": 5, "devices": "a,b"})
    assert newest(run, on_note=notes.append, options=options) is None
    assert notes == [
        "resuming after step 0: the command line gives --data /d.jsonl (before: "
        "/home/ann/chats.jsonl), --devices a,b (before: none), --save-every 5 (before: 20); "
        f"all other options are taken from {run}"
    ]
    newest(run, on_note=notes.append, options=resumed_options(run, {}))
    assert notes[1] == f"resuming after step 0: all options are taken from {run}"


def state(**changes: Any) -> dict[str, Any]:
    options = {"rank": 4, "alpha": 16.0, "seed": 5}
    plain = {"model_hash": "a" * 64, "data_hash": "b" * 64, "options": options}
    return plain | changes


@pytest.mark.parametrize(
    ("now", "reason"),
    [
        (
            state(model_hash="c" * 64),
            "the model is not the one .* hash cccccccccccc…, there it is aaaaaaaaaaaa…",
        ),
        (state(data_hash="c" * 64), "the data is not the one that .*step-000020 was trained with"),
        (
            state(options={"rank": 8, "alpha": 16.0, "seed": 6}),
            "config.yaml says rank: 8, seed: 6, but .*step-000020 was trained with 4, 5",
        ),
    ],
)
def test_another_run_is_refused_with_both_values(
    run: Path, now: dict[str, Any], reason: str
) -> None:
    arrays = {"step": np.array(20)}
    path = save_checkpoint(run, step=20, adapter=arrays, optimizer=arrays, state=state())
    checkpoint = load_checkpoint(path)
    check_same(checkpoint, state())
    with pytest.raises(ConfigError, match=reason):
        check_same(checkpoint, now)


def test_a_run_goes_on_with_the_rows_it_keeps(run: Path, tmp_path: Path) -> None:
    write_rows(run, train=ROWS, held_out=ROWS[:1])
    data = kept_data(run, resumed_options(run, {}), vocab_size=8)
    assert data is not None
    assert fingerprint(data.batches.examples) == fingerprint(ROWS)
    assert (data.batches.batch_size, data.batches.seed, len(data.held_out)) == (2, 5, 1)
    # Data given anew, with a typing error perhaps, must not be passed over.
    assert kept_data(run, resumed_options(run, {"data": "/chat.jsonl"}), vocab_size=8) is None


def test_the_data_itself_comes_first(run: Path, tmp_path: Path) -> None:
    here = tmp_path / "chats.jsonl"
    here.write_text("{}")
    RunDir(run).write_config(TrainConfig(model="m", data=str(here)).to_dict())
    assert kept_data(run, resumed_options(run, {}), vocab_size=8) is None
    write_rows(run, train=ROWS, held_out=())
    assert kept_data(run, resumed_options(run, {}), vocab_size=8) is None
    here.unlink()
    assert kept_data(run, resumed_options(run, {}), vocab_size=8) is not None
