"""Checkpoints: exact when whole, skipped when not, and never half there."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from exo_train.errors import ConfigError
from exo_train.train import checkpoint, durable
from exo_train.train.checkpoint import load_checkpoint, newest_checkpoint, prune, save_checkpoint

NAME = "model.layers.7.self_attn.q_proj.lora_a"


def save(run_dir, step: int, fill: float = 1.0):
    rng = np.random.Generator(np.random.PCG64(step))
    return save_checkpoint(
        run_dir,
        step=step,
        adapter={NAME: np.full((4, 2), fill, np.float32)},
        optimizer={
            f"{NAME}.exp_avg": np.arange(8, dtype=np.float32).reshape(2, 4).T,  # not contiguous
            "step": np.array(step, dtype=np.int64),
        },
        state={"rng": rng.bit_generator.state, "row": 17, "name": "dônnées"},
    )


def test_everything_comes_back_exactly(tmp_path):
    path = save(tmp_path / "my é run", 20, fill=0.1)
    assert path == tmp_path / "my é run" / "checkpoints" / "step-000020"
    found = load_checkpoint(path)
    assert found.step == 20
    np.testing.assert_array_equal(found.adapter[NAME], np.full((4, 2), 0.1, np.float32))
    moments = found.optimizer[f"{NAME}.exp_avg"]
    np.testing.assert_array_equal(moments, np.arange(8, dtype=np.float32).reshape(2, 4).T)
    assert found.optimizer["step"].shape == ()
    assert found.optimizer["step"].dtype == np.int64
    assert found.state["rng"] == np.random.PCG64(20).state  # 128-bit numbers
    assert found.state["name"] == "dônnées"


def test_newest_is_by_number_not_by_spelling(tmp_path):
    for step in (999_999, 1_000_000, 20):
        save(tmp_path, step)
    found = newest_checkpoint(tmp_path)
    assert found is not None
    assert found.step == 1_000_000


def truncate(path):
    file = path / "optimizer.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


def flip_a_byte(path):
    file = path / "adapter.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def drop_manifest(path):
    (path / "manifest.json").unlink()


def drop_file(path):
    (path / "adapter.safetensors").unlink()


def pickle_manifest(path):
    (path / "manifest.json").write_bytes(pickle.dumps({"schema": 1}))


def pickle_weights(path):
    """A pickle whose manifest is forged to match."""
    data = pickle.dumps({"schema": 1})
    (path / "adapter.safetensors").write_bytes(data)
    manifest = json.loads((path / "manifest.json").read_text())
    entry = {"sha256": hashlib.sha256(data).hexdigest(), "size_bytes": len(data)}
    manifest["files"]["adapter.safetensors"] = entry
    (path / "manifest.json").write_text(json.dumps(manifest))


def bomb_manifest(path):
    (path / "manifest.json").write_text('{"state":' + "[" * 200_000)


def huge_number(path):
    (path / "manifest.json").write_text('{"schema":' + "9" * 1_000_000 + "}")


def other_file(path):
    text = (path / "manifest.json").read_text().replace("adapter.safet", "../../x.safet")
    (path / "manifest.json").write_text(text)


def mix_steps(path):
    """A file of another step, as a copy by hand or a mixed-up backup leaves it."""
    other = path.parent / "step-000010" / "optimizer.safetensors"
    (path / "optimizer.safetensors").write_bytes(other.read_bytes())


def rename_step(path):
    """All of another step under this one's name."""
    for file in (path.parent / "step-000010").iterdir():
        (path / file.name).write_bytes(file.read_bytes())


def flip_in_state(path):
    """Still JSON, and still what every file's digest is; but the position in the data is not."""
    text = (path / "manifest.json").read_text()
    assert '"row": 17' in text
    (path / "manifest.json").write_text(text.replace('"row": 17', '"row": 57'))


def empty_manifest(path):
    (path / "manifest.json").write_bytes(b"")


def folder_in_place_of_a_file(path):
    (path / "adapter.safetensors").unlink()
    (path / "adapter.safetensors").mkdir()


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (truncate, "optimizer.safetensors has"),
        (flip_a_byte, "adapter.safetensors does not have the SHA-256"),
        (mix_steps, "optimizer.safetensors does not have the SHA-256"),
        (rename_step, "step-000020 is damaged: its files are of step 10"),
        (flip_in_state, "manifest.json does not have the SHA-256 that it names"),
        (empty_manifest, "manifest.json is not valid JSON"),
        (folder_in_place_of_a_file, "step-000020 "),
        (drop_manifest, "incomplete: manifest.json is missing"),
        (drop_file, "incomplete: adapter.safetensors is missing"),
        (pickle_manifest, "is damaged"),
        (pickle_weights, "is damaged"),
        (bomb_manifest, "nested too deeply"),
        (huge_number, "1000000 digits"),
        (other_file, "is damaged"),
    ],
)
def test_a_damaged_newest_is_said_and_the_one_before_is_used(tmp_path, damage, reason):
    save(tmp_path, 10)
    damage(save(tmp_path, 20))
    notes: list[str] = []
    found = newest_checkpoint(tmp_path, say=notes.append)
    assert found is not None
    assert found.step == 10
    assert len(notes) == 1
    assert "step-000020" in notes[0]
    assert reason in notes[0]


def test_all_are_damaged(tmp_path):
    for step in (10, 20):
        drop_manifest(save(tmp_path, step))
    notes: list[str] = []
    assert newest_checkpoint(tmp_path, say=notes.append) is None
    assert ["step-000020" in notes[0], "step-000010" in notes[1]] == [True, True]


def test_nothing_to_resume(tmp_path):
    assert newest_checkpoint(tmp_path) is None


@pytest.mark.parametrize("failing_write", [1, 2, 3])
def test_a_full_disk_leaves_the_old_checkpoint_and_no_new_one(tmp_path, monkeypatch, failing_write):
    """The disk fills up in the middle of the first, second and third (manifest) file."""
    save(tmp_path, 10)
    writes = []

    def full(path, data):
        writes.append(path.name)
        if len(writes) == failing_write:
            path.write_bytes(data[: len(data) // 2])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        durable.write_synced(path, data)

    monkeypatch.setattr(checkpoint, "write_synced", full)
    with pytest.raises(ConfigError, match=r"checkpoint of step 20 in .*: the disk is full \(.*MB"):
        save(tmp_path, 20)
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step-000010"]
    found = newest_checkpoint(tmp_path)
    assert found is not None
    assert found.step == 10


@pytest.mark.parametrize("at", ["adapter.safetensors", "optimizer.safetensors", "manifest.json"])
def test_a_kill_during_the_save_leaves_nothing_that_counts(tmp_path, at):
    """A child process ends itself in the middle of writing one of the files."""
    save(tmp_path, 10)
    script = f"""
import os, sys
import numpy as np
from pathlib import Path
from exo_train.train import checkpoint
def dies(path, data):
    if path.name == {at!r}:
        path.write_bytes(data[:len(data) // 2])
        os._exit(9)
    path.write_bytes(data)
checkpoint.write_synced = dies
arrays = {{"a": np.ones(3, np.float32)}}
checkpoint.save_checkpoint(Path(sys.argv[1]), step=20, adapter=arrays, optimizer=arrays, state={{}})
"""
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=False, timeout=60)
    assert done.returncode == 9
    found = newest_checkpoint(tmp_path)
    assert found is not None
    assert found.step == 10
    save(tmp_path, 20)  # the leftover is no obstacle
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == [
        "step-000010",
        "step-000020",
    ]


def test_bytes_that_rot_on_the_way_to_disk_are_noticed_at_the_save(tmp_path, monkeypatch):
    save(tmp_path, 20, fill=1.0)

    def rots(path, data):
        durable.write_synced(path, data[:-1] + b"\xff" if "adapter" in path.name else data)

    monkeypatch.setattr(checkpoint, "write_synced", rots)
    with pytest.raises(ConfigError, match="does not have the SHA-256"):
        save(tmp_path, 20, fill=2.0)
    found = newest_checkpoint(tmp_path)
    assert found is not None
    assert found.adapter[NAME][0, 0] == 1.0


def test_saving_a_step_again_replaces_it(tmp_path):
    save(tmp_path, 20, fill=1.0)
    path = save(tmp_path, 20, fill=2.0)
    assert load_checkpoint(path).adapter[NAME][0, 0] == 2.0
    assert [p.name for p in path.parent.iterdir()] == ["step-000020"]


def test_prune_keeps_the_newest_whole_ones(tmp_path):
    for step in (10, 20, 30, 40):
        save(tmp_path, step)
    truncate(tmp_path / "checkpoints" / "step-000040")
    removed = prune(tmp_path, keep=2)
    assert [path.name for path in removed] == ["step-000010"]
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == [
        "step-000020",
        "step-000030",
        "step-000040",
    ]


def test_too_little_space_is_known_before_the_run(tmp_path):
    durable.require_free_bytes(tmp_path, needed_bytes=1, what="two checkpoints")
    with pytest.raises(ConfigError, match=r"two checkpoints needs 1000000000000.0 MB in .* free"):
        durable.require_free_bytes(tmp_path, needed_bytes=10**18, what="two checkpoints")


def test_read_only_folder_is_named():
    with (
        pytest.raises(ConfigError, match="read-only for this user; choose another --run-dir"),
        durable.disk_errors("x", Path("there")),
    ):
        raise OSError(errno.EROFS, "Read-only file system")
