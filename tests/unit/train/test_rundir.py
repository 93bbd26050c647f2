"""A run directory: refused when in use, and every file in it reads back."""

from __future__ import annotations

import json
import math
import os
import struct

import pytest

from exo_train.config import TrainConfig
from exo_train.errors import ConfigError
from exo_train.train.metrics import RankMetrics, StepMetrics
from exo_train.train.rundir import DeviceSummary, RunDir, Summary, relative_to_run


def make_step(step: int, name: str = "küche\u2028mac") -> StepMetrics:
    rank = RankMetrics(
        rank=0, name=name, busy_s=1.0, bubble_fraction=0.0, sent_bytes=1, peak_memory_bytes=2
    )
    return StepMetrics(
        step=step,
        epoch=0.1,
        loss=3.0 / step,
        lr=1e-4,
        grad_norm=1.0,
        tokens=10,
        supervised_tokens=5,
        positions=16,
        tokens_per_s=5.0,
        step_s=2.0,
        period_s=0.5,
        generation=0,
        ranks=(rank,),
    )


def make_summary(**changes) -> Summary:
    values = {
        "status": "done",
        "steps": 20,
        "saved_step": 20,
        "loss_first": 3.0,
        "loss_last": 1.0,
        "eval_loss_before": 3.1,
        "eval_loss_after": None,
        "tokens": 1000,
        "tokens_per_s": 55.5,
        "devices": (
            DeviceSummary(
                name="küche",
                rank=0,
                backend="mlx",
                device="gpu",
                layers=(0, 7),
                busy_share=0.9,
                peak_memory_bytes=10**9,
            ),
        ),
        "peft_adapter": "adapters/peft",
        "mlx_adapter": "adapters/mlx",
    }
    return Summary(**(values | changes))


@pytest.fixture
def run(tmp_path) -> RunDir:
    return RunDir.create(tmp_path / "my runs" / "dônnées é 数据")


def test_a_directory_with_files_is_refused(tmp_path):
    run = RunDir.create(tmp_path / "run")
    RunDir.create(tmp_path / "run")  # still empty
    (run.path / "adapter.bin").write_text("precious")
    with pytest.raises(ConfigError, match=r"not empty \(1 entries, adapter.bin first\).*--resume"):
        RunDir.create(run.path)
    assert RunDir.create(run.path, allow_existing=True) == run
    with pytest.raises(ConfigError, match="is a file"):
        RunDir.create(run.path / "adapter.bin")


def test_config_reads_back_equal(run):
    config = TrainConfig(model="modèle 数", learning_rate=2e-5, targets=("q_proj",))
    run.write_config(config.to_dict())
    again = RunDir.open(run.path).read_config()
    assert TrainConfig.from_mapping(again, source="config.yaml") == config
    assert "modèle 数" in (run.path / "config.yaml").read_text(encoding="utf-8")


def test_something_else_is_not_opened_as_a_run(tmp_path):
    with pytest.raises(ConfigError, match="is not a run"):
        RunDir.open(tmp_path)
    (tmp_path / "config.yaml").write_text("!!python/object/apply:os.system ['exit 3']")
    with pytest.raises(ConfigError, match="cannot be read"):
        RunDir.open(tmp_path).read_config()


def test_plan_is_for_people(run):
    run.write_plan('{"cluster":"k\\u00fcche"}')
    assert (run.path / "plan.json").read_text(encoding="utf-8") == '{\n  "cluster": "küche"\n}\n'


def test_each_step_is_one_line_at_once(run):
    for step in (1, 2, 3):
        run.append_metrics(make_step(step))
        lines = (run.path / "metrics.jsonl").read_bytes().decode().split("\n")
        assert json.loads(lines[step - 1])["step"] == step
    assert [row["ranks"][0]["name"] for row in run.read_metrics()] == ["küche\u2028mac"] * 3


def test_resume_drops_the_steps_it_repeats_and_a_cut_line(run):
    for step in (1, 2, 3, 4):
        run.append_metrics(make_step(step))
    with (run.path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "lo')
    run.rewind_metrics(last_step=3)
    run.append_metrics(make_step(4))
    assert [row["step"] for row in run.read_metrics()] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    "damage",
    [
        lambda line: line.replace(b"epoch", b"ep\xffch"),
        lambda line: line[:-9],
        lambda line: b"[" * 100_000,
        lambda line: line.replace(b'"loss"', b'"lost"'),
        lambda line: line.replace(b'"step": 2', b'"step": "2"'),
    ],
    ids=["a flipped byte", "cut", "nested", "no loss", "step as text"],
)
def test_one_damaged_line_costs_no_other(run, damage):
    for step in (1, 2, 3, 4):
        run.append_metrics(make_step(step))
    path = run.path / "metrics.jsonl"
    lines = path.read_bytes().split(b"\n")
    path.write_bytes(b"\n".join([lines[0], damage(lines[1]), *lines[2:]]))
    assert [row["step"] for row in run.read_metrics()] == [1, 3, 4]
    run.rewind_metrics(last_step=3)
    assert [row["step"] for row in run.read_metrics()] == [1, 3]


def test_options_that_are_no_options_are_a_sentence(run):
    for text in ("devices: " + "[" * 10_000, "x: 2001-99-99"):
        (run.path / "config.yaml").write_text(text)
        with pytest.raises(ConfigError, match=r"config\.yaml cannot be read"):
            run.read_config()


def test_summary_has_the_published_keys(run):
    run.write_summary(make_summary(loss_last=math.nan))
    plain = json.loads((run.path / "summary.json").read_text(encoding="utf-8"))
    assert set(plain) == {
        "schema", "status", "steps", "saved_step", "loss_first", "loss_last", "eval_loss_before",
        "eval_loss_after", "tokens", "tokens_per_s", "devices", "adapters", "prediction",
        "interruptions", "best_step", "best_eval_loss", "ended_early", "model",
    }  # fmt: skip
    assert plain["schema"] == 1
    assert plain["loss_last"] is None
    assert plain["adapters"] == {"peft": "adapters/peft", "mlx": "adapters/mlx"}
    assert plain["model"] is None
    whole = make_summary(peft_adapter=None, mlx_adapter=None, model="model").to_dict()
    assert (whole["adapters"], whole["model"]) == ({}, "model")
    assert plain["devices"] == [
        {
            "name": "küche",
            "rank": 0,
            "backend": "mlx",
            "device": "gpu",
            "layers": [0, 7],
            "busy_share": 0.9,
            "bubble_fraction": pytest.approx(0.1),
            "peak_memory_bytes": 10**9,
        }
    ]


def test_a_failed_write_leaves_the_old_file_and_says_where(run):
    run.write_summary(make_summary(status="running"))
    before = (run.path / "summary.json").read_bytes()
    (run.path / ".summary.json.tmp").mkdir()  # stands in the way, as a full disk would
    with pytest.raises(ConfigError, match=r"cannot write summary.json in .*choose another"):
        run.write_summary(make_summary(status="done"))
    assert (run.path / "summary.json").read_bytes() == before


@pytest.mark.parametrize(
    ("train", "held_out"),
    [
        ([(1, 3.0)], []),
        ([(s, 3.0 / s) for s in range(1, 200)], [(0, 3.2), (199, 0.5)]),
        ([(1, 3.0), (2, math.nan), (3, None)], [(0, math.inf)]),
        ([], []),
    ],
    ids=["one point", "usual", "bad values", "nothing"],
)
def test_loss_picture_is_a_png_of_readable_size(run, train, held_out):
    run.write_loss_plot(train=train, held_out=held_out)
    data = (run.path / "loss.png").read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", data[16:24]) == (960, 540)


def test_paths_in_the_summary_are_relative(run):
    assert relative_to_run(run.adapters / "peft", run.path) == "adapters/peft"
    assert os.sep not in relative_to_run(run.adapters / "peft", run.path).replace("/", "")
