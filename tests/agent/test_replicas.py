"""What an agent keeps of others' runs: whole, of its writer only, and within its own disk."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest

from exo_train.agent import replicas
from exo_train.agent.replicas import MAX_RUNS, Replicas
from exo_train.agent.resuming import resumed_options
from exo_train.errors import PeerError, ProtocolError
from exo_train.peer import NodeId
from exo_train.train.rundir import RunDir
from exo_train.wire.pb import control_pb2 as pb
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

ANN, BOB = NodeId("a" * 32), NodeId("b" * 32)
DAY_S = 24 * 3600.0
Pieces = Iterator[pb.ReplicaPiece]


class Kept:
    """A run of Ann's, and what the device `attic` keeps of it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.run = make_run(root / "rün").path
        self.now_s = 1e9
        self.keeping = self.replicas()
        self.copy = root / "replicas" / RUN_ID

    def replicas(self, *, spare_bytes: int = 0) -> Replicas:
        return Replicas(
            self.root / "replicas",
            device="attic",
            spare_bytes=spare_bytes,
            now_s=lambda: self.now_s,
        )

    def send_run_files(self, caller: NodeId = ANN, **changes: object) -> None:
        paths = [self.run / name for name in ("config.yaml", "plan.json", "rows.safetensors")]
        self.keeping.keep(copy_of(*paths, step=0, **changes), caller)

    def send_step(self, step: int, caller: NodeId = ANN, **changes: object) -> None:
        folder = save_step(self.run, step)
        self.keeping.keep(copy_of(*checkpoint_files(folder), step=step, **changes), caller)

    def leftovers(self) -> list[str]:
        """Name what is there beside what should be."""
        usual = {"config.yaml", "plan.json", "rows.safetensors", "checkpoints", ".lock", ".writer"}
        return [p.name for p in self.copy.iterdir() if p.name not in usual] + [
            p.name for p in self.copy.glob("checkpoints/.*")
        ]


@pytest.fixture
def kept(tmp_path: Path) -> Kept:
    return Kept(tmp_path)


def test_what_a_run_starts_from_is_kept_as_its_step_0(kept: Kept) -> None:
    with pytest.raises(PeerError, match=r"attic has no config\.yaml"):
        kept.send_step(0)
    kept.send_run_files()
    kept.send_step(0)
    assert newest_value(kept.copy) == (0, 0.0)
    kept.send_step(20)
    assert held(kept.copy) == [20]


def test_a_copy_is_laid_out_like_a_run_and_can_be_resumed(kept: Kept) -> None:
    kept.send_run_files()
    kept.send_step(20)
    kept.send_step(40, keep_steps=[20])
    assert newest_value(kept.copy) == (40, 40.0)
    assert resumed_options(kept.copy, {"model": "/m"}).rank == 4
    for name in ("config.yaml", "plan.json", "rows.safetensors"):
        assert (kept.copy / name).read_bytes() == (kept.run / name).read_bytes()
    assert kept.leftovers() == []


def test_steps_that_the_run_keeps_no_more_go(kept: Kept) -> None:
    kept.send_run_files()
    for step, others in ((20, []), (40, [20]), (60, [20, 40]), (1_000_000, [20, 60])):
        kept.send_step(step, keep_steps=others)
    assert held(kept.copy) == [20, 60, 1_000_000]
    # The run was resumed from an older one: what came after it is another history.
    kept.send_step(30, keep_steps=[20])
    assert held(kept.copy) == [20, 30]


def test_a_step_sent_again_replaces_it(kept: Kept) -> None:
    kept.send_run_files()
    kept.send_step(20)
    (kept.copy / "checkpoints" / "step-000020" / "adapter.safetensors").write_bytes(b"rotten")
    kept.send_step(20)
    assert newest_value(kept.copy) == (20, 20.0)


def other_content(kept: Kept) -> Pieces:
    """The right sizes, but a byte is another."""
    files = checkpoint_files(save_step(kept.run, 40))
    contents = [path.read_bytes() for path in files]
    contents[0] = contents[0][:-1] + bytes([contents[0][-1] ^ 1])
    return pieces_of(head_of(*files, step=40), *contents)


def cut_short(kept: Kept) -> Pieces:
    return iter(list(copy_of(*checkpoint_files(save_step(kept.run, 40)), step=40))[:-1])


def too_long(kept: Kept) -> Pieces:
    yield from copy_of(*checkpoint_files(save_step(kept.run, 40)), step=40)
    yield pb.ReplicaPiece(data=b"more")


def two_heads(kept: Kept) -> Pieces:
    pieces = list(copy_of(*checkpoint_files(save_step(kept.run, 40)), step=40))
    return iter([pieces[0], pieces[0], *pieces[1:]])


def of_another_step(kept: Kept) -> Pieces:
    return copy_of(*checkpoint_files(save_step(kept.run, 40)), step=50)


def of_two_steps(kept: Kept) -> Pieces:
    """Each file is whole, but the manifest is of others."""
    files = checkpoint_files(save_step(kept.run, 40))
    mixed = [checkpoint_files(save_step(kept.run, 60))[0], *files[1:]]
    return copy_of(*mixed, step=40)


def pickled_manifest(kept: Kept) -> Pieces:
    import pickle

    files = checkpoint_files(save_step(kept.run, 40))
    files[2].write_bytes(pickle.dumps({"step": 40}))
    return copy_of(*files, step=40)


def without_manifest(kept: Kept) -> Pieces:
    return copy_of(*checkpoint_files(save_step(kept.run, 40))[:2], step=40)


def empty_pieces(kept: Kept) -> Pieces:
    """They would keep the copy's lock for ever, and look like progress."""
    files = checkpoint_files(save_step(kept.run, 40))
    return pieces_of(head_of(*files, step=40), b"")


def renamed(name: str) -> Callable[[Kept], Pieces]:
    def named(kept: Kept) -> Pieces:
        pieces = list(copy_of(kept.run / "plan.json", step=0))
        pieces[0].head.files[0].name = name
        return iter(pieces)

    return named


def of_run(run_id: str) -> Callable[[Kept], Pieces]:
    return lambda kept: copy_of(kept.run / "plan.json", step=0, run_id=run_id)


def no_digest(kept: Kept) -> Pieces:
    pieces = list(copy_of(kept.run / "plan.json", step=0))
    pieces[0].head.files[0].sha256 = "../x"
    return iter(pieces)


def nothing(kept: Kept) -> Pieces:
    return iter(())


def thousands_of_steps(kept: Kept) -> Pieces:
    files = checkpoint_files(save_step(kept.run, 40))
    return copy_of(*files, step=40, keep_steps=list(range(1, 10_002)))


@pytest.mark.parametrize(
    "lie",
    [
        other_content, cut_short, too_long, two_heads, of_another_step, of_two_steps,
        pickled_manifest, without_manifest, empty_pieces, no_digest, nothing, thousands_of_steps,
        renamed("../x"), renamed("/etc/x"), renamed(".lock"), renamed(".writer"), renamed(""),
        renamed("adapter.safetensors"), renamed("x\0y"), of_run("../x"), of_run(""), of_run("."),
        of_run("a/b"), of_run("é"), of_run("a" * 65), of_run("x y"),
    ],
)  # fmt: skip
def test_what_breaks_the_rules_changes_nothing(
    kept: Kept, lie: Callable[[Kept], Pieces], request: pytest.FixtureRequest
) -> None:
    kept.send_run_files()
    kept.send_step(20)
    before = {path: path.stat().st_mtime_ns for path in kept.copy.rglob("*") if path.is_file()}
    with pytest.raises(ProtocolError):
        kept.keeping.keep(lie(kept), ANN)
    after = {path: path.stat().st_mtime_ns for path in kept.copy.rglob("*") if path.is_file()}
    assert {path.name for path in after} == {path.name for path in before}
    assert all(after[path] == before[path] for path in before if path.name != ".lock")
    assert newest_value(kept.copy) == (20, 20.0)
    assert kept.leftovers() == []
    assert [path.name for path in (kept.root / "replicas").iterdir()] == [RUN_ID]


def test_a_sender_that_breaks_off_leaves_the_old_one(kept: Kept) -> None:
    kept.send_run_files()
    kept.send_step(20)

    def broken() -> Pieces:
        pieces = list(copy_of(*checkpoint_files(save_step(kept.run, 40)), step=40))
        yield from pieces[:2]
        raise grpc.RpcError

    with pytest.raises(grpc.RpcError):
        kept.keeping.keep(broken(), ANN)
    assert newest_value(kept.copy) == (20, 20.0)
    assert kept.leftovers() == []


def test_only_its_writer_may_change_a_copy(kept: Kept) -> None:
    kept.send_run_files()
    kept.send_step(20)
    for send in (kept.send_run_files, lambda caller: kept.send_step(40, caller)):
        with pytest.raises(PeerError, match="attic keeps run 0123abcd for device aaaaaaaa"):
            send(BOB)
    assert held(kept.copy) == [20]


def test_who_resumes_a_run_takes_its_copy_over(kept: Kept) -> None:
    """And the one that led it before, back from sleep, cannot undo what was saved since."""
    kept.send_run_files()
    kept.send_step(20)
    kept.send_run_files(BOB, takes_over=True)
    kept.send_step(40, BOB, keep_steps=[20])
    with pytest.raises(PeerError, match="for device bbbbbbbb, which started it or has taken it"):
        kept.send_step(30, ANN)
    assert held(kept.copy) == [20, 40]
    kept.send_run_files(ANN, takes_over=True)  # resumed there on purpose
    kept.send_step(60, ANN, keep_steps=[20, 40])
    assert held(kept.copy) == [20, 40, 60]


def test_a_copy_that_is_trained_on_here_is_left_alone(kept: Kept) -> None:
    kept.send_run_files()
    kept.send_step(20)
    with (
        RunDir(kept.copy).in_use(),
        pytest.raises(PeerError, match="attic cannot keep a copy of run 0123abcd: another process"),
    ):
        kept.send_step(40, keep_steps=[20])
    assert held(kept.copy) == [20]


def test_a_late_writer_deletes_no_results(kept: Kept) -> None:
    """This device took the run over and is done; its coordinator wakes up and goes on copying."""
    kept.send_run_files()
    kept.send_step(20)
    save_step(kept.copy, 60)
    (kept.copy / "summary.json").write_text('{"status": "done"}')
    before = (kept.copy / "plan.json").read_bytes()
    (kept.run / "plan.json").write_text("{}")
    for changes in ({}, {"takes_over": True}):
        with pytest.raises(PeerError, match="run 0123abcd was trained on here, by attic"):
            kept.send_run_files(**changes)
        with pytest.raises(PeerError, match="was trained on here"):
            kept.send_step(40, keep_steps=[20], **changes)
    assert held(kept.copy) == [20, 60]
    assert (kept.copy / "plan.json").read_bytes() == before


def test_a_full_disk_is_named_and_nothing_is_taken(kept: Kept) -> None:
    kept.send_run_files()
    kept.send_step(20)
    kept.keeping = kept.replicas(spare_bytes=10**18)
    with pytest.raises(PeerError, match=r"the disk of attic is full: a copy of step 40 .* needs"):
        kept.send_step(40, keep_steps=[20])
    files = checkpoint_files(save_step(kept.run, 60))
    huge = list(copy_of(*files, step=60))
    huge[0].head.files[0].size_bytes = 2**63
    kept.keeping = kept.replicas()
    with pytest.raises(PeerError, match="the disk of attic is full"):
        kept.keeping.keep(iter(huge), ANN)
    assert held(kept.copy) == [20]
    assert kept.leftovers() == []


def test_a_checkpoint_without_the_runs_options_is_no_use(kept: Kept) -> None:
    with pytest.raises(PeerError, match=r"attic has no config.yaml of run 0123abcd"):
        kept.send_step(20)


def test_copies_that_nobody_touches_go_when_a_new_run_comes(
    kept: Kept, caplog: pytest.LogCaptureFixture
) -> None:
    kept.send_run_files()
    kept.now_s = time.time() + 29 * DAY_S
    kept.send_run_files(run_id="second")
    assert kept.copy.exists()
    kept.now_s = time.time() + 31 * DAY_S
    kept.send_run_files()  # no new run: it stays
    assert kept.copy.exists()
    with RunDir(kept.copy).in_use():
        kept.send_run_files(run_id="third")
    assert kept.copy.exists(), "it is trained on"
    (kept.copy / "summary.json").write_text("{}")
    kept.send_run_files(run_id="fourth")
    assert kept.copy.exists(), "the results of having been trained on here are in it"
    (kept.copy / "summary.json").unlink()
    kept.send_run_files(run_id="fifth")
    assert not kept.copy.exists()
    assert "the copy of run 0123abcd is deleted: it was not touched for 31 days" in caplog.text


def test_an_old_copy_is_deleted_with_no_file_open_in_it(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows would refuse it else."""
    kept.send_run_files()
    kept.send_step(20)
    kept.now_s = time.time() + 31 * DAY_S
    delete, was_free = shutil.rmtree, []

    def rmtree(path: Path, **options: bool) -> None:
        if path == kept.copy:
            with RunDir(path).in_use():
                was_free.append(path)
        delete(path, **options)

    monkeypatch.setattr(replicas.shutil, "rmtree", rmtree)
    kept.send_run_files(run_id="second")
    assert was_free == [kept.copy]
    assert not kept.copy.exists()


def test_the_number_of_runs_is_bounded(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    assert MAX_RUNS == 64
    monkeypatch.setattr(replicas, "MAX_RUNS", 2)
    kept.send_run_files(run_id="first")
    kept.send_run_files(run_id="second")
    with pytest.raises(PeerError, match="attic keeps copies of 2 runs already"):
        kept.send_run_files(run_id="third")
    kept.send_run_files(run_id="second")
