"""All weights trained by real agents: options reach the workers, and the result is a model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers

from exo_train.config import TrainConfig
from exo_train.train.kept_rows import read_rows
from tests.ring.household import Household
from tests.ring.household_runs import STEPS, losses, metrics

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("household"), pytest.mark.timeout(300)]


def plain_loss(model: Path, run_dir: Path) -> float:
    """Mean over the run's held-out rows in the plainest way."""
    loaded = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    _, held_out = read_rows(run_dir, vocab_size=loaded.config.vocab_size)
    total, count = 0.0, 0
    for example in held_out:
        with torch.no_grad():
            logits_TV = loaded(torch.tensor([example.tokens])).logits[0]
        targets, wanted = torch.tensor(example.tokens[1:]), torch.tensor(example.supervised[1:])
        each_T = torch.nn.functional.cross_entropy(logits_TV[:-1], targets, reduction="none")
        total, count = total + float(each_T[wanted].sum()), count + int(wanted.sum())
    return total / count


def test_three_ranks_make_a_model_that_transformers_loads(
    household: Household, config: TrainConfig, tmp_path: Path
) -> None:
    run_dirs = [tmp_path / "ring", tmp_path / "alone"]
    for run_dir, devices in zip(run_dirs, ("attic,desk,hall", "hall"), strict=True):
        done = household.run(
            "hall" if "," not in devices else "desk", "train", config.model, "--data", config.data,
            "--full", "--steps", str(STEPS), "--batch-size", "6", "--microbatch-size", "2",
            "--max-seq-length", "96", "--learning-rate", "1e-3", "--devices", devices,
            "--run-dir", str(run_dir), "--json",
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        begin = next(json.loads(line) for line in done.stdout.splitlines() if '"begin"' in line)
        assert begin["adapter"].startswith("all weights of all 5 layers, embedding and head: ")
        assert begin["trainable_share"] == 1
    assert losses(run_dirs[0]) == pytest.approx(losses(run_dirs[1]), rel=1e-5)
    assert len(metrics(run_dirs[0])[0]["ranks"]) == 3
    summary = json.loads((run_dirs[0] / "summary.json").read_text("utf-8"))
    assert (summary["model"], summary["adapters"]) == ("model", {})
    loss = plain_loss(run_dirs[0] / "model", run_dirs[0])
    assert loss == pytest.approx(summary["eval_loss_after"], rel=1e-4)
    assert loss < summary["eval_loss_before"] - 0.01
    tokenizer = transformers.AutoTokenizer.from_pretrained(run_dirs[0] / "model")
    assert tokenizer.chat_template
    report = household.run("desk", "eval", str(run_dirs[0]), "--json")
    assert report.returncode == 0, report.stderr
    measured = json.loads(report.stdout)
    assert measured["tuned"]["loss"] == pytest.approx(summary["eval_loss_after"], abs=1e-3)
    assert measured["base"]["loss"] == pytest.approx(summary["eval_loss_before"], abs=1e-3)
    answer = household.run("desk", "generate", str(run_dirs[0]), "--prompt", "hello", "--json")
    assert answer.returncode == 0, answer.stderr
    assert json.loads(answer.stdout)["adapter"] == str(run_dirs[0] / "model")
