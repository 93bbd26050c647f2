"""When nothing fits: what would. Owns the list of changes that are tried, and the sentence.

Pure. Must not look at speed: a change that fits may be slow. Every verdict is a reckoning of
memory over all orders of devices (`shortfall`); single changes come in a fixed order, the cheapest
for the user first, then the two cheapest together, then all of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from exo_train.config import TrainConfig
from exo_train.plan.device_memory import Processor
from exo_train.plan.memory import ModelShape
from exo_train.plan.partition import gigabytes
from exo_train.plan.profiles import StageCosts, Workload
from exo_train.plan.shortfall import MAX_DEVICES, Shortfall, lacking
from exo_train.plan.workloads import run_stage_costs, run_workload

MIN_SEQ_LENGTH = 128
MIN_RANK = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """A run on devices that are known by memory alone, `usable_bytes` by name.

    `process_bytes` are what each stage's process takes before it holds a model, where that is not
    in the devices' reserve.
    """

    config: TrainConfig
    usable_bytes: tuple[tuple[str, int], ...]
    microbatch_size: int
    value_bytes: int
    process_bytes: int = 0
    processors: tuple[Processor, ...] = ()  # in the order of `usable_bytes`, where they are known

    def workload(self, shape: ModelShape) -> Workload:
        return run_workload(
            shape,
            self.config,
            microbatch_size=self.microbatch_size,
            value_bytes=self.value_bytes,
            process_bytes=self.process_bytes,
        )

    def shortfall(self, shape: ModelShape) -> Shortfall:
        """Reckon with the largest devices, where there are too many for all."""
        memory = [usable for _, usable in self.usable_bytes]
        largest = sorted(range(len(memory)), key=lambda index: -memory[index])[:MAX_DEVICES]
        costs = None
        if self.processors:
            by_processor = {p: self._costs(shape, p) for p in set(self.processors)}
            costs = [by_processor[self.processors[index]] for index in largest]
        return Shortfall([memory[index] for index in largest], self.workload(shape), costs=costs)

    def _costs(self, shape: ModelShape, processor: Processor) -> StageCosts:
        value_bytes = min(self.value_bytes, processor.value_bytes or self.value_bytes)
        return run_stage_costs(
            shape,
            self.config,
            processor,
            microbatch_size=self.microbatch_size,
            sequence=self.config.max_seq_length,
            value_bytes=value_bytes,
            wire_bytes=self.value_bytes,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Suggestion:
    """A change and what it does: `num_devices` hold the model (at least), or `missing_bytes`."""

    change: str
    num_devices: int | None
    missing_bytes: int

    @property
    def fits(self) -> bool:
        return self.num_devices is not None

    def __str__(self) -> str:
        if self.num_devices is None:
            return f"{self.change} → still no, {gigabytes(self.missing_bytes)} missing"
        plural = "" if self.num_devices == 1 else "s"
        return f"{self.change} fits on {self.num_devices} device{plural}"


def refusal(attempt: Attempt, shape: ModelShape, *, said: str = "") -> str:
    """Say what is missing, and what would fit; `said` is the planner's own word on the first."""
    usable = [(name, memory) for name, memory in attempt.usable_bytes if memory > 0]
    if not usable:
        return "no device has memory for anything; give one more with --memory, or add a device"
    if not said:
        missing_bytes = attempt.shortfall(shape).missing_bytes()
        said = f"does not fit: {lacking(missing_bytes, usable)}"
    return "; ".join([said, *map(str, suggest(attempt, shape))])


def suggest(attempt: Attempt, shape: ModelShape) -> list[Suggestion]:
    """Try single changes in their order, then the two cheapest together if neither fits alone."""
    found = []
    unhelpful = []  # attempts that training can do, that do not fit alone
    for change in (_checkpointing, _single_sequences, _shorter, _smaller_rank, _half_precision):
        tried = _first_fit(change(attempt), shape)
        if tried is not None:
            found.append(tried)
            if not tried.fits:
                unhelpful.append(change)
    if len(unhelpful) == len(found):
        found += _together(attempt, shape, unhelpful)
    four_bit = _packed if shape.layer_weights.is_packed else _four_bit
    for change in (four_bit, _one_more_device):
        tried = _first_fit(change(attempt), shape)
        found += [tried] if tried else []
    return found


Trials = Iterator[tuple[str, Attempt]]
Change = Callable[[Attempt], Trials]


def _first_fit(trials: Trials, shape: ModelShape) -> Suggestion | None:
    """Judge trials from small to large until one fits; None where there is none to try."""
    last = None
    for change, attempt in trials:
        shortfall = attempt.shortfall(shape)
        num_devices = shortfall.fewest_devices()
        last = (change, attempt, shortfall)
        if num_devices is not None:
            return Suggestion(change=change, num_devices=num_devices, missing_bytes=0)
    if last is None:
        return None
    change, attempt, shortfall = last
    return Suggestion(change=change, num_devices=None, missing_bytes=shortfall.missing_bytes())


def _together(
    attempt: Attempt, shape: ModelShape, changes: Sequence[Change]
) -> Iterator[Suggestion]:
    """Judge the two cheapest changes together, and all of them where that is not enough."""
    if len(changes) < 2:
        return
    for count in sorted({2, len(changes)}):
        names, changed = [], attempt
        for change in changes[: count - 1]:
            *_, (name, changed) = change(changed)
            names.append(name)
        begin = ", ".join(names)
        trials = ((f"{begin} and {last}", both) for last, both in changes[count - 1](changed))
        found = _first_fit(trials, shape)
        if found is not None:
            yield found
            if found.fits:
                return


def _with(attempt: Attempt, **changes: object) -> Attempt:
    config = TrainConfig.from_mapping(attempt.config.to_dict() | changes, source="suggestion")
    return dataclasses.replace(attempt, config=config)


def _checkpointing(attempt: Attempt) -> Trials:
    if not attempt.config.checkpoint_activations:
        yield "--checkpoint-activations", _with(attempt, checkpoint_activations=True)


def _single_sequences(attempt: Attempt) -> Trials:
    if attempt.microbatch_size > 1:
        yield "--microbatch-size 1", dataclasses.replace(attempt, microbatch_size=1)


def _shorter(attempt: Attempt) -> Trials:
    length = attempt.config.max_seq_length // 2
    while length >= MIN_SEQ_LENGTH:
        yield f"--max-seq-length {length}", _with(attempt, max_seq_length=length)
        length //= 2


def _smaller_rank(attempt: Attempt) -> Trials:
    if attempt.config.full:
        yield _adapter(attempt)
        return
    rank = attempt.config.rank // 2
    while rank >= MIN_RANK:
        yield f"--rank {rank}", _with(attempt, rank=rank)
        rank //= 2


def _adapter(attempt: Attempt) -> tuple[str, Attempt]:
    """Give the run with an adapter; Muon has no rule for one, and no other rule its options."""
    if attempt.config.optimizer != "muon":
        return "an adapter instead of --full", _with(attempt, full=False)
    muons = ("optimizer", "muon_momentum", "muon_rate")
    usual = {each.name: each.default for each in dataclasses.fields(TrainConfig)}
    config = {name: usual[name] for name in muons}
    return "an adapter with adamw instead of --full", _with(attempt, full=False, **config)


def _half_precision(attempt: Attempt) -> Trials:
    if attempt.value_bytes > 2:
        yield (
            "--dtype bf16",
            dataclasses.replace(attempt, value_bytes=2),
        )


def _four_bit(attempt: Attempt) -> Trials:
    if attempt.config.full:
        return
    if attempt.config.quantize != 4 or attempt.config.base_weights == "dense":
        yield "--quantize 4", _with(attempt, quantize=4, base_weights="packed")


def _packed(attempt: Attempt) -> Trials:
    if attempt.config.base_weights == "dense":
        yield "--base-weights packed", _with(attempt, base_weights="packed")


def _one_more_device(attempt: Attempt) -> Trials:
    name, memory = max(attempt.usable_bytes, key=lambda pair: (pair[1], pair[0]))
    if len(attempt.usable_bytes) < MAX_DEVICES:
        more = (*attempt.usable_bytes, ("one more", memory))
        place = attempt.usable_bytes.index((name, memory))
        processors = (*attempt.processors, *attempt.processors[place : place + 1])
        yield (
            f"one more device like {name} ({gigabytes(memory)})",
            dataclasses.replace(attempt, usable_bytes=more, processors=processors),
        )
