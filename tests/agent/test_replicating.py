"""Copies of a run on another device, over gRPC with TLS: another member can go on with them."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from exo_train.agent.replicating import Holder, Replicator
from exo_train.agent.resuming import check_unfinished, kept_data, newest, resumed_options
from exo_train.errors import PeerError
from exo_train.peer import Address
from exo_train.train.disk_pause import DiskPause
from exo_train.train.rundir import RunDir
from exo_train.train.saving import Saver
from exo_train.wire.pb import control_pb2 as pb
from exo_train.wire.pb.control_pb2_grpc import ControlServicer
from tests.agent.agents_here import LOOPBACK, ByHand, Here
from tests.agent.conftest import Join
from tests.agent.run_copies import (
    RUN_ID,
    checkpoint_files,
    copy_of,
    head_of,
    held,
    make_run,
    newest_value,
    pieces_of,
    save_step,
)

pytestmark = pytest.mark.xdist_group("agents-here")


def holder(by: ByHand, here: Here, *addresses: Address) -> Holder:
    return Holder(
        node_id=here.id,
        name=here.name,
        addresses=addresses or (Address(LOOPBACK, here.port),),
        tls=by.tls.to(here.id),
    )


def copy_on(here: Here) -> Path:
    return here.home.replicas / RUN_ID


class Leading:
    """A run that a member leads, and where its copies go."""

    def __init__(self, member: ByHand, run: Path, *holders: Holder, **settings: Any) -> None:
        self.run = run
        self.holders = list(holders)
        self.notes: list[str] = []
        self.replicator = Replicator(
            RUN_ID, run, holders=lambda: self.holders, on_note=self.notes.append, **settings
        )
        pause = DiskPause(device="den-pc", say=self.notes.append)
        self.saver = Saver(run, keep=2, pause=pause, replicate=self.replicator.replicate)

    def save(self, step: int, *, num_values: int = 1000) -> None:
        adapter = {"layers.0.lora_a": np.full(num_values, step, np.float32)}
        self.saver.save(step, adapter, {"step": np.array(step)}, {"tokens": step})


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_run(tmp_path / "rün 1").path


def test_an_adapter_that_a_run_starts_from_is_with_the_successor(
    join: Join, tmp_path: Path, run: Path
) -> None:
    """Until a later checkpoint is there: formed anew after that, it must not come again."""
    attic = join("attic")
    den = ByHand.invited_by(attic, tmp_path / "den")
    leading = Leading(den, run, holder(den, attic), first=save_step(run, 0))
    leading.replicator.try_run_files()
    assert newest_value(copy_on(attic)) == (0, 0.0)
    leading.save(20)
    (run / "metrics.jsonl").write_text("{}\n")
    leading.replicator.try_run_files()
    assert newest_value(copy_on(attic)) == (20, 20.0)
    assert 20 in held(copy_on(attic))


def test_another_member_can_go_on_with_what_it_holds(join: Join, tmp_path: Path, run: Path) -> None:
    """All that `train --resume` reads is there, without the model's and data's old places."""
    attic = join("attic")
    den = ByHand.invited_by(attic, tmp_path / "den")
    leading = Leading(den, run, holder(den, attic))
    leading.replicator.try_run_files()
    for step in (20, 40, 60):
        (run / "metrics.jsonl").write_text(
            "".join(f'{{"step": {n}, "loss": 1}}\n' for n in range(1, step))
        )
        leading.save(step, num_values=3_000_000)  # 12 MB: several pieces
    copy = copy_on(attic)
    assert held(copy) == [40, 60]
    assert newest_value(copy) == (60, 60.0)
    for step in ("step-000040", "step-000060"):
        for local in checkpoint_files(run / "checkpoints" / step):
            assert (copy / "checkpoints" / step / local.name).read_bytes() == local.read_bytes()
    check_unfinished(copy)
    options = resumed_options(copy, {"model": "/attic/llama"})
    with RunDir.open(copy).in_use():
        checkpoint = newest(copy, on_note=leading.notes.append, options=options)
    assert checkpoint is not None
    assert checkpoint.step == 60
    assert len(RunDir(copy).read_metrics()) == 59
    assert kept_data(copy, options, vocab_size=10) is not None
    assert leading.notes[0] == "attic keeps a copy of the run and of its checkpoints"


def unused_port() -> int:
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])


@pytest.mark.parametrize("is_listed", [True, False], ids=["unreachable", "gone from the cluster"])
def test_the_next_device_takes_over_all_of_it_when_one_fails(
    join: Join, tmp_path: Path, run: Path, is_listed: bool
) -> None:
    attic = join("attic")
    hall = join("hall", attic)
    den = ByHand.invited_by(hall, tmp_path / "den")  # who knows both
    leading = Leading(den, run, holder(den, attic), holder(den, hall))
    leading.save(20)
    assert held(copy_on(attic)) == [20]
    assert not copy_on(hall).exists()
    del leading.holders[0]
    if is_listed:
        leading.holders.insert(0, holder(den, attic, Address(LOOPBACK, unused_port())))
    leading.save(40)
    leading.save(60)
    assert newest_value(copy_on(hall)) == (60, 60.0)
    assert (copy_on(hall) / "config.yaml").exists()
    assert held(copy_on(attic)) == [20]
    # It is back; what works is not left.
    leading.holders.insert(0, holder(den, attic))
    leading.save(80)
    assert newest_value(copy_on(hall)) == (80, 80.0)
    assert held(copy_on(attic)) == [20]
    assert leading.notes == [
        f"{name} keeps a copy of the run and of its checkpoints" for name in ("attic", "hall")
    ]


def test_without_any_device_it_is_saved_here_and_the_reasons_are_said(
    join: Join, tmp_path: Path, run: Path
) -> None:
    attic = join("attic")
    den = ByHand.invited_by(attic, tmp_path / "den")
    port = unused_port()
    leading = Leading(den, run, holder(den, attic, Address(LOOPBACK, port)))
    leading.save(20)
    leading.save(40)
    assert newest_value(run) == (40, 40.0)
    (note,) = leading.notes
    assert note == (
        "the checkpoints are on den-pc only: no other device keeps a copy: attic cannot be "
        f"reached (127.0.0.1:{port})"
    )
    leading.holders.clear()
    leading.save(60)
    assert leading.notes[1].endswith("there is none in the cluster now")


def test_a_device_that_lost_its_copy_gets_all_of_it_again(
    join: Join, tmp_path: Path, run: Path
) -> None:
    import shutil

    attic = join("attic")
    den = ByHand.invited_by(attic, tmp_path / "den")
    leading = Leading(den, run, holder(den, attic))
    leading.save(20)
    shutil.rmtree(copy_on(attic))
    leading.save(40)
    assert "attic has no config.yaml of run" in leading.notes[1]
    leading.save(60)
    assert newest_value(copy_on(attic)) == (60, 60.0)
    assert (copy_on(attic) / "config.yaml").exists()


def test_a_coordinator_that_was_asleep_cannot_undo_its_successor(
    join: Join, tmp_path: Path, run: Path
) -> None:
    """The certificates say who is who; the sleeper keeps its own checkpoints and hears why."""
    attic = join("attic")
    den = ByHand.invited_by(attic, tmp_path / "den")
    hall = ByHand.invited_by(attic, tmp_path / "hall")
    asleep = Leading(den, run, holder(den, attic), takes_over=True)
    asleep.save(20)
    other_run = make_run(tmp_path / "copy").path
    intruder = Leading(hall, other_run, holder(hall, attic))
    intruder.save(30)
    assert held(copy_on(attic)) == [20], "it says nowhere that it has resumed the run"
    successor = Leading(hall, other_run, holder(hall, attic), takes_over=True)
    successor.save(60)
    asleep.save(40)
    assert newest_value(copy_on(attic)) == (60, 60.0)
    assert newest_value(run) == (40, 40.0)
    assert "which started it or has taken it over" in asleep.notes[-1]
    successor.save(80)
    assert newest_value(copy_on(attic)) == (80, 80.0)


class Silent(ControlServicer):
    """Takes the call, reads nothing and never answers."""

    def __init__(self) -> None:
        self.released = threading.Event()

    def KeepReplica(self, request_iterator: Any, context: Any) -> pb.ReplicaKept:  # noqa: N802
        self.released.wait(60)
        return pb.ReplicaKept()


def test_a_device_that_goes_silent_is_left(join: Join, tmp_path: Path, run: Path) -> None:
    attic = join("attic")
    hall = ByHand.invited_by(attic, tmp_path / "hall")
    attic.agent.admissions.admit(hall.identity.certificate)
    den = ByHand.invited_by(attic, tmp_path / "den")
    servicer = Silent()
    with hall.serve(servicer) as port:
        silent = Holder(
            node_id=hall.identity.node_id,
            name="hall",
            addresses=(Address(LOOPBACK, port),),
            tls=den.tls.to(hall.identity.node_id),
        )
        leading = Leading(den, run, silent, holder(den, attic), stall_timeout_s=0.5)
        leading.save(20)
        assert newest_value(copy_on(attic)) == (20, 20.0)
        leading.holders.pop()
        with pytest.raises(PeerError, match=r"hall took nothing for 0 s"):
            leading.replicator.replicate(run / "checkpoints" / "step-000020", 20, [])
        servicer.released.set()


@contextlib.contextmanager
def call(
    den: ByHand, attic: Here, pieces: Iterator[pb.ReplicaPiece], timeout_s: float | None
) -> Iterator[grpc.RpcError]:
    with den.control_of(attic) as control:
        with pytest.raises(grpc.RpcError) as caught:
            control.KeepReplica(pieces, timeout=timeout_s)
        yield caught.value


def test_lies_are_refused_as_what_they_are(join: Join, tmp_path: Path, run: Path) -> None:
    attic = join("attic")
    den = ByHand.invited_by(attic, tmp_path / "den")
    config = run / "config.yaml"
    for pieces, timeout_s in (
        (copy_of(config, step=0), None),  # a call without an end
        (copy_of(config, step=0), 10**6),
        (copy_of(config, step=0, run_id="../../x"), 10.0),
        (pieces_of(head_of(config, step=0), b"other bytes"), 10.0),
    ):
        with call(den, attic, pieces, timeout_s) as error:
            assert isinstance(error, grpc.Call)
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert attic.agent.gate.counts() == {"malformed": 4}
    assert not (attic.home.path.parent / "x").exists()


def test_a_sender_that_dies_leaves_the_copy_free(join: Join, tmp_path: Path, run: Path) -> None:
    """Its call ends in the middle of a file; the next one finds no lock and no leftovers."""
    attic = join("attic")
    den = ByHand.invited_by(attic, tmp_path / "den")
    leading = Leading(den, run, holder(den, attic))
    leading.save(20)
    stay = threading.Event()

    def dying() -> Iterator[pb.ReplicaPiece]:
        pieces = list(copy_of(*checkpoint_files(save_step(run, 40)), step=40))
        yield from pieces[:2]
        stay.wait(20)

    with den.control_of(attic) as control:
        sending = control.KeepReplica.future(dying(), timeout=30)
        with pytest.raises(grpc.FutureTimeoutError):
            sending.result(timeout=0.5)
        with call(den, attic, copy_of(run / "plan.json", step=0), None):
            pass
        sending.cancel()
    stay.set()
    for _ in range(100):
        leading.save(60)
        if held(copy_on(attic))[-1] == 60:
            break
    assert newest_value(copy_on(attic)) == (60, 60.0)
    assert not (copy_on(attic) / ".incoming").exists()
