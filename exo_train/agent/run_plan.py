"""Which plan a run gets: as measured, as the user laid it down, as before, or by memory alone.

Owns the choice among these four and what the user is told of it. A resumed run keeps its split
while all its devices are here: only then are its losses those of the uninterrupted one to the last
digit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from exo_train.agent.deciding import given_size
from exo_train.agent.live_plan import Asking, LiveProblem, decide_live, measure
from exo_train.agent.planning import (
    Candidate,
    Part,
    compute_dtype,
    make_plan,
    note_left_out,
    plan_of,
    ring_order,
)
from exo_train.config import TrainConfig
from exo_train.errors import ConfigError, DoesNotFitError, ExoTrainError, PeerError
from exo_train.models.manifest import ModelManifest
from exo_train.peer import SHORT_ID_CHARS, NodeId
from exo_train.plan.drift import Drift, replan
from exo_train.plan.exact import ExactPlan, plan_with_layers
from exo_train.plan.plan import Key, Plan
from exo_train.plan.prediction import Prediction
from exo_train.train.batches import choose_microbatch_size
from exo_train.train.step_shapes import StepShapes

# Less is within what a measurement is good for.
WORTH_A_RESTART = 1.1


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """`prediction` is None where nothing was measured; `advise` says what a new plan would gain.

    `candidates` are those that it was chosen among, with the most memory that each has had to give
    in this run; `problem` is what was measured of those that it could be. `caps` are the bytes that
    devices may take which ran out of memory with more.
    """

    plan: Plan
    candidates: tuple[Candidate, ...] = ()
    problem: LiveProblem | None = None
    caps: Mapping[Key, int] = field(default_factory=dict)
    prediction: Prediction | None = None
    advise: Callable[[Drift], str] | None = None

    def following(self, before: Plan) -> RunPlan:
        """Give the same as the next generation of an earlier start's run."""
        plan = replace(self.plan, run_id=before.run_id, generation=before.generation + 1)
        return replace(self, plan=plan)


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """A split that is not to be decided: devices in ring order, with their numbers of layers."""

    candidates: tuple[Candidate, ...]
    layers: tuple[int, ...]
    microbatch_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What is to be planned. `again` is how the user goes on with it after a stop."""

    config: TrainConfig
    manifest: ModelManifest
    steps: StepShapes
    cluster: str
    coordinator: NodeId
    again: str

    @property
    def at_least(self) -> int:
        """Who asks for so many devices, or for just these, wants them to take part."""
        return max(self.config.min_devices, len(set(self.config.devices)))


def choose_plan(
    run: Run, candidates: Sequence[Candidate], asking: Asking, *, before: Plan | None = None
) -> RunPlan:
    """Plan the run; `before` is the plan to keep, of a run that is resumed.

    Raises DoesNotFitError with what would fit, ConfigError for a split that cannot be, and
    PeerError where links are missing.
    """
    given = None
    if run.config.layers:
        given = laid_down(run, candidates)
    elif before is not None:
        given = as_before(run, candidates, before, asking.on_note, at_least=run.at_least)
    chosen = _chosen(run, candidates, asking, given)
    return replace(chosen, candidates=tuple(candidates))


def _chosen(
    run: Run, candidates: Sequence[Candidate], asking: Asking, given: Given | None
) -> RunPlan:
    if not run.config.profile_s:
        return by_memory(run, candidates, given, asking.on_note)
    if given is not None:
        try:
            return _measured_as_given(run, given, asking)
        except DoesNotFitError as error:
            if run.config.layers:
                raise
            asking.on_note(f"the run is planned anew: {error}")
    problem, decision = decide_live(
        run.manifest.spec, run.config, run.steps, candidates, asking, at_least=run.at_least
    )
    asking.on_note(f"plan: {decision.verdict.reason}")
    return written(run, problem, decision.microbatch_size, decision.verdict.plan, asking)


def written(
    run: Run, problem: LiveProblem, microbatch_size: int, plan: ExactPlan, asking: Asking
) -> RunPlan:
    """Write down what was decided for the measured `problem`, and say what to expect."""
    parts = [
        Part(
            candidate=problem.candidates[stage.device],
            stage=stage.stage,
            memory_bytes=stage.memory_bytes,
        )
        for stage in plan.stages
    ]
    note_left_out(
        problem.candidates,
        parts,
        asking.on_note,
        why="it has no room for a layer, or no step gets shorter with it",
    )
    prediction = problem.predict(plan, microbatch_size)
    rate = prediction.positions / prediction.step_s
    asking.on_note(f"predicted: {prediction.step_s:.3g} s a step, {rate:.0f} positions/s")
    return RunPlan(
        plan=plan_of(
            parts,
            run.config,
            run.manifest,
            cluster=run.cluster,
            microbatch_size=microbatch_size,
        ),
        problem=problem,
        prediction=prediction,
        advise=lambda drift: _advice(run, problem, microbatch_size, plan, drift),
    )


def _measured_as_given(run: Run, given: Given, asking: Asking) -> RunPlan:
    """Predict what the given split will do; what cannot be measured is not predicted."""
    size, count = given.microbatch_size, len(given.candidates)
    try:
        problem = measure(
            run.manifest.spec,
            run.config,
            run.steps,
            given.candidates,
            asking,
            size=size,
            at_least=count,
        )
        household, workload = problem.sized(size)
        plan = plan_with_layers(household, workload, range(count), given.layers)
    except PeerError as error:
        asking.on_note(f"nothing is predicted: {error}")
        return by_memory(run, given.candidates, given, asking.on_note)
    return written(run, problem, size, plan, asking)


def by_memory(
    run: Run,
    candidates: Sequence[Candidate],
    given: Given | None,
    on_note: Callable[[str], None],
) -> RunPlan:
    """Plan without times: the split that is given, else one that goes by memory alone."""
    if given is None:
        ordered = ring_order(candidates, run.coordinator)
        on_note("plan: layers are shared out by memory; nothing is measured or predicted")
        return RunPlan(
            plan=make_plan(ordered, run.config, run.manifest, cluster=run.cluster, on_note=on_note)
        )
    parts, start = [], 0
    for index, (candidate, count) in enumerate(zip(given.candidates, given.layers, strict=True)):
        parts.append(Part.of(candidate, start, count, index, len(given.layers)))
        start += count
    return RunPlan(
        plan=plan_of(
            parts,
            run.config,
            run.manifest,
            cluster=run.cluster,
            microbatch_size=given.microbatch_size,
        )
    )


def as_before(
    run: Run,
    candidates: Sequence[Candidate],
    before: Plan,
    on_note: Callable[[str], None],
    *,
    at_least: int,
) -> Given | None:
    """Give the split of the plan before where each rank's device is here and computes as then.

    Nor may more devices be asked for, `at_least`, than it has.
    """
    by_key = {candidate.key: candidate for candidate in candidates}
    found = [by_key.get(rank.key) for rank in before.ranks]
    kept = [
        candidate
        for candidate, rank in zip(found, before.ranks, strict=True)
        if candidate is not None
        and candidate.backend == rank.backend
        and compute_dtype(candidate, run.config.dtype) == rank.compute_dtype
        and candidate.usable_memory_bytes >= rank.memory_bytes
    ]
    missing = [r.name for r, c in zip(before.ranks, found, strict=True) if c not in kept]
    if missing or before.num_layers != run.manifest.spec.num_layers:
        on_note(
            f"the run is planned anew: {', '.join(missing)} is not here as before (same processor, "
            f"dtype and enough memory)"
        )
        return None
    if len(kept) < at_least:
        on_note(f"the run is planned anew: {at_least} devices are asked for now")
        return None
    return Given(
        candidates=tuple(kept),
        layers=tuple(rank.stage.num_layers for rank in before.ranks),
        microbatch_size=before.microbatch_size,
    )


def laid_down(run: Run, candidates: Sequence[Candidate]) -> Given:
    """Read --layers NAME:COUNT,…; raises ConfigError naming what is wrong with it."""
    num_layers = run.manifest.spec.num_layers
    chosen: list[Candidate] = []
    counts: list[int] = []
    for text in run.config.layers:
        name, _, count = text.rpartition(":")
        found = [c for c in candidates if c.name == name]
        if not found and len(name) >= SHORT_ID_CHARS:
            found = [c for c in candidates if c.node_id.startswith(name)]
        if len(found) != 1:
            here = ", ".join(c.name for c in candidates)
            raise ConfigError(f"--layers: no single device here is called '{name}' (here: {here})")
        if not count.isdecimal() or int(count) < 1:
            raise ConfigError(
                f"--layers: '{text}' must be NAME:COUNT with a count of at least 1, like den-pc:20"
            )
        if found[0] in chosen:
            raise ConfigError(f"--layers names {found[0].name} twice; a device has one stage")
        chosen.append(found[0])
        counts.append(int(count))
    if sum(counts) != num_layers:
        raise ConfigError(
            f"--layers gives out {sum(counts)} layers, but the model has {num_layers}; each needs "
            f"one owner"
        )
    size = given_size(run.config) or choose_microbatch_size(
        run.config.batch_size, num_stages=len(chosen)
    )
    return Given(candidates=tuple(chosen), layers=tuple(counts), microbatch_size=size)


def _advice(
    run: Run, problem: LiveProblem, microbatch_size: int, plan: ExactPlan, drift: Drift
) -> str:
    """Say what planning anew would gain, where it is worth a restart."""
    if drift.rank is None or drift.rank_factor is None:
        return ""  # a link: what it does now is not known
    household, workload = problem.sized(microbatch_size)
    slowdowns = [1.0] * len(household.devices)
    slowdowns[plan.stages[drift.rank].device] = drift.rank_factor
    try:
        found = replan(household, workload, plan, slowdowns, at_least=run.at_least)
    except ExoTrainError:
        return ""
    if found.current_step_s < WORTH_A_RESTART * found.best_step_s:
        return "planned anew it would hardly be faster"
    return (
        f"planned anew a step would take {found.best_step_s:.3g} s instead of "
        f"{found.current_step_s:.3g} s: stop with Ctrl-C and go on with: {run.again} --replan"
    )
