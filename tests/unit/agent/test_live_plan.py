"""From measured times to a plan and its promise, without a device: all numbers are given."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from exo_train.agent.deciding import decide
from exo_train.agent.live_plan import LiveProblem, _check_number, as_sent, measured_width
from exo_train.agent.planning import Candidate
from exo_train.agent.run_plan import Run, _advice, as_before
from exo_train.config import TrainConfig
from exo_train.errors import DoesNotFitError, PeerError
from exo_train.models.manifest import ModelManifest
from exo_train.models.spec import ModelSpec
from exo_train.peer import NodeId
from exo_train.plan.block_times import BlockMemory, BlockTimes, EndTimes
from exo_train.plan.drift import Drift
from exo_train.plan.memory_kinds import memory_by_kind
from exo_train.plan.plan import Plan, RankPlan
from exo_train.plan.profiles import LinkProfile
from exo_train.plan.stages import StageSpec
from exo_train.train.state_copies import layout_bytes, state_layout
from exo_train.train.step_shapes import StepShape, full_steps
from tests.tiny_models import tiny_config

NUM_LAYERS = 14
SPEC = ModelSpec.from_config(tiny_config(num_layers=NUM_LAYERS), place="test")
CONFIG = TrainConfig(batch_size=32, microbatch_size=1, max_seq_length=64)
FAST_LINK = LinkProfile(latency_s=1e-4, bytes_per_s=1e9)


def times(layer_s: float, **changes: Any) -> BlockTimes:
    values: dict[str, Any] = {
        "layer_forward_s": layer_s / 2,
        "layer_backward_s": layer_s / 2,
        "overhead_s": 0.0,
        "layer_update_s": 0.0,
        "slowdown": 1.0,
        "num_repetitions": 50,
        "ends": EndTimes(embedding_s=0, head_s=0, head_layer_s=layer_s, head_workspace_bytes=0),
        "process_bytes": 100_000_000,
    }
    return BlockTimes(**{**values, **changes})


def candidate(name: str, **changes: Any) -> Candidate:
    values: dict[str, Any] = {
        "node_id": NodeId(name[0] * 32),
        "name": name,
        "backend": "torch",
        "device": "cpu",
        "usable_memory_bytes": 4 * 10**9,
        "dtypes": ("fp32", "bf16", "fp16"),
        "addresses": (),
    }
    return Candidate(**{**values, **changes})


def problem(*layer_s: float, **changes: Any) -> LiveProblem:
    names = ("anna", "berta", "clara")[: len(layer_s)]
    pairs = [(a, b) for a in range(len(names)) for b in range(len(names)) if a != b]
    values: dict[str, Any] = {
        "spec": SPEC,
        "config": CONFIG,
        "steps": full_steps(CONFIG),
        "candidates": tuple(candidate(name) for name in names),
        "times": tuple(times(seconds) for seconds in layer_s),
        "links": dict.fromkeys(pairs, FAST_LINK),
        "size": 1,
        "width": 64,
    }
    return LiveProblem(**{**values, **changes})


def run(**changes: Any) -> Run:
    values: dict[str, Any] = {
        "config": CONFIG,
        "manifest": ModelManifest(spec=SPEC, infos={}, digests={}, model_hash="m"),
        "steps": full_steps(CONFIG),
        "cluster": "c",
        "coordinator": NodeId("a" * 32),
        "again": "exo-train train --resume somewhere",
    }
    return Run(**{**values, **changes})


def test_layers_go_by_speed() -> None:
    """Speeds 1:2:4 share 14 layers as 8, 4 and 2."""
    decision = decide(problem(0.01, 0.02, 0.04), at_least=3)
    stages = decision.verdict.plan.stages
    assert {s.device: s.stage.num_layers for s in stages} == {0: 8, 1: 4, 2: 2}
    assert decision.verdict.plan.period_s == pytest.approx(0.08)


def test_times_grow_with_the_data_and_memory_with_its_longest_row() -> None:
    def steps(size: int) -> StepShape:
        return StepShape(num_sequences=32, mean_width=16.0, longest=48)

    short = problem(0.01, 0.02, steps=steps)
    household, workload = short.sized(2)
    assert household.devices[0].layer_s == pytest.approx(0.01 * 2 * 16 / 64)
    assert workload.boundary_bytes == 2 * 16 * SPEC.hidden_size * 4
    assert workload.num_microbatches == 16
    longer = problem(0.01, 0.02, steps=lambda size: replace(steps(size), longest=64))
    costs, longer_costs = (p.sized(2)[0].devices[0].costs for p in (short, longer))
    assert costs is not None
    assert longer_costs is not None
    assert costs.layer.per_microbatch_bytes < longer_costs.layer.per_microbatch_bytes


def test_each_device_stores_in_its_own_format() -> None:
    """A GPU computes in bf16, a CPU in fp32: half the weights, and boundaries of 16 bits."""
    gpu = candidate("berta", device="cuda:0", dtypes=("bf16", "fp16", "fp32"))
    mixed = problem(0.01, 0.01, candidates=(candidate("anna"), gpu))
    household, workload = mixed.sized(1)
    cpu_costs, gpu_costs = (device.costs for device in household.devices)
    assert cpu_costs is not None
    assert gpu_costs is not None
    layers = [costs.layer for costs in (cpu_costs, gpu_costs)]
    weights = [layer.static_bytes - layer.adapter_bytes - layer.copies_bytes for layer in layers]
    assert weights[0] == 2 * weights[1]
    assert workload.boundary_bytes == 64 * SPEC.hidden_size * 2


def test_what_is_kept_for_a_rewind_is_reckoned_as_large_as_it_is() -> None:
    """A copy is what one device sends another: every adapter value, and two moments of each."""
    stage = StageSpec(start=3, end=8, embedding=False, head=False)
    copy_bytes = layout_bytes(state_layout(SPEC, CONFIG.lora, CONFIG.optimizer_rule, stage))
    costs = problem(0.01, 0.02).sized(1)[0].devices[0].costs
    assert costs is not None
    kinds = memory_by_kind(costs, stage, in_flight=1)
    assert 0 <= 4 * copy_bytes - kinds.copies_bytes <= 4 * 8, "but for the count of steps"


def test_the_promise_counts_what_the_ranks_will_report() -> None:
    live = problem(0.01, 0.02)
    decision = decide(live, at_least=2)
    plan = decision.verdict.plan
    promise = live.predict(plan, 1)
    assert promise.positions == 32 * 64
    assert promise.step_s == plan.step_s
    assert [rank.name for rank in promise.ranks] == [
        live.candidates[stage.device].name for stage in plan.stages
    ]
    message_bytes = 64 * SPEC.hidden_size * 4
    assert [rank.sent_bytes for rank in promise.ranks] == [32 * message_bytes] * 2
    assert all(rank.peak_memory_bytes > 100_000_000 for rank in promise.ranks), "the process too"


def test_what_does_not_fit_is_refused_with_the_process_counted() -> None:
    small = problem(0.01, candidates=(candidate("anna", usable_memory_bytes=90_000_000),))
    with pytest.raises(DoesNotFitError, match=r"more than the 90\.0 MB of anna"):
        decide(small)


def test_few_lengths_are_measured_and_none_beyond_the_limit() -> None:
    assert measured_width(17.2, 64) == 24
    assert measured_width(64, 64) == 64
    assert measured_width(61.5, 62) == 62


def plan_before(*ranks: tuple[str, int], dtype: str = "fp32") -> Plan:
    start, parts = 0, []
    for index, (name, count) in enumerate(ranks):
        stage = StageSpec(
            start=start,
            end=start + count,
            embedding=index == 0,
            head=index == len(ranks) - 1,
        )
        start += count
        parts.append(
            RankPlan(
                rank=index,
                node_id=NodeId(name[0] * 32),
                name=name,
                backend="torch",
                device="cpu",
                compute_dtype=dtype,
                stage=stage,
                memory_bytes=2 * 10**9,
            )
        )
    return Plan(
        cluster="c",
        run_id="1",
        generation=1,
        model_hash="m",
        num_layers=NUM_LAYERS,
        hidden_size=SPEC.hidden_size,
        ranks=tuple(parts),
        pipeline_schedule="1f1b",
        microbatch_size=3,
        max_seq_length=64,
        wire_dtype="fp32",
        lora=CONFIG.lora,
        optimizer=CONFIG.optimizer_rule,
        seed=0,
    )


def test_a_resumed_run_keeps_its_split_while_its_devices_are_as_before() -> None:
    before = plan_before(("berta", 9), ("anna", 5))
    here = [candidate("anna"), candidate("berta"), candidate("clara")]
    kept = as_before(run(), here, before, print, at_least=1)
    assert kept is not None
    assert [c.name for c in kept.candidates] == ["berta", "anna"]
    assert kept.layers == (9, 5)
    assert kept.microbatch_size == 3


@pytest.mark.parametrize(
    "changed",
    [
        [candidate("anna")],
        [candidate("anna"), candidate("berta", device="cuda:0")],
        [candidate("anna"), candidate("berta", backend="mlx")],
        [candidate("anna"), candidate("berta", dtypes=("bf16", "fp32"))],
        [candidate("anna"), candidate("berta", usable_memory_bytes=10**9)],
    ],
    ids=["gone", "another processor", "another backend", "another dtype", "less memory"],
)
def test_it_is_planned_anew_when_one_of_them_is_not(changed: list[Candidate]) -> None:
    before = plan_before(("berta", 9), ("anna", 5))
    assert as_before(run(), changed, before, print, at_least=1) is None


def test_more_devices_than_before_are_not_refused_silently() -> None:
    said: list[str] = []
    here = [candidate("anna"), candidate("berta"), candidate("clara")]
    before = plan_before(("berta", 9), ("anna", 5))
    assert as_before(run(), here, before, said.append, at_least=3) is None
    assert said == ["the run is planned anew: 3 devices are asked for now"]


def test_who_is_left_out_does_not_decide_what_is_sent() -> None:
    """Two fp32 CPUs do the work; a GPU that computes in bf16 has no room for a layer."""
    gpu = candidate("clara", device="cuda:0", dtypes=("bf16",), usable_memory_bytes=1000)
    three = (candidate("anna"), candidate("berta"), gpu)
    live = problem(0.01, 0.01, 0.001, candidates=three)
    assert live.wire_bytes == 2
    part, found = as_sent(live, decide(live, at_least=2), 2)
    assert part.wire_bytes == 4
    assert found.workload.boundary_bytes == 64 * SPEC.hidden_size * 4
    assert [found.household.devices[i].name for i in found.verdict.plan.devices] == [
        "anna",
        "berta",
    ]


def test_a_wish_for_devices_does_not_give_way_to_a_link_that_was_not_measured() -> None:
    live = problem(0.01, 0.01, links={})
    with pytest.raises(PeerError, match="links between them are not all measured"):
        _check_number(live, decide(live, at_least=2), 2)
    _check_number(live, decide(live), 1)


def test_scores_of_long_rows_are_reckoned_from_short_ones() -> None:
    """MLX keeps attention scores in full: measured at 64 positions, needed at 512."""

    def steps(size: int) -> StepShape:
        return StepShape(num_sequences=32, mean_width=64.0, longest=512)

    memory = BlockMemory(layer_in_flight_bytes=0, layer_workspace_bytes=500_000, workspace_bytes=0)
    mac = candidate("anna", backend="mlx", device="gpu")
    live = problem(0.01, candidates=(mac,), times=(times(0.01, memory=memory),), steps=steps)
    costs = live.sized(1)[0].devices[0].costs
    assert costs is not None
    scores_bytes = 2 * SPEC.num_heads * 512**2 * 4
    assert costs.layer.static_bytes > scores_bytes


def test_advice_names_the_gain_and_the_command() -> None:
    """Of two equal devices one became three times as slow: 11 + 3 layers, 0.11 s for 0.21."""
    live = problem(0.01, 0.01)
    plan = decide(live, at_least=2).verdict.plan
    drift = Drift(factor=2.9, rank=1, rank_factor=3.0)
    asked_for_two = run(config=replace(CONFIG, min_devices=2))
    said = _advice(asked_for_two, live, 1, plan, drift)
    assert said.endswith("go on with: exo-train train --resume somewhere --replan")
    assert "a step would take 3.59 s instead of 6.79 s" in said, said


def test_no_restart_is_advised_for_little_or_for_a_link() -> None:
    live = problem(0.01, 0.01)
    plan = decide(live, at_least=2).verdict.plan
    asked_for_two = run(config=replace(CONFIG, min_devices=2))
    little = Drift(factor=1.16, rank=1, rank_factor=1.16)
    assert "--resume" not in _advice(asked_for_two, live, 1, plan, little)
    link = Drift(factor=3.0, rank=None, rank_factor=None)
    assert _advice(asked_for_two, live, 1, plan, link) == ""
