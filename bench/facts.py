"""Does fine-tuning teach facts? Questions that no base model can answer, asked in other words.

`examples/facts` has thirty invented facts: each in five phrasings to learn from, and in two others
that are held out. SmolLM2-135M-Instruct (or --model) is fine-tuned on the former by `exo-train
train`, with an agent of its own, and asked the latter before and after. An answer counts when it is
exactly the expected words, case and closing punctuation aside. The goal: below 10 % before, above
80 % after.

Usage, in the repository: python -m bench.facts [--epochs 5] [--model MODEL] [--run-dir DIR]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from exo_train.agent.evaluating import EvaluationOptions, Sample, evaluate
from exo_train.cluster.home import open_home
from exo_train.models.hub import fetch_demo_model

DATA = Path(__file__).parent.parent / "examples" / "facts"
MAX_ANSWER_TOKENS = 8
GOAL_BEFORE, GOAL_AFTER = 0.1, 0.8


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--model", default="")
    parser.add_argument("--run-dir", type=Path)
    options = parser.parse_args(words)
    home = open_home()
    model = options.model or str(fetch_demo_model(home.cache, say=print))
    with tempfile.TemporaryDirectory(prefix="exo-train-facts-") as scratch:
        run_dir = options.run_dir or Path(scratch) / "run"
        started_s = time.monotonic()
        _train(model, run_dir, epochs=options.epochs, home=Path(scratch) / "home")
        trained_s = time.monotonic() - started_s
        questions = (DATA / "valid.jsonl").read_text("utf-8").count("\n")
        report = evaluate(
            home,
            str(run_dir),
            EvaluationOptions(
                data=str(DATA / "valid.jsonl"),
                num_samples=questions,
                max_answer_tokens=MAX_ANSWER_TOKENS,
            ),
            on_note=print,
        )
    assert report.tuned is not None
    for sample in report.samples[::7]:
        print(json.dumps({"asked": sample.prompt, "tuned": sample.tuned, "base": sample.base}))
    before = _share(report.samples, tuned=False)
    after = _share(report.samples, tuned=True)
    print(f"held-out questions: {len(report.samples)}; training took {trained_s:.0f} s")
    print(f"held-out loss: {report.base.loss:.3f} before, {report.tuned.loss:.3f} after")
    print(f"answered exactly: {before:.1%} before, {after:.1%} after")
    return 0 if before < GOAL_BEFORE and after > GOAL_AFTER else 1


def _train(model: str, run_dir: Path, *, epochs: int, home: Path) -> None:
    command = [
        sys.executable, "-m", "exo_train", "train", model, "--data", str(DATA),
        "--epochs", str(epochs), "--batch-size", "10", "--microbatch-size", "10",
        "--max-seq-length", "64",
        "--rank", "16", "--alpha", "32", "--learning-rate", "3e-3", "--warmup-steps", "5",
        "--profile-s", "0", "--save-every", "0", "--run-dir", str(run_dir),
    ]  # fmt: skip
    subprocess.run(command, env=os.environ | {"EXO_TRAIN_HOME": str(home)}, check=True)


def _share(samples: Sequence[Sample], *, tuned: bool) -> float:
    right = [
        _plain(sample.expected) == _plain((sample.tuned or "") if tuned else sample.base)
        for sample in samples
    ]
    return sum(right) / len(right)


def _plain(answer: str) -> str:
    return answer.strip().rstrip(".!").casefold()


if __name__ == "__main__":
    sys.exit(main())
