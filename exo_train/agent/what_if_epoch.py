"""How long an epoch of the user's data would take. Owns counting it without a model.

Rows are read and, where the model's tokenizer is on this device, encoded and cut into the steps
of the first epoch exactly as `train` does. Must not fetch anything.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from exo_train.agent.run_data import encode_data, parted_rows, rows_of_run
from exo_train.config import TrainConfig
from exo_train.models.hub import kept_snapshot
from exo_train.models.spec import ModelSpec
from exo_train.train.batches import BatchPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochFacts:
    """The training part of the data.

    `tokens` and `positions` (tokens and padding, which is computed too) are None where there is no
    tokenizer; `num_steps` then takes a row for a sequence.
    """

    num_rows: int
    num_steps: int
    tokens: int | None
    positions: int | None
    notes: tuple[str, ...]

    @property
    def token_share(self) -> float:
        """Give the share of the positions that are tokens; 1 if not counted."""
        return self.tokens / self.positions if self.tokens and self.positions else 1.0

    def epoch_s(self, step_s: float, *, step_positions: int) -> float | None:
        """Scale a step of `step_positions` to all positions that there are; None if not counted."""
        if self.positions is None:
            return None
        return step_s * self.positions / step_positions


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochData:
    """Rows that were read; `batches` is None where there is no tokenizer."""

    config: TrainConfig
    num_rows: int
    batches: BatchPlan | None
    notes: tuple[str, ...]

    def count(self, *, microbatch_size: int) -> EpochFacts:
        """Count tokens and padded positions of one epoch."""
        if self.batches is None:
            return EpochFacts(
                num_rows=self.num_rows,
                num_steps=-(-self.num_rows // self.config.batch_size),
                tokens=None,
                positions=None,
                notes=self.notes,
            )
        num_steps = self.batches.steps_per_epoch
        steps = [self.batches.batch_for_step(step) for step in range(num_steps)]
        tokens = sum(step.num_tokens for step in steps)
        positions = sum(
            step.num_positions(
                microbatch_size=microbatch_size, max_seq_length=self.config.max_seq_length
            )
            for step in steps
        )
        return EpochFacts(
            num_rows=self.num_rows,
            num_steps=num_steps,
            tokens=tokens,
            positions=positions,
            notes=self.notes,
        )


def read_epoch(config: TrainConfig, spec: ModelSpec, *, cache_dir: Path) -> EpochData:
    """Read the rows of `config.data`, and encode them where the tokenizer is here."""
    files = rows_of_run(config)
    num_rows = len(parted_rows(files, config)[0])
    place = _tokenizer_place(config.model, cache_dir)
    if place is None:
        num_steps = -(-num_rows // config.batch_size)
        note = (
            f"tokens are not counted: no tokenizer of '{config.model}' is on this device (put "
            f"its tokenizer.json beside config.json); an epoch takes the predicted step times "
            f"{num_steps} at most"
        )
        return EpochData(config=config, num_rows=num_rows, batches=None, notes=(*files.notes, note))
    notes: list[str] = []
    data = encode_data(files, config, model_path=place, spec=spec, on_note=notes.append)
    return EpochData(config=config, num_rows=num_rows, batches=data.batches, notes=tuple(notes))


def _tokenizer_place(model: str, cache_dir: Path) -> Path | None:
    """Give what `load_tokenizer` can read: a local model's, or that of a downloaded hub model."""
    path = Path(model).expanduser()
    if not path.exists():
        folder = kept_snapshot(model, cache_dir)
    elif path.suffix.lower() == ".gguf" and path.is_file():
        return path
    else:
        folder = path.parent if path.is_file() else path
    return folder if folder and (folder / "tokenizer.json").is_file() else None
