"""`exo-train plan`: devices from a file, a model of which only the config is there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from exo_train.agent.what_if import plan_report
from exo_train.cluster.home import Home
from exo_train.config import TrainConfig
from exo_train.errors import ConfigError, DoesNotFitError
from exo_train.plan.presets import PRESETS

LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 32,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
}
STUDIO = {"name": "studio", "memory": "20GB", "layer_ms": 20}
DESK = {"name": "desk", "memory": "20GB", "layer_ms": 40, "head_ms": 90, "embedding_ms": 1}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("config-only")
    (folder / "config.json").write_text(json.dumps(LLAMA_8B), "utf-8")
    return folder


def report(model: Path, tmp_path: Path, content: Any, **options: Any) -> dict[str, Any]:
    file = tmp_path / "house.yaml"
    file.write_text(content if isinstance(content, str) else yaml.safe_dump(content), "utf-8")
    config = TrainConfig(model=str(model), **{"batch_size": 16, **options})
    return plan_report(Home(tmp_path / "home"), config, file)


def test_a_script_can_check_the_plan(model: Path, tmp_path: Path) -> None:
    """All that went in is there: layers, memory, times and the period can be counted again."""
    found = report(model, tmp_path, {"devices": [STUDIO, DESK]})
    inputs = found["inputs"]
    devices = {device["name"]: device for device in inputs["devices"]}
    layers: list[int] = []
    for stage in found["stages"]:
        start, end = stage["layers"]
        layers += range(start, end)
        device = devices[stage["device"]]
        time_s = (end - start) * device["layer_s"]
        time_s += stage["embedding"] * device["embedding_s"] + stage["head"] * device["head_s"]
        assert stage["time_s"] == pytest.approx(time_s)
        assert stage["memory_bytes"] <= stage["usable_memory_bytes"]
    assert layers == list(range(32))
    assert found["period_s"] == pytest.approx(max(s["time_s"] for s in found["stages"]))
    assert found["step_s"] >= found["period_s"] * found["num_microbatches"]
    assert len(inputs["layer_costs"]) == 34
    assert {"strategy", "verdict", "candidates", "runner_up"} <= found.keys()
    json.dumps(found, allow_nan=False)


def test_speed_decides_and_not_memory_alone(model: Path, tmp_path: Path) -> None:
    found = report(model, tmp_path, {"devices": [STUDIO, DESK]})
    layers = {s["device"]: s["layers"][1] - s["layers"][0] for s in found["stages"]}
    assert layers["studio"] > layers["desk"], "equal memory, half the speed"


def test_one_device_that_holds_the_model_is_told_to_be_enough(model: Path, tmp_path: Path) -> None:
    large = {"name": "tower", "preset": "rtx-5090"}
    slow = {"between": ["tower", "laptop"], "mbit": 100, "latency_ms": 5, "medium": "wifi"}
    laptop = {"name": "laptop", "preset": "m1-16"}
    found = report(model, tmp_path, {"devices": [large, laptop], "links": [slow]})
    assert found["strategy"] == "one device"
    assert [stage["device"] for stage in found["stages"]] == ["tower"]
    assert "tower" in found["verdict"]


def test_what_training_cannot_do_is_compared_and_never_chosen(model: Path, tmp_path: Path) -> None:
    twins = [{"name": name, "memory": "40GB", "layer_ms": 20} for name in ("one", "two")]
    found = report(model, tmp_path, {"devices": twins})
    parallel = [c for c in found["candidates"] if c["strategy"] == "data parallel"]
    assert parallel
    assert not parallel[0]["available"]
    assert "not yet available" in parallel[0]["note"]
    assert found["strategy"] in ("one device", "pipeline")


def test_what_does_not_fit_says_the_numbers(model: Path, tmp_path: Path) -> None:
    with pytest.raises(DoesNotFitError, match=r"laptop \d+\.\d GB.*too little"):
        report(model, tmp_path, {"devices": [{"name": "laptop", "preset": "m1-8"}]})


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"devices": [{"name": "a", "preset": "rtx-4900"}]}, r"device 1 \(a\).*'rtx-4090'"),
        ({"devices": [{"name": "a", "memory": "8GB"}]}, "'preset', or 'memory' and 'layer_ms'"),
        ({"devices": [{"preset": "m2-8"}]}, "device 1 needs a 'name'"),
        ({"devices": [{"name": "a", "presset": "m2-8"}]}, "unknown key 'presset'.*'preset'"),
        ({"devices": []}, "1 to 16 devices"),
        ({"device": []}, "a list called 'devices'"),
        ({"devices": [STUDIO, STUDIO]}, "two devices have the same name"),
        ({"devices": [{**STUDIO, "layer_ms": "fast"}]}, "'layer_ms' must be a number"),
        ({"devices": [{**STUDIO, "memory": "many"}]}, "'many' is not a size"),
        (
            {"devices": [STUDIO], "links": [{"between": ["studio", "x"], "mbit": 1}]},
            "link 1: no device is called 'x'",
        ),
        (
            {"devices": [STUDIO, DESK], "links": [{"between": ["studio", "desk"], "mbit": 0}]},
            "'mbit' must be above 0",
        ),
        ("devices: [", "is no YAML"),
        ({"devices": [{**STUDIO, "layer_ms": 0}]}, "'layer_ms' must be above 0"),
        ({"devices": [{**STUDIO, "layer_ms": 10**400}]}, "'layer_ms' must be a number"),
        ({"devices": [{**STUDIO, "head_ms": -1}]}, "'head_ms' must be at least 0"),
        ({"devices": [{"name": "a", "preset": ["m1-8"]}]}, "no preset"),
        ({"devices": [STUDIO], "links": 5}, "'links' must be a list"),
    ],
)
def test_a_wrong_file_is_refused_by_place(
    content: Any, words: str, model: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=words):
        report(model, tmp_path, content)


def test_presets_are_plausible() -> None:
    for name, preset in PRESETS.items():
        assert 0 < preset.usable_bytes < preset.memory_gb * 10**9, name
        assert 1e12 < preset.flops_per_s < 2e14, name


def test_a_presets_times_are_its_arithmetic(model: Path, tmp_path: Path) -> None:
    """8B: 218.1 M parameters a layer, and a head worth 2.4 layers, at half the peak."""
    home = {"devices": [{"name": "tower", "preset": "rtx-5090"}]}
    found = report(model, tmp_path, home, microbatch_size=1, max_seq_length=512)
    (device,) = found["inputs"]["devices"]
    forward = 2 * 218.1e6 * 512 + 2 * 4096 * 512 * 512
    assert device["layer_s"] == pytest.approx(2 * forward / (209e12 * 0.5), rel=1e-3)
    assert device["head_s"] / device["layer_s"] == pytest.approx(2.4, rel=0.02)
    again = report(
        model, tmp_path, home, microbatch_size=1, max_seq_length=512, checkpoint_activations=True
    )
    recomputed = again["inputs"]["devices"][0]["layer_s"]
    assert recomputed == pytest.approx(1.5 * device["layer_s"])
