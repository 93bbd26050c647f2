"""Members ask each other how fast they are: over TLS, all at once, and never for long."""

from __future__ import annotations

import contextlib
import json
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest

from exo_train.agent.live_household import ask_profiles, request_for
from exo_train.agent.planning import Candidate
from exo_train.backends.registry import available_backends
from exo_train.config import TrainConfig
from exo_train.errors import (
    DoesNotFitError,
    ExoTrainError,
    InterruptedRunError,
    PeerError,
    PeerLostError,
)
from exo_train.lora_config import LoraConfig
from exo_train.peer import Address
from exo_train.plan.block_times import BlockTimes, ProfileRequest
from exo_train.transport.channel import open_channel
from exo_train.transport.tls import MemberTls, PeerTls
from exo_train.wire.pb import control_pb2 as pb
from exo_train.wire.pb.control_pb2_grpc import ControlServicer, ControlStub
from tests.agent import profile_requests
from tests.agent.agents_here import LOOPBACK, ByHand, Here, wait_all_alive
from tests.agent.conftest import Join
from tests.agent.running_agents import RunningAgent, loopback_interface, wait_until
from tests.tiny_models import tiny_config

pytestmark = pytest.mark.xdist_group("agents-here")
TIMES = BlockTimes(
    layer_forward_s=0.01,
    layer_backward_s=0.02,
    overhead_s=0.003,
    layer_update_s=0.0004,
    slowdown=1.05,
    num_repetitions=20,
)
BACKEND = available_backends()[0]  # of the agents here
START_TIMEOUT_S = 60.0
SOON_S = 5.0
Replying = Callable[[pb.ProfileRequest], pb.ProfileReply]


def request(**changed: Any) -> ProfileRequest:
    return profile_requests.request(**{"backend": BACKEND, **changed})


def candidate_of(here: Here, *, name: str = "", port: int = 0) -> Candidate:
    row = {**here.row(here.name), "addresses": [f"{LOOPBACK}:{port or here.port}"]}
    return Candidate.from_status({**row, "name": name or here.name})


def run_request(candidate: Candidate, **changed: Any) -> ProfileRequest:
    return request_for(
        candidate,
        json.dumps(tiny_config()),
        TrainConfig(rank=2),
        lora=LoraConfig(rank=2),
        compute_dtype="fp32",
        microbatch_size=1,
        **{"sequence": 16, "budget_s": 0.1, **changed},
    )


def profilers() -> list[psutil.Process]:
    children = psutil.Process().children(recursive=True)
    return [p for p in children if "exo_train.profiler" in " ".join(p.cmdline())]


@pytest.mark.processes
def test_two_members_are_measured_at_once_then_remember(join: Join) -> None:
    first = join("studio")
    second = join("den-pc", first)
    wait_all_alive(first, second)
    tls_of = first.agent.admissions.tls.to
    candidates = [candidate_of(first), candidate_of(second)]
    requests = {c.key: run_request(c) for c in candidates}

    def ask(*, fresh: bool = False) -> tuple[list[BlockTimes], list[str], float]:
        notes: list[str] = []
        started_s = time.monotonic()
        answers = ask_profiles(candidates, requests, tls_of, fresh=fresh, on_note=notes.append)
        taken_s = time.monotonic() - started_s
        assert list(answers) == [c.key for c in candidates]
        for times in answers.values():
            assert isinstance(times, BlockTimes), times
        return list(answers.values()), notes, taken_s  # type: ignore[arg-type]

    measured, notes, first_s = ask()
    assert notes == ["measuring studio, den-pc"]
    for times in measured:
        assert times.ends is not None
        assert 0 < times.layer_s < 5
    known, notes, again_s = ask()
    assert known == measured
    assert notes == []
    assert again_s < first_s / 3
    fresh, notes, _ = ask(fresh=True)
    assert all(a != b for a, b in zip(fresh, measured, strict=True))
    assert notes == ["measuring studio, den-pc"]
    assert profilers() == []


def is_answered(tls: PeerTls, port: int) -> bool:
    channel = open_channel(Address(LOOPBACK, port), credentials=tls.credentials, tls_name=tls.name)
    with contextlib.closing(channel), contextlib.suppress(grpc.RpcError):
        ControlStub(channel).Profile(
            pb.ProfileRequest(json=request(device="cuda:9").to_json()), timeout=SOON_S
        )
        return True
    return False


def test_who_is_no_member_is_not_answered_and_nothing_is_measured(
    join: Join, tmp_path: Path
) -> None:
    here, elsewhere = join("studio"), join("neighbour", cluster="another")
    stranger = MemberTls(elsewhere.agent.admissions.identity, here.agent.admissions.certificate)
    assert not is_answered(stranger.to(here.id), here.port)
    assert is_answered(ByHand.invited_by(here, tmp_path / "guest").tls.to(here.id), here.port)
    answers = ask_profiles(
        [candidate := candidate_of(elsewhere)],
        {candidate.key: run_request(candidate)},
        here.agent.admissions.tls.to,
    )
    with pytest.raises(PeerError, match="is not a member of this cluster"):
        raise answers[candidate.key]  # type: ignore[misc]


@pytest.mark.parametrize("text", ["", "[]", "{}", "{" * 5000, '{"schema": 1}'])
def test_a_question_that_makes_no_sense_is_refused(join: Join, tmp_path: Path, text: str) -> None:
    here = join("studio")
    guest = ByHand.invited_by(here, tmp_path / "guest")
    with guest.control_of(here) as control, pytest.raises(grpc.RpcError) as refused:
        control.Profile(pb.ProfileRequest(json=text), timeout=SOON_S)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "a request for a profile" in str(refused.value.details())
    assert here.agent.gate.counts() == {"malformed": 1}


@pytest.mark.processes
def test_a_device_that_is_not_offered_is_a_failure_with_its_name(
    join: Join, tmp_path: Path
) -> None:
    here = join("studio")
    guest = ByHand.invited_by(here, tmp_path / "guest")
    with guest.control_of(here) as control:
        asked = request(device="cuda:3").to_json()
        reply = control.Profile(pb.ProfileRequest(json=asked), timeout=SOON_S)
    assert reply.failure.kind == "ConfigError"
    offers = f"studio: it offers {BACKEND} on cpu, not {BACKEND} on cuda:3; look at"
    assert reply.failure.message.startswith(offers)
    assert reply.json == ""


@pytest.mark.processes
def test_a_device_that_takes_part_in_a_run_times_nothing(
    join: Join, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = join("studio")
    guest = ByHand.invited_by(here, tmp_path / "guest")
    monkeypatch.setattr("exo_train.agent.profiles.RUN_END_TIMEOUT_S", 0.0)
    requests: queue.SimpleQueue[pb.RunMessage | None] = queue.SimpleQueue()
    cluster = here.client().status()["cluster"]
    prepare = pb.Prepare(backend=BACKEND, device="cpu", node_id=here.id, cluster=cluster)
    requests.put(pb.RunMessage(run_id="blue7", generation=1, rank=0, prepare=prepare))
    with guest.control_of(here) as control:
        replies = control.Run(iter(requests.get, None))
        next(replies)
        reply = control.Profile(pb.ProfileRequest(json=request().to_json()), timeout=SOON_S)
        assert reply.failure.kind == "PeerError"
        assert reply.failure.message.startswith("studio is training now (run blue7); a layer ")
        assert profilers() == []
        replies.cancel()
        requests.put(None)


@pytest.mark.processes
def test_a_caller_that_hangs_up_and_an_agents_end_both_end_the_process(
    join: Join, tmp_path: Path
) -> None:
    here = join("studio")
    guest = ByHand.invited_by(here, tmp_path / "guest")
    asked = pb.ProfileRequest(json=request(budget_s=60.0).to_json(), fresh=True)
    with guest.control_of(here) as control:
        call = control.Profile.future(asked, timeout=START_TIMEOUT_S)
        (process,) = wait_profiler()
        wait_busy(process)
        started_s = time.monotonic()
        assert control.Hello(guest.hello(), timeout=2.0).refusal == ""
        assert here.client().status()["self"] == here.id
        assert time.monotonic() - started_s < 2.0, "others are answered meanwhile"
        call.cancel()
        process.wait(SOON_S)
        call = control.Profile.future(asked, timeout=START_TIMEOUT_S)
        (process,) = wait_profiler()
        wait_busy(process)
        started_s = time.monotonic()
        here.agent.__exit__(None, None, None)
        assert time.monotonic() - started_s < SOON_S
        assert not process.is_running()
        with contextlib.suppress(grpc.RpcError):
            assert "studio: " in call.result(timeout=SOON_S).failure.message
    here.agent._stack = contextlib.ExitStack()  # the fixture ends it once more
    here.agent._is_leaving = False


@pytest.mark.processes
@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
def test_a_killed_agent_leaves_no_process_behind(tmp_path: Path) -> None:
    agent = RunningAgent("studio", tmp_path, "tests", ["--interface", loopback_interface()])
    with contextlib.closing(agent):
        agent.start()
        assert agent.process is not None
        guest = ByHand.of(agent.home)
        candidate = Candidate.from_status(agent.status()["members"][0])
        pool = ThreadPoolExecutor(1)
        asked = pool.submit(
            ask_profiles,
            [candidate],
            {candidate.key: run_request(candidate, budget_s=60.0)},
            guest.tls.to,
        )
        (process,) = wait_profiler()
        wait_busy(process)
        agent.end(signal.SIGKILL)
        process.wait(SOON_S)
        (answer,) = asked.result(SOON_S).values()
        with pytest.raises(PeerLostError, match=r"^studio: the connection to it broke"):
            raise answer  # type: ignore[misc]
        pool.shutdown()


def wait_profiler() -> list[psutil.Process]:
    wait_until(lambda: len(profilers()) == 1, START_TIMEOUT_S, lambda: str(profilers()))
    return profilers()


def wait_busy(process: psutil.Process) -> None:
    """Wait until the framework is loaded, so that the end comes while it computes."""
    wait_until(lambda: process.memory_info().rss > 250 << 20, START_TIMEOUT_S, lambda: str(process))


class Liar(ControlServicer):
    """Answers with what it is given; `wait` holds every answer back."""

    def __init__(self, reply: pb.ProfileReply | Replying, *, waits: bool = False) -> None:
        self.hung_up = threading.Event()
        self._reply, self._waits = reply, waits
        self.was_fresh: list[bool] = []

    def Profile(  # noqa: N802, gRPC's name
        self, request: pb.ProfileRequest, context: grpc.ServicerContext
    ) -> pb.ProfileReply:
        self.was_fresh.append(request.fresh)
        context.add_callback(self.hung_up.set)
        while self._waits and context.is_active():
            time.sleep(0.02)
        return self._reply(request) if callable(self._reply) else self._reply


@pytest.fixture
def guest(join: Join, tmp_path: Path) -> tuple[Here, ByHand]:
    """A member that answers what the test likes, and the one that asks."""
    here = join("studio")
    guest = ByHand.invited_by(here, tmp_path / "guest")
    here.agent.admissions.admit(guest.identity.certificate)
    return here, guest


def ask_liar(
    asking: tuple[Here, ByHand], liar: Liar, *, names: tuple[str, ...] = ("laptop",), **options: Any
) -> list[BlockTimes | ExoTrainError]:
    here, guest = asking
    with guest.serve(liar) as port:
        candidates = [
            Candidate(
                node_id=guest.identity.node_id,
                name=name,
                backend="torch",
                device=f"cuda:{number}",
                usable_memory_bytes=1,
                dtypes=("fp32",),
                addresses=(Address(LOOPBACK, 9), Address(LOOPBACK, port)),
            )
            for number, name in enumerate(names)
        ]
        requests = {c.key: run_request(c) for c in candidates}
        tls_of = here.agent.admissions.tls.to
        try:
            return list(ask_profiles(candidates, requests, tls_of, **options).values())
        finally:  # while the server still runs, whose end is a caller's end too
            assert liar.hung_up.wait(SOON_S)


FIELDS = TIMES.to_fields()
FAR = {**FIELDS, "layer_forward_s": -1.0}
FREE = {**FIELDS, "layer_forward_s": 0.0, "layer_backward_s": 0.0}


@pytest.mark.parametrize(
    ("reply", "kind", "message"),
    [
        (
            pb.ProfileReply(failure=pb.Failure(kind="DoesNotFitError", message="no room")),
            DoesNotFitError,
            "^laptop: no room$",
        ),
        (
            pb.ProfileReply(failure=pb.Failure(kind="X", message="\x1b[31mred")),
            ExoTrainError,
            "^laptop: it gives no reason that can be shown$",
        ),
        (pb.ProfileReply(), PeerError, "what laptop says of its speed is not valid JSON"),
        (pb.ProfileReply(json=json.dumps(FAR)), PeerError, "what laptop says .*layer_forward_s"),
        (pb.ProfileReply(json=json.dumps(FREE)), PeerError, "what laptop says .* at least 1e-07 s"),
        (pb.ProfileReply(json="9" * 70_000), PeerError, "70000 characters, the limit is"),
    ],
    ids=["no room", "colours", "empty", "negative", "free", "long"],
)
def test_what_a_member_says_is_checked(
    guest: tuple[Here, ByHand], reply: pb.ProfileReply, kind: type[ExoTrainError], message: str
) -> None:
    liar = Liar(reply)
    with pytest.raises(kind, match=message):
        raise ask_liar(guest, liar, best_host=lambda node_id: "no such host")[0]  # type: ignore[misc]


def test_the_processors_of_a_member_are_asked_one_after_the_other(
    guest: tuple[Here, ByHand],
) -> None:
    liar = Liar(pb.ProfileReply(json=json.dumps(TIMES.to_fields()), from_cache=True))
    assert ask_liar(guest, liar, names=("pc cuda:0", "pc cuda:1")) == [TIMES, TIMES]
    assert len(liar.was_fresh) == 2


def test_fresh_times_are_taken_once_for_gpus_of_one_chip(guest: tuple[Here, ByHand]) -> None:
    names = ("pc cuda:0", "pc cuda:1", "pc cuda:2")

    def of_one_chip(asked: pb.ProfileRequest) -> pb.ProfileReply:
        return pb.ProfileReply(json=json.dumps(FIELDS), from_cache=not asked.fresh)

    assert ask_liar(guest, liar := Liar(of_one_chip), names=names, fresh=True) == [TIMES] * 3
    assert liar.was_fresh == [True, False, False]

    def of_two_chips(asked: pb.ProfileRequest) -> pb.ProfileReply:
        is_first = json.loads(asked.json)["device"] == "cuda:0"
        times = {} if is_first else {"layer_forward_s": 0.5 if asked.fresh else 0.7}
        return pb.ProfileReply(json=json.dumps({**FIELDS, **times}), from_cache=not asked.fresh)

    answers = ask_liar(guest, liar := Liar(of_two_chips), names=names[:2], fresh=True)
    assert [a.layer_forward_s for a in answers if isinstance(a, BlockTimes)] == [0.01, 0.5]
    assert liar.was_fresh == [True, False, True], "what is known is from before"


def test_a_member_that_does_not_answer_costs_no_more_than_the_limit(
    guest: tuple[Here, ByHand],
) -> None:
    liar = Liar(pb.ProfileReply(), waits=True)
    notes: list[str] = []
    started_s = time.monotonic()
    (answer,) = ask_liar(guest, liar, timeout_s=1.5, on_note=notes.append)
    assert time.monotonic() - started_s < 1.5 + 2.0
    with pytest.raises(PeerLostError, match=r"laptop has not timed a layer .* within 1.5 s"):
        raise answer  # type: ignore[misc]
    assert notes == ["measuring laptop"]


def test_a_user_who_stops_hangs_up_on_all(guest: tuple[Here, ByHand]) -> None:
    liar = Liar(pb.ProfileReply(), waits=True)
    started_s = time.monotonic()
    with pytest.raises(InterruptedRunError, match="stopped while the devices were timed"):
        ask_liar(guest, liar, wants_stop=lambda: bool(liar.was_fresh))
    assert time.monotonic() - started_s < SOON_S
