"""A plan for the members that are here: measured speed, measured links, memory now.

Owns the questions that a plan asks of the household, and their order: a layer's time on every
device at once, the missing links meanwhile, and again for the microbatches that were chosen.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from exo_train.agent.deciding import Decision, decide, decide_for_size, given_size
from exo_train.agent.live_household import (
    ask_profiles,
    device_profile,
    links_of,
    request_for,
)
from exo_train.agent.planning import (
    DTYPE_BYTES,
    Candidate,
    compute_dtype,
    model_shape,
    wire_dtype,
    with_weights_held,
)
from exo_train.config import TrainConfig
from exo_train.errors import DoesNotFitError, ExoTrainError, InterruptedRunError, PeerError
from exo_train.lora_config import in_every_layer
from exo_train.models.spec import ModelSpec
from exo_train.peer import NodeId
from exo_train.plan.block_times import BlockTimes
from exo_train.plan.device_memory import Measured, Processor, counts_process
from exo_train.plan.exact import ExactPlan
from exo_train.plan.memory import ModelShape
from exo_train.plan.plan import Key
from exo_train.plan.prediction import Prediction, predict
from exo_train.plan.profiles import (
    DeviceProfile,
    Household,
    LinkProfile,
    Workload,
    links_among,
)
from exo_train.plan.suggestions import Attempt, refusal
from exo_train.plan.workloads import run_stage_costs, run_workload
from exo_train.train.step_shapes import StepShapes
from exo_train.transport.tls import PeerTls

# A device's time grows with the positions; measuring at few different lengths finds more in the
# cache.
MEASURED_MULTIPLE = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Asking:
    """How members are asked: over which connections, and what the user sees of it."""

    status: Callable[[], dict[str, Any]]
    tls_to: Callable[[NodeId], PeerTls]
    on_note: Callable[[str], None]
    wants_stop: Callable[[], bool] = lambda: False
    best_host: Callable[[NodeId], str] = lambda node_id: ""  # dialled first
    fresh: bool = False  # measure, whatever was measured before


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveProblem:
    """Implements Problem: `times` are of microbatches of `size` rows of the data.

    A row is a sequence of `width` positions, of pairs two of them.
    """

    spec: ModelSpec
    config: TrainConfig
    steps: StepShapes
    candidates: tuple[Candidate, ...]
    times: tuple[BlockTimes, ...]
    links: Mapping[tuple[int, int], LinkProfile]
    size: int
    width: int

    @property
    def shape(self) -> ModelShape:
        return model_shape(self.spec)

    @property
    def dtypes(self) -> list[str]:
        return [compute_dtype(c, self.config.dtype) for c in self.candidates]

    @property
    def wire_bytes(self) -> int:
        return DTYPE_BYTES[wire_dtype(self.dtypes, self.config.wire_dtype)]

    def sized(self, microbatch_size: int) -> tuple[Household, Workload]:
        """Scale what was measured to microbatches of another size."""
        step = self.steps(microbatch_size)
        devices = [
            self._device(candidate, dtype, times, microbatch_size, step.longest)
            for candidate, dtype, times in zip(
                self.candidates, self.dtypes, self.times, strict=True
            )
        ]
        learnt = self.config.learnt
        measured = learnt.answers_per_row * self.size * self.width
        household = Household(devices=tuple(devices), links=dict(self.links))
        workload = run_workload(
            self.shape,
            replace(self.config, max_seq_length=step.longest, batch_size=step.num_sequences),
            microbatch_size=microbatch_size,
            value_bytes=self.wire_bytes,
        )
        boundary_values = microbatch_size * step.mean_width * self.shape.hidden_size
        return (
            household.with_times(learnt.time_factor * microbatch_size * step.mean_width / measured),
            replace(workload, boundary_bytes=round(boundary_values * self.wire_bytes)),
        )

    def _device(
        self,
        candidate: Candidate,
        dtype: str,
        times: BlockTimes,
        microbatch_size: int,
        longest: int,
    ) -> DeviceProfile:
        """The longest row decides memory."""
        measured = None
        if times.memory is not None:
            sequences = self.config.learnt.answers_per_row * self.size
            measured = Measured(memory=times.memory, size=sequences, sequence=self.width)
        costs = run_stage_costs(
            self.shape,
            with_weights_held(candidate, self.config, self.spec),
            _processor(candidate, times, dtype),
            microbatch_size=microbatch_size,
            sequence=longest,
            value_bytes=DTYPE_BYTES[dtype],
            wire_bytes=self.wire_bytes,
            measured=measured,
        )
        return device_profile(candidate, times, costs)

    def of(self, devices: Sequence[int]) -> LiveProblem:
        """Give the problem of these candidates only, renumbered in their order."""
        return replace(
            self,
            candidates=tuple(self.candidates[index] for index in devices),
            times=tuple(self.times[index] for index in devices),
            links=links_among(self.links, devices),
        )

    def among(self, candidates: Sequence[Candidate]) -> LiveProblem:
        """Give the problem of those of `candidates` that were measured, with what they have now.

        A processor that is another one than it was then, or computes in other formats, was not.
        """
        place = {(c.key, c.backend, c.dtypes): index for index, c in enumerate(self.candidates)}
        known = [c for c in candidates if (c.key, c.backend, c.dtypes) in place]
        part = self.of([place[c.key, c.backend, c.dtypes] for c in known])
        return replace(part, candidates=tuple(known))

    def refusal(self, said: str) -> str:
        """Say what is missing with the microbatches that need least memory, and what would fit."""
        size = given_size(self.config) or 1
        value_bytes = max(DTYPE_BYTES[dtype] for dtype in self.dtypes)
        attempt = Attempt(
            config=replace(self.config, max_seq_length=self.steps(size).longest),
            usable_bytes=tuple((c.name, c.usable_memory_bytes) for c in self.candidates),
            microbatch_size=size,
            value_bytes=value_bytes,
            processors=tuple(map(_processor, self.candidates, self.times, self.dtypes)),
        )
        return refusal(attempt, self.shape, said=said)

    def predict(self, plan: ExactPlan, microbatch_size: int) -> Prediction:
        """Promise what the run's own reports will be held against."""
        household, workload = self.sized(microbatch_size)
        used = [self.candidates[stage.device] for stage in plan.stages]
        return predict(
            plan,
            household,
            workload,
            positions=self.steps(microbatch_size).positions,
            counts_process=[counts_process(c.backend, c.device) for c in used],
        )


def _processor(candidate: Candidate, times: BlockTimes, dtype: str) -> Processor:
    return Processor(
        backend=candidate.backend,
        device=candidate.device,
        process_bytes=times.process_bytes,
        value_bytes=DTYPE_BYTES[dtype],
    )


def decide_live(
    spec: ModelSpec,
    config: TrainConfig,
    steps: StepShapes,
    candidates: Sequence[Candidate],
    asking: Asking,
    *,
    at_least: int,
) -> tuple[LiveProblem, Decision]:
    """Measure what is not known yet, and decide.

    Raises DoesNotFitError with what would fit, PeerError where links are missing, and what a
    device said that had to take part, or where none could be measured.
    """
    size = given_size(config)
    problem = measure(spec, config, steps, candidates, asking, size=size or 1, at_least=at_least)
    decision = decide(problem, at_least=at_least)
    if decision.microbatch_size != problem.size:
        problem, decision = _measured_again(problem, decision, asking, at_least)
    problem, decision = as_sent(problem, decision, at_least)
    _check_number(problem, decision, at_least)
    return problem, decision


def _measured_again(
    problem: LiveProblem, decision: Decision, asking: Asking, at_least: int
) -> tuple[LiveProblem, Decision]:
    """Measure the size that was chosen: larger microbatches make better use of a GPU.

    Where it turns out to need more memory than was reckoned, the size that was measured first is
    kept.
    """
    size = decision.microbatch_size
    try:
        again = measure(
            problem.spec,
            problem.config,
            problem.steps,
            problem.candidates,
            asking,
            size=size,
            at_least=len(problem.candidates),
            links=problem.links,
        )
        return again, decide_for_size(again, size, sizes=decision.sizes, at_least=at_least)
    except InterruptedRunError:
        raise
    except ExoTrainError as error:
        asking.on_note(f"microbatches of {problem.size} in place of {size}: {error}")
    sizes = decision.sizes
    return problem, decide_for_size(problem, problem.size, sizes=sizes, at_least=at_least)


def as_sent(
    problem: LiveProblem, decision: Decision, at_least: int
) -> tuple[LiveProblem, Decision]:
    """Decide once more where the devices that are used send another format than all would."""
    used = sorted(decision.verdict.plan.devices)
    part = problem.of(used)
    if part.wire_bytes == problem.wire_bytes:
        return problem, decision
    try:
        found = decide_for_size(
            part, decision.microbatch_size, sizes=decision.sizes, at_least=at_least
        )
    except DoesNotFitError as error:
        raise DoesNotFitError(part.refusal(str(error))) from None
    return part, found


def _check_number(problem: LiveProblem, decision: Decision, at_least: int) -> None:
    """A wish for devices gives way to layers and memory, and to nothing else."""
    count = len(problem.candidates)
    num_used = len(decision.verdict.plan.devices)
    all_linked = len(problem.links) == count * (count - 1)
    if num_used < min(at_least, problem.spec.num_layers) and not all_linked:
        raise PeerError(
            f"{at_least} devices were asked for, but the links between them are not all measured; "
            f"`exo-train doctor` says why"
        )


def measure(
    spec: ModelSpec,
    config: TrainConfig,
    steps: StepShapes,
    candidates: Sequence[Candidate],
    asking: Asking,
    *,
    size: int,
    at_least: int = 1,
    links: Mapping[tuple[int, int], LinkProfile] | None = None,
) -> LiveProblem:
    """Ask every candidate for a layer's time; who cannot say is left out, with a note.

    Raises what was said where fewer than `at_least` are left. `links` are those of just these
    candidates, if they are not to be asked for.
    """
    sequences = config.learnt.answers_per_row * size
    width = measured_width(size * steps(size).mean_width / sequences, config.max_seq_length)
    requests = {
        candidate.key: request_for(
            candidate,
            spec.config_json,
            with_weights_held(candidate, config, spec),
            lora=in_every_layer(config.lora, spec.num_layers),
            compute_dtype=compute_dtype(candidate, config.dtype),
            microbatch_size=sequences,
            sequence=width,
            budget_s=config.profile_s,
        )
        for candidate in candidates
    }
    answers = ask_profiles(
        candidates,
        requests,
        asking.tls_to,
        fresh=asking.fresh,
        on_note=asking.on_note,
        wants_stop=asking.wants_stop,
        best_host=asking.best_host,
    )
    measured = _only_measured(candidates, answers, asking.on_note, at_least)
    if links is None:
        links = links_of(
            asking.status, measured, on_note=asking.on_note, wants_stop=asking.wants_stop
        )
    return LiveProblem(
        spec=spec,
        config=config,
        steps=steps,
        candidates=tuple(measured),
        times=tuple(times for c in measured if isinstance(times := answers[c.key], BlockTimes)),
        links=links,
        size=size,
        width=width,
    )


def with_more(problem: LiveProblem, more: Sequence[Candidate], asking: Asking) -> LiveProblem:
    """Measure `more` devices as those of `problem` were; who cannot say is left out, with a note.

    What is known already is not asked again: neither devices, nor the links between them.
    """
    added = measure(
        problem.spec,
        problem.config,
        problem.steps,
        more,
        asking,
        size=problem.size,
        at_least=0,
        links={},
    )
    if not added.candidates:
        return problem
    candidates = (*problem.candidates, *added.candidates)
    links = links_of(
        asking.status, candidates, on_note=asking.on_note, wants_stop=asking.wants_stop
    )
    return replace(
        problem,
        candidates=candidates,
        times=(*problem.times, *added.times),
        links={**links, **problem.links},
    )


def measured_width(mean_width: float, max_seq_length: int) -> int:
    return min(MEASURED_MULTIPLE * math.ceil(mean_width / MEASURED_MULTIPLE), max_seq_length)


def _only_measured(
    candidates: Sequence[Candidate],
    answers: Mapping[Key, BlockTimes | ExoTrainError],
    on_note: Callable[[str], None],
    at_least: int,
) -> list[Candidate]:
    measured, failures = [], []
    for candidate in candidates:
        answer = answers[candidate.key]
        if isinstance(answer, BlockTimes):
            measured.append(candidate)
        else:
            failures.append((candidate, answer))
    if failures and len(measured) < min(at_least, len(candidates)):
        raise failures[0][1]
    for candidate, error in failures:
        on_note(f"{candidate.name} is left out: {error}")
    return measured
