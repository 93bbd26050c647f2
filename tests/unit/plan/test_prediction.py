"""What a plan promises, by hand, and how a run is held against it."""

from __future__ import annotations

import dataclasses
import json

import pytest

from exo_train.plan.exact import exact_plan, plan_with_layers
from exo_train.plan.prediction import (
    Achieved,
    Prediction,
    RankAchieved,
    RankPrediction,
    compare,
    predict,
    sentence,
)
from tests.unit.plan.test_exact_cases import (
    own_costs,
    simple_home,
    simple_workload,
    with_device,
)

PREDICTION = Prediction(
    positions=4096,
    step_s=1.92,
    period_s=0.2,
    ranks=(
        RankPrediction(name="a", busy_share=0.9, peak_memory_bytes=1000, sent_bytes=500),
        RankPrediction(name="b", busy_share=1.0, peak_memory_bytes=2000, sent_bytes=500),
    ),
)
ACHIEVED = Achieved(
    step_s=2.05,
    period_s=0.21,
    ranks=(
        RankAchieved(busy_share=0.8, peak_memory_bytes=1060, sent_bytes=500),
        RankAchieved(busy_share=0.95, peak_memory_bytes=1900, sent_bytes=500),
    ),
)


def test_what_a_ring_of_three_promises():
    home = with_device(
        simple_home(1.0, 1.0, 1.0), 1, costs=own_costs(layer_bytes=100, process_bytes=70)
    )
    workload = simple_workload(9, num_microbatches=8)
    plan = plan_with_layers(home, workload, (2, 1, 0), (3, 3, 3))
    promised = predict(plan, home, workload, positions=4096, counts_process=[True, False, True])
    assert promised.positions == 4096
    assert promised.step_s == pytest.approx(3.0 * 10, rel=1e-6)  # two periods of bubble
    assert promised.period_s == pytest.approx(3.0, rel=1e-6)
    assert [rank.name for rank in promised.ranks] == ["d2", "d1", "d0"]
    assert [rank.busy_share for rank in promised.ranks] == pytest.approx([0.8] * 3)
    # Messages of 1000 bytes, eight each way; the one in the middle sends both ways.
    assert [rank.sent_bytes for rank in promised.ranks] == [8000, 16000, 8000]
    # The one in the middle counts what its framework took, not its process.
    assert [stage.memory_bytes for stage in plan.stages] == [300, 370, 300]
    assert [rank.peak_memory_bytes for rank in promised.ranks] == [300, 300, 300]
    counted = predict(plan, home, workload, positions=1, counts_process=[True] * 3)
    assert counted.ranks[1].peak_memory_bytes == 370


def test_a_second_forward_sends_up_twice_and_takes_its_time_on_the_wire():
    home = simple_home(1.0, 1.0)
    workload = simple_workload(4, num_microbatches=8)
    twice = dataclasses.replace(workload, num_forwards=2)
    plans = [plan_with_layers(home, w, (0, 1), (2, 2)) for w in (workload, twice)]
    sent = [
        [
            rank.sent_bytes
            for rank in predict(plan, home, w, positions=1, counts_process=[True] * 2).ranks
        ]
        for plan, w in zip(plans, (workload, twice), strict=True)
    ]
    assert sent == [[8000, 8000], [16000, 8000]]
    assert plans[1].step_s > plans[0].step_s


def test_one_device_sends_nothing_and_its_step_is_its_only_period():
    home, workload = simple_home(1.0), simple_workload(4, num_microbatches=1)
    plan = exact_plan(home, workload)
    promised = predict(plan, home, workload, positions=10, counts_process=[True])
    assert promised.ranks[0].sent_bytes == 0
    assert promised.ranks[0].busy_share == 1.0
    assert promised.period_s == promised.step_s == 4.0


def test_each_promise_is_put_beside_what_came_of_it():
    found = compare(PREDICTION, ACHIEVED)
    assert found["positions"] == 4096
    assert found["step_s"] == {
        "predicted": 1.92,
        "achieved": 2.05,
        "error": pytest.approx(2.05 / 1.92 - 1),
    }
    assert found["period_s"]["error"] == pytest.approx(0.05)
    first, second = found["devices"]
    assert (first["rank"], first["name"], second["rank"]) == (0, "a", 1)
    assert first["peak_memory_bytes"]["error"] == pytest.approx(0.06)
    assert second["peak_memory_bytes"]["error"] == pytest.approx(-0.05)
    assert first["bubble_fraction"] == pytest.approx(
        {"predicted": 0.1, "achieved": 0.2, "error": 1.0}
    )
    assert second["bubble_fraction"]["error"] is None  # no bubble was promised
    assert first["sent_bytes"] == {"predicted": 500, "achieved": 500, "error": 0.0}
    json.dumps(found, allow_nan=False)


def test_the_sentence():
    assert sentence(PREDICTION, ACHIEVED) == (
        "predicted 1.92 s a step, achieved 2.05 s (7 % slower); "
        "period 0.2 s, achieved 0.21 s (5 % slower); memory within 6 %"
    )


def test_the_sentence_leaves_out_what_there_is_not():
    alone = dataclasses.replace(PREDICTION, step_s=0.05, ranks=PREDICTION.ranks[:1])
    came = Achieved(
        step_s=0.0401,
        period_s=0.0,
        ranks=(RankAchieved(busy_share=1.0, peak_memory_bytes=0, sent_bytes=0),),
    )
    assert sentence(alone, came) == "predicted 50 ms a step, achieved 40.1 ms (20 % faster)"
    exactly = dataclasses.replace(came, step_s=0.0501)
    assert sentence(alone, exactly) == "predicted 50 ms a step, achieved 50.1 ms (as predicted)"
    # One microbatch: the step is the period, and that is said once.
    single = dataclasses.replace(alone, period_s=0.05)
    assert "period" not in sentence(single, dataclasses.replace(came, period_s=0.0401))
    assert compare(alone, came)["period_s"]["achieved"] == 0.0401
