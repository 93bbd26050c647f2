"""The lines above a run's first step. Owns their words; must not compute what they say."""

from __future__ import annotations

from exo_train.train.beginning import Beginning, RateCurve


def header_lines(begin: Beginning) -> tuple[str, ...]:
    """Say what is trained, on what, how long and how fast."""
    held_out = f", {begin.held_out_rows} held out" if begin.held_out_rows else ", none held out"
    rows = "rows" if begin.objective == "sft" else "pairs"
    learnt = "" if begin.objective == "sft" else f" by {begin.objective}"
    resumed = f", {begin.steps_done} of them done" if begin.steps_done else ""
    return (
        f"model: {begin.model} ({begin.architecture}, {begin.num_layers} layers, "
        f"{begin.parameters:,} parameters)",
        f"data: {begin.data or 'the rows that the run keeps'}: {begin.rows} {rows} to train on"
        f"{held_out}; {begin.tokens:,} tokens an epoch, {begin.supervised_share:.0%} of them "
        f"supervised; at most {begin.max_seq_length} a "
        f"{'row' if begin.objective == 'sft' else 'sequence'}",
        f"trained: {begin.adapter}{learnt}",
        f"updates: {begin.steps}{resumed}, of {begin.batch_size} "
        f"{'packed sequences' if begin.packing else rows}; {begin.epochs:.3g} epochs "
        f"of {begin.steps_per_epoch}; {_rate_words(begin.lr_schedule, begin.learning_rate)}",
        f"run directory: {begin.run_dir}",
    )


def _rate_words(schedule: str, rate: RateCurve) -> str:
    warm_up = f"{rate.first:.3g} rising to " if rate.peak_update > 1 else ""
    return (
        f"learning rate {warm_up}{rate.peak:.3g} at update {rate.peak_update}, "
        f"{schedule} to {rate.last:.3g} at the last"
    )
