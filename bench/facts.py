"""Does fine-tuning teach facts? Questions that no base model can answer, asked in other words.

`examples/facts` has thirty invented facts: each in five phrasings to learn from, and in two others
that are held out. SmolLM2-135M-Instruct (or --model) is fine-tuned on the former by `exo-train
train`, with an agent of its own, and asked the latter before and after. An answer counts when it is
exactly the expected words, case and closing punctuation aside. The goal: below 10 % before, above
80 % after.

With --quantize 4 or 8 the same is done again on the same base packed in so many bits, and both are
printed. The base's numbers are first written in 16 bits: the demo's are quantised already.

Usage, in the repository: python -m bench.facts [--epochs 5] [--model MODEL] [--quantize 4]
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
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from exo_train.agent.evaluating import Evaluation, EvaluationOptions, Sample, evaluate
from exo_train.cluster.home import Home, open_home
from exo_train.models.decode import decode
from exo_train.models.hub import fetch_demo_model
from exo_train.models.open import open_model
from exo_train.models.tokenizer import load_tokenizer

DATA = Path(__file__).parent.parent / "examples" / "facts"
MAX_ANSWER_TOKENS = 8
GOAL_BEFORE, GOAL_AFTER = 0.1, 0.8


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    report: Evaluation
    trained_s: float

    @property
    def before(self) -> float:
        return _share(self.report.samples, tuned=False)

    @property
    def after(self) -> float:
        return _share(self.report.samples, tuned=True)

    @property
    def is_good(self) -> bool:
        return self.before < GOAL_BEFORE and self.after > GOAL_AFTER


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--model", default="")
    parser.add_argument("--quantize", type=int, default=0, choices=(0, 4, 8))
    options = parser.parse_args(words)
    home = open_home()
    model = Path(options.model or fetch_demo_model(home.cache, say=print))
    with tempfile.TemporaryDirectory(prefix="exo-train-facts-") as folder:
        scratch = Path(folder)
        if options.quantize:
            model = in_16_bits(model, scratch / "model")
        results = [
            _learnt(home, model, scratch, epochs=options.epochs, quantize=quantize)
            for quantize in dict.fromkeys((0, options.quantize))
        ]
    return 0 if all(result.is_good for result in results) else 1


def in_16_bits(model: Path, folder: Path) -> Path:
    """Write what a model's files say in fp16, as a Hugging Face directory with its tokenizer."""
    spec, source = open_model(model)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(spec.explicit_config()), "utf-8")
    tensors = {
        name: decode(source.infos[name], source.read(name)).to_numpy().astype(np.float16)
        for name in spec.all_tensor_shapes()
    }
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    load_tokenizer(model).save_pretrained(folder)
    return folder


def _learnt(home: Home, model: Path, scratch: Path, *, epochs: int, quantize: int) -> Result:
    """Train, ask, and print what came of it."""
    run_dir = scratch / f"run-{quantize}"
    started_s = time.monotonic()
    _train(str(model), run_dir, epochs=epochs, home=scratch / "home", quantize=quantize)
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
    result = Result(report=report, trained_s=trained_s)
    base = f"base in {quantize} bits" if quantize else "base as it is"
    print(f"{base}: {len(report.samples)} held-out questions; training took {trained_s:.0f} s")
    print(f"held-out loss: {report.base.loss:.3f} before, {report.tuned.loss:.3f} after")
    print(f"answered exactly: {result.before:.1%} before, {result.after:.1%} after", flush=True)
    return result


def _train(model: str, run_dir: Path, *, epochs: int, home: Path, quantize: int) -> None:
    command = [
        sys.executable, "-m", "exo_train", "train", model, "--data", str(DATA),
        "--epochs", str(epochs), "--batch-size", "10", "--microbatch-size", "10",
        "--max-seq-length", "64",
        "--rank", "16", "--alpha", "32", "--learning-rate", "3e-3", "--warmup-steps", "5",
        "--profile-s", "0", "--save-every", "0", "--run-dir", str(run_dir),
        "--quantize", str(quantize),
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
