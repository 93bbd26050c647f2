"""Invariant 4 on the control plane: a rank refuses what is stale, foreign or out of order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from exo_train.agent.local_ring import LocalNetwork, LocalSurroundings
from exo_train.agent.planning import make_plan
from exo_train.models.manifest import ModelManifest
from exo_train.plan.plan import Plan
from exo_train.train.batches import BatchPlan, split_microbatches
from exo_train.train.messages import to_microbatch_data
from exo_train.train.stage_runner import StageRunner
from exo_train.wire.pb import control_pb2 as pb
from tests.ring.rings import CONFIG, candidates, manifest_of, random_examples
from tests.tiny_models import make_tiny_model


class Driver:
    """Speaks to one rank that has the whole model."""

    def __init__(self, model: Path) -> None:
        self.manifest: ModelManifest = manifest_of(model)
        self.plan: Plan = make_plan(candidates(["torch"]), CONFIG, self.manifest, cluster="test")
        self.answers: list[pb.RunMessage] = []
        surroundings = LocalSurroundings(LocalNetwork(), model)
        self.runner = StageRunner(surroundings, send=self.answers.append)

    def message(self, **body: object) -> pb.RunMessage:
        return pb.RunMessage(run_id=self.plan.run_id, generation=1, rank=0, **body)  # type: ignore[arg-type]

    def say(self, message: pb.RunMessage) -> str:
        """Give what the rank answers last: the kind of message, or the failure's sentence."""
        going_on = self.runner.handle(message)
        last = self.answers[-1]
        kind = last.WhichOneof("body") or ""
        assert going_on, "a rank that fails waits for what the driver decides"
        return last.failure.message if kind == "failure" else kind

    def load(self, plan: Plan | None = None, manifest: ModelManifest | None = None) -> str:
        return self.say(
            self.message(
                load=pb.Load(
                    plan_json=(plan or self.plan).to_json(),
                    manifest_json=(manifest or self.manifest).to_json(),
                    token="secret",
                    step_timeout_s=10,
                    coordinator_name="attic",
                )
            )
        )

    def step(self, step: int, *, shift: int = 0, times: int = 1) -> pb.RunMessage:
        batches = BatchPlan(
            examples=random_examples(self.manifest.spec.vocab_size), batch_size=2, seed=0
        )
        (microbatch,) = split_microbatches(
            batches.batch_for_step(0), microbatch_size=2, max_seq_length=32
        )
        microbatch = replace(microbatch, tokens_BT=microbatch.tokens_BT + shift)
        data = to_microbatch_data(microbatch, with_tokens=True, with_targets=True)
        return self.message(
            step_input=pb.StepInput(step=step, loss_scale=0.1, microbatches=[data] * times)
        )

    def commit(self, step: int, **changes: float) -> pb.RunMessage:
        values = {"learning_rate": 1e-3, "grad_scale": 1.0} | changes
        return self.message(commit=pb.Commit(step=step, apply=True, **values))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("runner") / "m", num_layers=2)


@pytest.fixture
def driver(model: Path) -> Driver:
    driver = Driver(model)
    prepared = driver.say(driver.message(prepare=pb.Prepare(backend="torch", device="cpu")))
    assert prepared == "prepared"
    return driver


def test_the_usual_order(driver: Driver) -> None:
    assert driver.load() == "loaded"
    assert driver.answers[-1].loaded.plan_hash == driver.plan.hash
    for step in (1, 2):
        assert driver.say(driver.step(step)) == "step_report"
        assert driver.say(driver.commit(step)) == "committed"


def test_the_report_has_the_pace_of_the_backwards(driver: Driver) -> None:
    driver.load()
    driver.say(driver.step(1))
    assert driver.answers[-1].step_report.period_s == 0.0, "one microbatch has no pace"
    driver.say(driver.commit(1))
    driver.say(driver.step(2, times=3))
    report = driver.answers[-1].step_report
    assert 0 < 2 * report.period_s < report.step_s
    assert report.busy_s <= report.step_s
    assert report.sent_bytes == 0


@pytest.mark.parametrize(
    "change",
    [{"run_id": "another"}, {"generation": 2}, {"rank": 1}],
    ids=lambda change: "-".join(change),
)
def test_a_message_of_another_run_generation_or_rank(
    change: dict[str, object], driver: Driver
) -> None:
    driver.load()
    message = driver.step(1)
    for field, value in change.items():
        setattr(message, field, value)
    assert "message for run, generation, rank" in driver.say(message)


def test_a_plan_of_another_run_or_model(model: Path, driver: Driver) -> None:
    assert "the plan is for run" in driver.load(replace(driver.plan, run_id="other"))
    second = Driver(model)
    second.say(second.message(prepare=pb.Prepare()))
    foreign = replace(second.plan, model_hash="0" * 64)
    assert "manifest is of another model" in second.load(foreign)


OutOfOrder = Callable[[Driver], pb.RunMessage]


@pytest.mark.parametrize(
    ("before", "message", "sentence"),
    [
        ([], lambda d: d.step(2), "step 2 asked for"),
        ([lambda d: d.step(1)], lambda d: d.step(1), "step 1 is pending"),
        ([lambda d: d.step(1)], lambda d: d.commit(2), "commit of step 2, pending is 1"),
        ([], lambda d: d.commit(1), "commit of step 1, pending is None"),
        ([lambda d: d.step(1), lambda d: d.commit(1)], lambda d: d.step(1), "step 1 asked for"),
        (
            [lambda d: d.step(1)],
            lambda d: d.commit(1, grad_scale=float("nan")),
            "carries a non-finite number",
        ),
        ([], lambda d: d.step(1, shift=10**6), "ids reach outside the vocabulary"),
        ([], lambda d: d.message(prepared=pb.Prepared()), "does not expect a 'prepared'"),
    ],
)
def test_what_is_out_of_order_or_out_of_range(
    before: list[OutOfOrder], message: OutOfOrder, sentence: str, driver: Driver
) -> None:
    driver.load()
    for earlier in before:
        driver.say(earlier(driver))
    assert sentence in driver.say(message(driver))


def test_work_before_the_plan(driver: Driver) -> None:
    assert "before the plan was loaded" in driver.say(driver.step(1))
