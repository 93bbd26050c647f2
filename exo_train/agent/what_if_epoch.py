"""How long an epoch of the user's data would take. Owns counting it without a model.

Rows are read and, where the model's tokenizer is on this device, encoded and cut into the steps
of the first epoch exactly as `train` does. Must not fetch anything.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from exo_train.agent.run_data import encode_data
from exo_train.config import TrainConfig
from exo_train.models.spec import ModelSpec
from exo_train.train.rows import read_data


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochFacts:
    """The training part of the data.

    `tokens` and `positions` (tokens and padding, which is computed too) are None where there is no
    tokenizer; `num_steps` then takes a row for a sequence. `full_positions` is what the predicted
    step computes in `num_steps`: every sequence of full length.
    """

    num_rows: int
    num_steps: int
    full_positions: int
    tokens: int | None
    positions: int | None
    notes: tuple[str, ...]

    def epoch_s(self, step_s: float) -> float | None:
        """Scale the predicted step by the positions that there are; None if not counted."""
        if self.positions is None:
            return None
        return self.num_steps * step_s * self.positions / self.full_positions


def count_epoch(config: TrainConfig, spec: ModelSpec, *, microbatch_size: int) -> EpochFacts:
    """Count rows, tokens and padded positions of one epoch of `config.data`."""
    files = read_data(config.data)
    num_rows = len(files.train.rows)
    place = _tokenizer_place(config.model)
    if place is None:
        num_steps = -(-num_rows // config.batch_size)
        return EpochFacts(
            num_rows=num_rows,
            num_steps=num_steps,
            full_positions=num_steps * config.batch_size * config.max_seq_length,
            tokens=None,
            positions=None,
            notes=(
                *files.notes,
                f"tokens are not counted: no tokenizer of '{config.model}' is on this device (put "
                f"its tokenizer.json beside config.json); an epoch takes the predicted step times "
                f"{num_steps} at most",
            ),
        )
    notes: list[str] = []
    data = encode_data(files, config, model_path=place, spec=spec, on_note=notes.append)
    num_steps = data.batches.steps_per_epoch
    steps = [data.batches.batch_for_step(step) for step in range(num_steps)]
    tokens = sum(step.num_tokens for step in steps)
    padding = sum(
        step.num_padded_tokens(
            microbatch_size=microbatch_size, max_seq_length=config.max_seq_length
        )
        for step in steps
    )
    return EpochFacts(
        num_rows=num_rows,
        num_steps=num_steps,
        full_positions=num_steps * config.batch_size * config.max_seq_length,
        tokens=tokens,
        positions=tokens + padding,
        notes=tuple(notes),
    )


def _tokenizer_place(model: str) -> Path | None:
    """Give what `load_tokenizer` can read of a local model; None for a hub id or a bare config."""
    path = Path(model).expanduser()
    if path.suffix.lower() == ".gguf" and path.is_file():
        return path
    folder = path.parent if path.is_file() else path
    return folder if (folder / "tokenizer.json").is_file() else None
