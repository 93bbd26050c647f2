"""Who asks a device how fast it is gets an answer in turn: measured once, and never for long."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from exo_train.agent.profiler_process import NotWantedError
from exo_train.agent.profiles import MAX_WAITING, Profiles, profiler_bytes
from exo_train.cluster.profile_cache import ProfileCache
from exo_train.errors import (
    ConfigError,
    DoesNotFitError,
    ExoTrainError,
    ModelError,
    PeerError,
)
from exo_train.peer import ComputeDevice, DeviceFacts, NodeId
from exo_train.plan.block_times import BlockTimes, ProfileRequest
from tests.agent.profile_requests import request
from tests.agent.running_agents import wait_until
from tests.tiny_models import tiny_config

SOON_S = 5.0


class FakeDevice:
    """Measures when it is told to; each measurement is 1 ms slower than the one before."""

    def __init__(self) -> None:
        self.measured: list[ProfileRequest] = []
        self.num_at_once = self.most_at_once = 0
        self.may_end = threading.Event()
        self.may_end.set()
        self.failure: ExoTrainError | None = None
        self.limits_s: list[float] = []
        self._lock = threading.Lock()

    def __call__(
        self,
        request: ProfileRequest,
        *,
        timeout_s: float,
        log_path: Path,
        is_wanted: Callable[[], bool],
    ) -> BlockTimes:
        with self._lock:
            self.measured.append(request)
            self.limits_s.append(timeout_s)
            self.num_at_once += 1
            self.most_at_once = max(self.most_at_once, self.num_at_once)
        try:
            while not self.may_end.wait(0.01):
                if not is_wanted():
                    raise NotWantedError("not wanted")
            if self.failure is not None:
                raise self.failure
            return BlockTimes(
                layer_forward_s=0.001 * len(self.measured),
                layer_backward_s=0.02,
                overhead_s=0.0,
                layer_update_s=0.0,
                slowdown=1.0,
                num_repetitions=20,
            )
        finally:
            with self._lock:
                self.num_at_once -= 1


FACTS = DeviceFacts(
    node_id=NodeId("a" * 32),
    name="den-pc",
    backend="torch",
    device="cuda:0",
    chip="RTX 3060",
    memory_bytes=12 * 10**9,
    usable_memory_bytes=10 * 10**9,
    dtypes=("bf16",),
    version="0.1.0",
    more_devices=(
        ComputeDevice(
            device="cuda:1",
            chip="RTX 4090",
            memory_bytes=24 * 10**9,
            free_memory_bytes=23 * 10**9,
            usable_memory_bytes=20 * 10**9,
            dtypes=("bf16",),
        ),
    ),
)


class Desk:
    """One device's answering side, asked by several threads."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.device = FakeDevice()
        self.cache = ProfileCache(folder / "cache")
        self.facts = FACTS
        self.run_id = ""
        self.profiles = Profiles(
            lambda: self.facts,
            cache=self.cache,
            log_path=folder / "log",
            run_id=lambda: self.run_id,
            measure=self.device,
            **options,
        )
        self._pool = ThreadPoolExecutor(16)

    def ask(
        self,
        *,
        fresh: bool = False,
        is_wanted: Callable[[], bool] = lambda: True,
        **changed: Any,
    ) -> Future[tuple[BlockTimes, bool]]:
        asked = request(**{"device": "cuda:0", **changed})
        return self._pool.submit(self.profiles.answer, asked, fresh=fresh, is_wanted=is_wanted)

    def wait_measuring(self, number: int) -> None:
        wait_until(
            lambda: len(self.device.measured) == number, SOON_S, lambda: str(self.device.measured)
        )

    def close(self) -> None:
        self.device.may_end.set()
        self._pool.shutdown()


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    with contextlib.closing(Desk(tmp_path)) as desk:
        yield desk


def test_what_was_measured_is_remembered_and_fresh_measures_again(desk: Desk) -> None:
    first, was_known = desk.ask().result(SOON_S)
    assert (first.layer_forward_s, was_known) == (0.001, False)
    assert desk.ask().result(SOON_S) == (first, True)
    again, was_known = desk.ask(fresh=True).result(SOON_S)
    assert (again.layer_forward_s, was_known) == (0.002, False)
    assert desk.ask().result(SOON_S) == (again, True)
    assert len(desk.device.measured) == 2
    assert min(desk.device.limits_s) >= 60


def test_one_at_a_time_and_who_asked_the_same_gets_what_the_first_got(desk: Desk) -> None:
    desk.device.may_end.clear()
    first = desk.ask()
    desk.wait_measuring(1)
    same, same_and_fresh, other = desk.ask(), desk.ask(fresh=True), desk.ask(sequence=32)
    time.sleep(0.3)
    assert len(desk.device.measured) == 1
    desk.device.may_end.set()
    times, was_known = first.result(SOON_S)
    assert not was_known
    assert same.result(SOON_S) == (times, True)
    assert same_and_fresh.result(SOON_S) == (times, True), "measured after it was asked for"
    assert other.result(SOON_S)[1] is False
    assert desk.device.most_at_once == 1
    assert sorted(asked.sequence for asked in desk.device.measured) == [16, 32]


def test_each_processor_has_its_own_times_and_no_other_is_measured(desk: Desk) -> None:
    first, second = (desk.ask(device=d).result(SOON_S) for d in ("cuda:0", "cuda:1"))
    assert first[0] != second[0]
    assert [asked.device for asked in desk.device.measured] == ["cuda:0", "cuda:1"]
    for changed in ({"device": "cuda:2"}, {"device": "cpu"}, {"backend": "mlx"}):
        with pytest.raises(ConfigError, match=r"den-pc: it offers torch on cuda:0, cuda:1, not "):
            desk.ask(**changed).result(SOON_S)
    with pytest.raises(ConfigError, match=r"den-pc: a microbatch of 4096 x 4096 positions"):
        desk.ask(microbatch_size=4096, sequence=4096).result(SOON_S)
    with pytest.raises(ModelError, match=r"den-pc: .*num_attention_heads"):
        desk.ask(config_json='{"model_type": "llama"}').result(SOON_S)
    assert len(desk.device.measured) == 2


def test_a_failure_names_the_device_and_is_not_remembered(desk: Desk) -> None:
    desk.device.failure = DoesNotFitError("timing a layer on torch cuda:0: no room")
    with pytest.raises(DoesNotFitError, match=r"^den-pc: timing a layer .*: no room$"):
        desk.ask().result(SOON_S)
    desk.device.failure = None
    assert desk.ask().result(SOON_S)[1] is False


def test_few_wait_and_not_for_ever(tmp_path: Path) -> None:
    with contextlib.closing(Desk(tmp_path, turn_timeout_s=1.0)) as desk:
        desk.device.may_end.clear()
        first = desk.ask()
        desk.wait_measuring(1)
        waiting = [desk.ask(sequence=17 + i) for i in range(MAX_WAITING)]
        time.sleep(0.3)
        with pytest.raises(PeerError, match=rf"den-pc: {MAX_WAITING} others wait already"):
            desk.ask(sequence=99).result(SOON_S)
        for one in waiting:
            with pytest.raises(PeerError, match=r"den-pc: others had a layer timed here for 1 s"):
                one.result(SOON_S)
        desk.device.may_end.set()
        assert first.result(SOON_S)[1] is False
        assert desk.ask(sequence=99).result(SOON_S)[1] is False, "those places are free again"


def test_who_hangs_up_frees_the_device_and_so_does_the_agents_end(desk: Desk) -> None:
    desk.device.may_end.clear()
    here = threading.Event()
    first = desk.ask(is_wanted=lambda: not here.is_set())
    desk.wait_measuring(1)
    next_one = desk.ask(sequence=32)
    gone_while_waiting = desk.ask(sequence=33, is_wanted=lambda: not here.is_set())
    time.sleep(0.2)
    here.set()
    for one in (first, gone_while_waiting):
        with pytest.raises(NotWantedError):
            one.result(SOON_S)
    desk.wait_measuring(2)
    desk.profiles.close()
    with pytest.raises(NotWantedError):
        next_one.result(0.1)
    with pytest.raises(NotWantedError):
        desk.ask(sequence=34).result(SOON_S)
    assert [asked.sequence for asked in desk.device.measured] == [16, 32]


# Llama 3.1 70B, of which the profiler makes two layers: 2 x 855 million values.
LARGE = tiny_config(
    num_layers=80,
    hidden_size=8192,
    intermediate_size=28672,
    num_heads=64,
    num_kv_heads=8,
    vocab_size=128256,
)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"config_json": json.dumps(LARGE), "compute_dtype": "fp32"},
            r"^den-pc: timing two layers of this model there needs 7\.\d GB, more than the 6\.0 GB "
            r"of den-pc cuda:0; use a smaller --max-seq-length or --microbatch-size",
        ),
        ({"sequence": 1 << 20}, r"needs \d+\.\d GB, more than the 6\.0 GB of den-pc cuda:0;"),
        (  # of the head, whose matrix is larger than two layers
            {
                "config_json": json.dumps(tiny_config(hidden_size=4096, vocab_size=400_000)),
                "with_ends": True,
            },
            r"needs \d+\.\d GB, more than the 6\.0 GB of den-pc cuda:0;",
        ),
    ],
    ids=["layer", "positions", "end"],
)
def test_nothing_is_started_that_has_no_room(
    desk: Desk, changed: dict[str, Any], message: str
) -> None:
    desk.facts = dataclasses.replace(FACTS, usable_memory_bytes=6 * 10**9)
    with pytest.raises(DoesNotFitError, match=message):
        desk.ask(**changed).result(SOON_S)
    assert desk.device.measured == []
    assert desk.ask(device="cuda:1", **changed).result(SOON_S)[1] is False, "20 GB are free there"


def test_room_is_reckoned_for_the_microbatch_that_is_asked_for() -> None:
    one, two = (profiler_bytes(request(microbatch_size=n, sequence=4096)) for n in (1, 2))
    longer = profiler_bytes(request(microbatch_size=1, sequence=8192))
    assert one < two == longer


def test_what_is_known_needs_no_room(desk: Desk) -> None:
    desk.ask().result(SOON_S)
    desk.facts = dataclasses.replace(FACTS, usable_memory_bytes=1)
    assert desk.ask().result(SOON_S)[1] is True
    with pytest.raises(DoesNotFitError, match=r"more than the 0\.1 MB of den-pc cuda:0"):
        desk.ask(fresh=True).result(SOON_S)


def test_a_device_that_trains_answers_only_what_it_knows(desk: Desk) -> None:
    known = desk.ask().result(SOON_S)[0]
    desk.run_id = "blue7"
    assert desk.ask().result(SOON_S) == (known, True)
    sentence = (
        r"^den-pc is training now \(run blue7\); a layer cannot be timed there until that ends$"
    )
    for changed in ({"fresh": True}, {"sequence": 32}):
        with pytest.raises(PeerError, match=sentence):
            desk.ask(**changed).result(SOON_S)
    assert len(desk.device.measured) == 1
    desk.run_id = ""
    assert desk.ask(sequence=32).result(SOON_S)[1] is False


def test_a_run_that_ends_just_now_is_waited_for_and_one_that_begins_goes_first(desk: Desk) -> None:
    desk.run_id = "blue7"
    asked = desk.ask()
    time.sleep(0.3)
    desk.run_id = ""
    assert asked.result(SOON_S)[1] is False
    desk.device.may_end.clear()
    asked = desk.ask(sequence=32)
    desk.wait_measuring(2)
    desk.run_id = "red8"
    with pytest.raises(PeerError, match=r"^den-pc is training now \(run red8\)"):
        asked.result(SOON_S)
    assert desk.device.num_at_once == 0, "the measurement has ended"


def test_gpus_of_one_chip_share_what_was_measured(desk: Desk) -> None:
    (other,) = FACTS.more_devices
    desk.facts = dataclasses.replace(
        FACTS, more_devices=(dataclasses.replace(other, chip=FACTS.chip), other_gpu(other))
    )
    first = desk.ask(device="cuda:0").result(SOON_S)[0]
    assert desk.ask(device="cuda:1").result(SOON_S) == (first, True)
    assert desk.ask(device="cuda:2").result(SOON_S)[1] is False
    assert desk.ask(device="cuda:1", compute_dtype="bf16").result(SOON_S)[1] is False


def other_gpu(device: ComputeDevice) -> ComputeDevice:
    return dataclasses.replace(device, device="cuda:2")


def test_a_failure_is_told_in_one_line(desk: Desk) -> None:
    desk.device.failure = ExoTrainError("RuntimeError: no kernel\n  for this\tdevice\n")
    with pytest.raises(ExoTrainError, match=r"^den-pc: RuntimeError: no kernel for this device$"):
        desk.ask().result(SOON_S)
