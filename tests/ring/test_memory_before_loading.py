"""What was free when the plan was made may be gone: each worker looks again before it loads."""

from __future__ import annotations

import queue
from dataclasses import replace
from pathlib import Path

import pytest

from exo_train.agent.worker_process import WorkerProcess
from exo_train.cluster.home import Home
from exo_train.errors import DoesNotFitError
from exo_train.models.open import open_model
from exo_train.plan.plan import Plan, RankPlan
from exo_train.plan.stages import StageSpec
from exo_train.wire.pb import control_pb2 as pb
from exo_train.worker import GrpcSurroundings, check_room
from tests.ring.hand_plans import plan_by_hand
from tests.ring.rings import manifest_of

WAIT_S = 60.0
LOOPBACK = "127.0.0.1"
GB = 10**9


def plan_for(model: Path, *, memory_bytes: int) -> Plan:
    plan = plan_by_hand(manifest_of(model), [("den-pc", "ab" * 16)], [(0, 5)], cluster="c")
    return replace(plan, ranks=(replace(plan.ranks[0], memory_bytes=memory_bytes),))


def rank_of(plan: Plan, *, start: int, end: int) -> RankPlan:
    stage = StageSpec(start=start, end=end, embedding=False, head=True)
    return replace(plan.ranks[0], rank=1, stage=stage)


def test_the_sentence_names_device_layers_need_and_what_to_do(tiny_model: Path) -> None:
    rank = rank_of(plan_for(tiny_model, memory_bytes=4 * GB), start=14, end=30)
    with pytest.raises(DoesNotFitError) as caught:
        check_room(rank, 3_100_000_000)
    assert str(caught.value) == (
        "den-pc (rank 1) has 3.1 GB free now on cpu, layers 14..29 need 4.0 GB; close programs "
        "there, or start again so that the run is planned anew"
    )
    with pytest.raises(DoesNotFitError, match=r"layer 3 needs 4\.0 GB"):
        check_room(rank_of(plan_for(tiny_model, memory_bytes=4 * GB), start=3, end=4), 0)


@pytest.mark.parametrize("free_bytes", [4 * GB, 5 * GB, None], ids=["just", "more", "unknown"])
def test_where_it_fits_or_nobody_knows_it_is_loaded(
    tiny_model: Path, free_bytes: int | None
) -> None:
    check_room(plan_for(tiny_model, memory_bytes=4 * GB).ranks[0], free_bytes)


@pytest.mark.parametrize(
    ("need_bytes", "trust_memory", "refused"),
    [(4 * GB, False, True), (4 * GB, True, False), (3 * GB, False, False), (0, False, False)],
    ids=["too little", "the user's word", "enough", "need unknown"],
)
def test_a_workers_surroundings_look_before_they_load(
    tmp_path: Path, tiny_model: Path, need_bytes: int, trust_memory: bool, refused: bool
) -> None:
    home = Home(tmp_path)
    home.found()
    asked: list[str] = []

    def free_bytes(device: str) -> int:
        asked.append(device)
        return 3 * GB

    surroundings = GrpcSurroundings(
        home,
        listen_hosts=[LOOPBACK],
        hosts=[LOOPBACK],
        model=tiny_model,
        trust_memory=trust_memory,
        free_bytes=free_bytes,
    )
    plan = plan_for(tiny_model, memory_bytes=need_bytes)
    _, source = open_model(tiny_model)
    if refused:
        with pytest.raises(DoesNotFitError, match=r"3\.0 GB free now on cpu, layers 0\.\.4 need"):
            surroundings.load_stage(plan, 0, manifest_of(tiny_model), source)
        assert asked == ["cpu"]
    else:
        assert surroundings.load_stage(plan, 0, manifest_of(tiny_model), source).adapter()


class RealWorker:
    """A worker process, told to load the whole model as rank 0 of a run of its own."""

    def __init__(self, home: Home, model: Path, *options: str) -> None:
        self._answers: queue.SimpleQueue[pb.RunMessage | str] = queue.SimpleQueue()
        self._process = WorkerProcess(
            ["--home", str(home.path), "--model", str(model), "--listen", LOOPBACK,
             "--host", LOOPBACK, *options],
            log_path=home.logs / "worker.log",
            on_message=lambda raw: self._answers.put(pb.RunMessage.FromString(raw)),
            on_exit=self._answers.put,
        )  # fmt: skip

    def load(self, plan: Plan, model: Path) -> pb.RunMessage:
        """Give the answer to `load`: `loaded` or `failure`."""
        manifest = manifest_of(model)
        prepare = pb.Prepare(backend="torch", device="cpu", node_id="ab" * 16, cluster="c")
        load = pb.Load(
            plan_json=plan.to_json(),
            manifest_json=manifest.to_json(),
            token="t",
            coordinator_name="den-pc",
            coordinator_id="ab" * 16,
            step_timeout_s=WAIT_S,
        )
        for body in ({"prepare": prepare}, {"load": load}):
            message = pb.RunMessage(run_id=plan.run_id, generation=1, rank=0, **body)
            self._process.send(message.SerializeToString())
        while True:
            answer = self._answers.get(timeout=WAIT_S)
            assert isinstance(answer, pb.RunMessage), f"the worker ended: {answer}"
            if answer.WhichOneof("body") in ("loaded", "failure"):
                return answer

    def stop(self) -> None:
        self._process.stop()


@pytest.mark.processes
@pytest.mark.parametrize(
    ("need_bytes", "options", "kind"),
    [
        (10**15, (), "failure"),
        (10**15, ("--trust-memory",), "loaded"),
        (50 * 10**6, (), "loaded"),
    ],
    ids=["far too much", "the user's word", "little"],
)
def test_a_real_worker(
    tmp_path: Path, tiny_model: Path, need_bytes: int, options: tuple[str, ...], kind: str
) -> None:
    home = Home(tmp_path)
    home.found()
    worker = RealWorker(home, tiny_model, *options)
    try:
        answer = worker.load(plan_for(tiny_model, memory_bytes=need_bytes), tiny_model)
    finally:
        worker.stop()
    assert answer.WhichOneof("body") == kind
    if kind == "failure":
        assert answer.failure.kind == "DoesNotFitError"
        assert answer.failure.message.startswith("den-pc (rank 0) has ")
        assert "layers 0..4 need 1000000.0 GB; close programs there" in answer.failure.message
