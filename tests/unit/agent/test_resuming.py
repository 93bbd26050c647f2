"""Taking up a run: what may be given anew, what is refused by name, and what is said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from exo_train.agent.resuming import (
    check_resumed,
    check_same,
    data_before,
    kept_data,
    newest,
    resumed_options,
)
from exo_train.agent.run_data import fingerprint
from exo_train.config import TrainConfig
from exo_train.errors import ConfigError, DataError
from exo_train.train.checkpoint import load_checkpoint, save_checkpoint
from exo_train.train.examples import Example
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


def test_option_that_is_younger_than_the_run_is_at_its_default(run: Path) -> None:
    arrays = {"step": np.array(20)}
    path = save_checkpoint(run, step=20, adapter=arrays, optimizer=arrays, state=state())
    checkpoint = load_checkpoint(path)
    options = state()["options"]
    check_same(checkpoint, state(options={**options, "on_long": "truncate"}))
    with pytest.raises(ConfigError, match=r"on_long: drop, but .* was trained with truncate"):
        check_same(checkpoint, state(options={**options, "on_long": "drop"}))


def test_a_run_goes_on_with_the_rows_it_keeps(run: Path, tmp_path: Path) -> None:
    """Not with what lies now where its data was: here that may be any file."""
    here = tmp_path / "chats.jsonl"
    here.write_text("not even rows")
    RunDir(run).write_config(TrainConfig(model="m", data=str(here), batch_size=2, seed=5).to_dict())
    write_rows(run, train=ROWS, held_out=ROWS[:1])
    options = resumed_options(run, {})
    assert options.data == ""
    data = kept_data(run, options, vocab_size=8)
    assert fingerprint(data.batches.examples, data.held_out) == fingerprint(ROWS, ROWS[:1])
    assert (data.batches.batch_size, data.batches.seed, len(data.held_out)) == (2, 5, 1)
    assert data_before(run) == str(here)
    # Data given anew, with a typing error perhaps, must not be passed over.
    assert resumed_options(run, {"data": str(here)}).data == str(here)


@pytest.mark.parametrize("damage", ["missing", "cut"])
def test_rows_that_are_damaged_are_named_and_may_be_given_anew(run: Path, damage: str) -> None:
    path = write_rows(run, train=ROWS, held_out=())
    path.unlink() if damage == "missing" else path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(DataError, match=r"rows.safetensors .*; name the data with --data"):
        kept_data(run, resumed_options(run, {}), vocab_size=8)
    assert check_resumed(run, None, state(), vocab_size=8) is None


@pytest.mark.parametrize(
    ("train", "held_out"),
    [(ROWS[1:], ROWS[:1]), (ROWS, ROWS[1:2]), (ROWS, ()), ((*ROWS, ROWS[0]), ())],
    ids=["other rows", "other held-out rows", "none held out", "held-out rows trained on"],
)
def test_other_data_is_refused_before_the_first_checkpoint_too(
    run: Path, train: tuple[Example, ...], held_out: tuple[Example, ...]
) -> None:
    write_rows(run, train=ROWS, held_out=ROWS[:1])
    same, other = fingerprint(ROWS, ROWS[:1]), fingerprint(train, held_out)
    assert check_resumed(run, None, state(data_hash=same), vocab_size=8) == same
    reason = f"the data is not the one .* hash {other[:12]}…, there it is {same[:12]}…"
    with pytest.raises(ConfigError, match=reason):
        check_resumed(run, None, state(data_hash=other), vocab_size=8)
