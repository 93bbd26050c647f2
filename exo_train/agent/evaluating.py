"""A run against its base on a data set: loss, perplexity, answers side by side, on this device.

Owns which rows are measured and what is reported. The loss is the one that training measures
itself by: the same masks, weighted by tokens; of preference pairs the run's own objective.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from exo_train.agent.generation import Generator
from exo_train.agent.run_data import encode_data, rows_of_run
from exo_train.agent.run_template import with_kept_template
from exo_train.cluster.home import Home
from exo_train.config import TrainConfig
from exo_train.errors import ConfigError, NumericsError
from exo_train.models.hub import resolve_model
from exo_train.models.open import open_model
from exo_train.train.evaluation import loss_on_one_device
from exo_train.train.examples import Example
from exo_train.train.kept_rows import read_rows
from exo_train.train.metrics import PairMetrics, finite_or_none
from exo_train.train.rundir import CONFIG_FILE, RunDir

SCHEMA = 1
MICROBATCH_SIZE = 4
# Options that would set rows aside or join them; each row counts once, by itself.
_AS_THEY_ARE: dict[str, Any] = {
    "val_rows": 0,
    "val_split": 0.0,
    "packing": False,
    "group_by_length": False,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """`loss` in nats a supervised token, or of preference `pairs` a mean over these."""

    loss: float
    pairs: PairMetrics | None = None

    def to_dict(self) -> dict[str, Any]:
        """Give plain values; a perplexity too large for a number becomes null.

        Pairs have their own numbers in place of one.
        """
        if self.pairs is not None:
            return finite_or_none({"loss": self.loss, **self.pairs.to_dict()})
        return finite_or_none({"loss": self.loss, "perplexity": self.perplexity})

    @property
    def perplexity(self) -> float:
        """e to the loss (Jurafsky & Martin, Speech and Language Processing, section 3.3)."""
        return math.exp(self.loss) if self.loss < 700 else math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """`expected` is what the row says; the answers are greedy."""

    prompt: str
    expected: str
    base: str
    tuned: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """What was measured; `tuned` is None where there is no adapter."""

    model: str
    adapter: str | None
    data: str
    rows: int
    tokens: int
    supervised_tokens: int
    max_seq_length: int
    base: Measured
    tuned: Measured | None
    samples: tuple[Sample, ...]

    def to_dict(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "model": self.model,
            "adapter": self.adapter,
            "data": self.data,
            "rows": self.rows,
            "tokens": self.tokens,
            "supervised_tokens": self.supervised_tokens,
            "max_seq_length": self.max_seq_length,
            "base": self.base.to_dict(),
            "tuned": self.tuned.to_dict() if self.tuned else None,
            "samples": [
                {"prompt": s.prompt, "expected": s.expected, "base": s.base, "tuned": s.tuned}
                for s in self.samples
            ],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationOptions:
    """`data` empty: the rows that the run held out; `max_seq_length` 0: the run's."""

    data: str = ""
    max_seq_length: int = 0
    num_samples: int = 0
    max_answer_tokens: int = 60
    backend: str = "auto"


def evaluate(
    home: Home,
    run_or_model: str,
    options: EvaluationOptions,
    *,
    on_note: Callable[[str], None] = lambda note: None,
) -> Evaluation:
    """Measure the base, and the run's adapter on it; raises an ExoTrainError."""
    run = Path(run_or_model).expanduser()
    is_run = (run / CONFIG_FILE).is_file()
    config = _config(run if is_run else None, options)
    path = resolve_model(config.model if is_run else run_or_model, cache_dir=home.cache)
    spec, _ = open_model(path)
    if options.data:  # before any weight is read
        spec.validate_max_seq_length(config.max_seq_length)
        encoded = encode_data(
            rows_of_run(config), config, model_path=path, spec=spec, on_note=on_note
        )
        data, examples = options.data, encoded.held_out or encoded.batches.examples
    elif is_run:
        data, examples = "the run's held-out rows", _kept(run, spec.vocab_size)
    else:
        raise ConfigError("--data is missing: a model alone has held no rows out")
    model = Generator(home, run_or_model, backend=options.backend)
    num_rows = len(examples) // config.learnt.answers_per_row
    on_note(f"measuring {num_rows} rows on {model.device}")
    has_adapter = model.adapter_path is not None
    model.use_adapter(False)
    base = _measured(model, examples, config)
    # Of pairs the chosen answers are what is expected.
    prompts = _prompts(examples[:: config.learnt.answers_per_row], options.num_samples)
    base_answers = [_answer(model, prompt, options) for prompt, _ in prompts]
    tuned = None
    tuned_answers: list[str | None] = [None] * len(prompts)
    if has_adapter:
        model.use_adapter(True)
        tuned = _measured(model, examples, config)
        tuned_answers = [_answer(model, prompt, options) for prompt, _ in prompts]
    return Evaluation(
        model=str(path),
        adapter=model.adapter_path,
        data=data,
        rows=num_rows,
        tokens=sum(len(example.tokens) for example in examples),
        supervised_tokens=sum(example.num_supervised_tokens for example in examples),
        max_seq_length=config.max_seq_length,
        base=base,
        tuned=tuned,
        samples=tuple(
            Sample(
                prompt=model.decode(prompt),
                expected=model.decode(expected).strip(),
                base=before,
                tuned=after,
            )
            for (prompt, expected), before, after in zip(
                prompts, base_answers, tuned_answers, strict=True
            )
        ),
    )


def _config(run: Path | None, options: EvaluationOptions) -> TrainConfig:
    """Give the run's options, as far as they say how a row is read; a model's are the defaults."""
    config = TrainConfig()
    if run is not None:
        stored = RunDir.open(run).read_config()
        config = TrainConfig.from_stored(stored, source=f"{run}/{CONFIG_FILE}")
        config = with_kept_template(config, run)
        if options.max_seq_length and not options.data:
            raise ConfigError("--max-seq-length is for --data: the run's own rows are cut already")
    length = options.max_seq_length or config.max_seq_length
    return replace(config, data=options.data, max_seq_length=length, **_AS_THEY_ARE)


def _kept(run: Path, vocab_size: int) -> tuple[Example, ...]:
    _, held_out = read_rows(run, vocab_size=vocab_size)
    if not held_out:
        raise ConfigError(f"{run} held no rows out; name some with --data")
    return held_out


def _measured(model: Generator, examples: Sequence[Example], config: TrainConfig) -> Measured:
    found = loss_on_one_device(
        model.stage,
        examples,
        microbatch_size=MICROBATCH_SIZE,
        max_seq_length=config.max_seq_length,
        objective=config.learnt,
    )
    if not math.isfinite(found.loss):
        raise NumericsError(
            f"the loss is {found.loss}: the files of the model or of the adapter are damaged, or "
            f"the device cannot hold their numbers; try --backend torch or another device"
        )
    return Measured(loss=found.loss, pairs=found.pairs)


def _prompts(
    examples: Sequence[Example], num_samples: int
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Part the first rows into what comes before their last answer, and that answer.

    Rows that are learnt whole have nothing to be asked.
    """
    parted: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    for example in examples:
        if len(parted) == num_samples:
            break
        end = max(at for at, wanted in enumerate(example.supervised) if wanted) + 1
        start = end
        while example.supervised[start - 1]:
            start -= 1
        if start > 1:
            parted.append((example.tokens[:start], example.tokens[start:end]))
    return parted


def _answer(model: Generator, prompt: Sequence[int], options: EvaluationOptions) -> str:
    return "".join(model.continuation(prompt, max_tokens=options.max_answer_tokens)).strip()
