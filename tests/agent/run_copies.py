"""A run's directory with checkpoints, and the messages that copy it. For tests only."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from exo_train.agent.replicas import CHECKPOINT_FILES
from exo_train.config import TrainConfig
from exo_train.train.checkpoint import checkpoint_steps, newest_checkpoint, save_checkpoint
from exo_train.train.examples import Example
from exo_train.train.kept_rows import write_rows
from exo_train.train.rundir import RunDir
from exo_train.wire.pb import control_pb2 as pb

ROWS = (Example(tokens=(1, 2, 3), supervised=(False, True, True), where="line 1"),)
RUN_ID = "0123abcd"


def make_run(path: Path) -> RunDir:
    """Make what a run has before its first checkpoint."""
    run = RunDir.create(path)
    run.write_config(TrainConfig(model="/den/llama", data="/den/x.jsonl", rank=4).to_dict())
    run.write_plan('{"ranks": []}')
    write_rows(run.path, train=ROWS, held_out=())
    return run


def save_step(run: Path, step: int, *, num_values: int = 1000) -> Path:
    adapter = {"layers.0.lora_a": np.full(num_values, step, np.float32)}
    return save_checkpoint(
        run, step=step, adapter=adapter, optimizer={"step": np.array(step)}, state={"tokens": step}
    )


def held(replica: Path) -> list[int]:
    return checkpoint_steps(replica)


def newest_value(replica: Path) -> tuple[int, float]:
    """Give the newest whole checkpoint's step and what its adapter holds."""
    checkpoint = newest_checkpoint(replica)
    assert checkpoint is not None
    return checkpoint.step, float(checkpoint.adapter["layers.0.lora_a"][0])


def head_of(*paths: Path, step: int, **changes: Any) -> pb.ReplicaHead:
    files = [
        pb.ReplicaFile(
            name=path.name,
            size_bytes=path.stat().st_size,
            sha256=hashlib.sha256(path.read_bytes()).hexdigest(),
        )
        for path in paths
    ]
    head = pb.ReplicaHead(run_id=RUN_ID, step=step, files=files)
    for key, value in changes.items():
        if isinstance(value, list):
            head.ClearField(key)
            getattr(head, key).extend(value)
        else:
            setattr(head, key, value)
    return head


def checkpoint_files(folder: Path) -> list[Path]:
    return [folder / name for name in CHECKPOINT_FILES]


def pieces_of(head: pb.ReplicaHead, *contents: bytes) -> Iterator[pb.ReplicaPiece]:
    yield pb.ReplicaPiece(head=head)
    for content in contents:
        yield pb.ReplicaPiece(data=content)


def copy_of(*paths: Path, step: int, **changes: Any) -> Iterator[pb.ReplicaPiece]:
    """Give the messages of an honest sender, but for `changes` to their head."""
    contents = [path.read_bytes() for path in paths]
    return pieces_of(head_of(*paths, step=step, **changes), *contents)
