"""The cache of block times: what it forgets, what it tells apart, and damage it lives with."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import exo_train
from exo_train.cluster import profile_cache
from exo_train.cluster.profile_cache import (
    FILE_NAME,
    MAX_AGE_S,
    MAX_ENTRIES,
    MAX_FILE_BYTES,
    MAX_UNSTEADY_AGE_S,
    ProfileCache,
    profile_key,
)
from exo_train.lora_config import LoraConfig
from exo_train.plan.block_times import BlockTimes, EndTimes, ProfileRequest
from tests.tiny_models import tiny_config

NOW_S = 1.9e9
ENDS = EndTimes(embedding_s=0.1, head_s=0.2, head_layer_s=0.3, head_workspace_bytes=4)
TIMES = BlockTimes(
    layer_forward_s=0.01,
    layer_backward_s=0.02,
    overhead_s=0.003,
    layer_update_s=0.0004,
    slowdown=1.05,
    num_repetitions=20,
    ends=ENDS,
)


def request(**changed: Any) -> ProfileRequest:
    values: dict[str, Any] = {
        "config_json": json.dumps(tiny_config()),
        "backend": "torch",
        "device": "cpu",
        "compute_dtype": "fp32",
        "lora": LoraConfig(),
        "microbatch_size": 2,
        "sequence": 128,
        "checkpoint_activations": False,
        "with_ends": True,
    }
    return ProfileRequest(**{**values, **changed})


def key(chip: str = "a chip", **changed: Any) -> str:
    return profile_key(request(**changed), chip=chip)


def test_what_was_put_is_found_by_another_process(tmp_path: Path) -> None:
    ProfileCache(tmp_path / "cache").put("k", TIMES, now_s=NOW_S)
    found = ProfileCache(tmp_path / "cache").get("k", with_ends=True, now_s=NOW_S + 1)
    assert found == TIMES
    assert ProfileCache(tmp_path / "cache").get("other", with_ends=True, now_s=NOW_S) is None
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [FILE_NAME]


def test_who_wants_it_fresh_gets_nothing_from_before(tmp_path: Path) -> None:
    cache = ProfileCache(tmp_path)
    cache.put("k", TIMES, now_s=NOW_S)
    assert cache.get("k", with_ends=True, now_s=NOW_S + 9, since_s=NOW_S) == TIMES
    assert cache.get("k", with_ends=True, now_s=NOW_S + 9, since_s=NOW_S + 1) is None


def test_a_profile_with_ends_serves_a_stage_without_but_not_the_reverse(tmp_path: Path) -> None:
    cache = ProfileCache(tmp_path)
    cache.put("with", TIMES, now_s=NOW_S)
    cache.put("without", dataclasses.replace(TIMES, ends=None), now_s=NOW_S)
    assert cache.get("with", with_ends=False, now_s=NOW_S) == TIMES
    assert cache.get("without", with_ends=False, now_s=NOW_S) is not None
    assert cache.get("without", with_ends=True, now_s=NOW_S) is None
    assert key(with_ends=True) == key(with_ends=False)


@pytest.mark.parametrize(
    ("changed", "max_age_s"),
    [
        ({}, 30 * 86400),
        ({"slowdown": 1.9}, MAX_UNSTEADY_AGE_S),
        ({"num_repetitions": 1}, MAX_UNSTEADY_AGE_S),
    ],
    ids=["steady", "busy", "one-call"],
)
def test_an_old_measurement_does_not_count(
    tmp_path: Path, changed: dict[str, Any], max_age_s: float
) -> None:
    cache = ProfileCache(tmp_path)
    cache.put("k", dataclasses.replace(TIMES, **changed), now_s=NOW_S)
    assert cache.get("k", with_ends=True, now_s=NOW_S + max_age_s - 1) is not None
    assert cache.get("k", with_ends=True, now_s=NOW_S + max_age_s + 1) is None
    # The clock was set back: nobody knows how old it is.
    assert cache.get("k", with_ends=True, now_s=NOW_S - 3600) is None


def test_the_newest_entries_stay(tmp_path: Path) -> None:
    cache = ProfileCache(tmp_path)
    for number in range(MAX_ENTRIES + 3):
        cache.put(f"k{number}", TIMES, now_s=NOW_S + number)
    now_s = NOW_S + MAX_ENTRIES + 3
    found = [cache.get(f"k{n}", with_ends=True, now_s=now_s) for n in range(MAX_ENTRIES + 3)]
    assert [entry is not None for entry in found] == [False] * 3 + [True] * MAX_ENTRIES
    assert (tmp_path / FILE_NAME).stat().st_size < MAX_FILE_BYTES / 8
    assert len(json.loads((tmp_path / FILE_NAME).read_text())["profiles"]) == MAX_ENTRIES
    cache.put("new", TIMES, now_s=now_s + MAX_AGE_S)
    assert list(json.loads((tmp_path / FILE_NAME).read_text())["profiles"]) == ["new"]


@pytest.mark.parametrize(
    "changed",
    [
        {"chip": "another chip"},
        {"backend": "mlx"},
        {"device": "cuda:0"},
        {"compute_dtype": "bf16"},
        {"microbatch_size": 3},
        {"sequence": 129},
        {"checkpoint_activations": True},
        {"lora": LoraConfig(rank=9)},
        {"lora": LoraConfig(targets=("q_proj", "v_proj"))},
        {"lora": LoraConfig(dropout=0.1)},
        {"config_json": json.dumps(tiny_config(hidden_size=128))},
        {"config_json": json.dumps(tiny_config(vocab_size=321))},
        {"config_json": json.dumps(tiny_config(architecture="qwen3"))},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_whatever_changes_the_time_is_another_measurement(changed: dict[str, Any]) -> None:
    assert key(**changed) != key()


@pytest.mark.parametrize(
    "changed",
    [
        {"config_json": json.dumps(tiny_config(num_layers=7))},
        {"config_json": json.dumps(tiny_config(rope_theta=5e5, max_position=4096))},
        {"lora": LoraConfig(alpha=99)},
        {"lora": LoraConfig(targets=tuple(reversed(LoraConfig().targets)))},
        {"budget_s": 5.0},
    ],
)
def test_whatever_does_not_is_the_same(changed: dict[str, Any]) -> None:
    assert key(**changed) == key()


def test_gpus_of_one_chip_are_one_measurement() -> None:
    assert key(device="cuda:0") == key(device="cuda:3")
    assert key(device="cuda:0") != key(device="cuda:3", chip="another chip")


def test_another_version_or_number_of_threads_is_another_measurement(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = key()
    monkeypatch.setattr(exo_train, "__version__", "99.0")
    newer = key()
    monkeypatch.setattr(profile_cache, "_version", lambda package: f"{package} of tomorrow")
    newest = key()
    monkeypatch.setenv("OMP_NUM_THREADS", "17")
    threads = key()
    monkeypatch.setenv("EXO_TRAIN_TEST_FAULT", "slow:2")
    assert len({before, newer, newest, threads, key()}) == 5


@pytest.mark.parametrize(
    "damage",
    [
        b"",
        b"\xff\xfe\x00",
        b"[]",
        b"null",
        b'{"schema": 1}',
        b'{"schema": 1, "profiles": []}',
        b'{"schema": 99, "profiles": {}}',
        b'{"schema": 1, "profiles": {"k": {"measured_s": "soon", "times": 3}}}',
        b"[" * 100_000,
        b" " * (MAX_FILE_BYTES + 1),
    ],
    ids=range(10),
)
def test_a_damaged_file_counts_as_none_and_is_made_anew(tmp_path: Path, damage: bytes) -> None:
    (tmp_path / FILE_NAME).write_bytes(damage)
    cache = ProfileCache(tmp_path)
    assert cache.get("k", with_ends=True, now_s=NOW_S) is None
    cache.put("k", TIMES, now_s=NOW_S)
    assert cache.get("k", with_ends=True, now_s=NOW_S) == TIMES


@pytest.mark.parametrize(
    "harm",
    [
        lambda times: times.pop("overhead_s"),
        lambda times: times.update(layer_forward_s=-1.0),
        lambda times: times.update(layer_forward_s="0.1"),
        lambda times: times.update(num_repetitions=0),
        lambda times: times.update(slowdown=0.5),
        lambda times: times.update(ends=[{}]),
        lambda times: times.update(surprise=1),
    ],
    ids=range(7),
)
def test_one_damaged_entry_does_not_take_the_others_along(
    tmp_path: Path, harm: Callable[[dict[str, Any]], object]
) -> None:
    cache = ProfileCache(tmp_path)
    cache.put("good", TIMES, now_s=NOW_S)
    cache.put("bad", TIMES, now_s=NOW_S)
    content = json.loads((tmp_path / FILE_NAME).read_text())
    harm(content["profiles"]["bad"]["times"])
    (tmp_path / FILE_NAME).write_text(json.dumps(content))
    assert cache.get("bad", with_ends=True, now_s=NOW_S) is None
    assert cache.get("good", with_ends=True, now_s=NOW_S) == TIMES


def test_a_crash_while_writing_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = ProfileCache(tmp_path)
    cache.put("k", TIMES, now_s=NOW_S)

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    cache.put("other", TIMES, now_s=NOW_S)
    assert cache.get("k", with_ends=True, now_s=NOW_S) == TIMES
    assert cache.get("other", with_ends=True, now_s=NOW_S) is None
    assert [path.name for path in tmp_path.iterdir()] == [FILE_NAME]


def test_a_folder_that_cannot_be_made_costs_time_only(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file in the way")
    cache = ProfileCache(tmp_path / "cache")
    cache.put("k", TIMES, now_s=NOW_S)
    assert cache.get("k", with_ends=True, now_s=NOW_S) is None
