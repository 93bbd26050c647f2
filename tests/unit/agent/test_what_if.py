"""`exo-train plan`: devices from a file, a model of which only the config is there."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from exo_train.agent.what_if import what_if_report
from exo_train.cluster.home import Home
from exo_train.config import TrainConfig
from exo_train.errors import ConfigError, DataError, DoesNotFitError
from exo_train.plan.presets import PRESETS
from exo_train.ui.plan_screen import plan_screen
from tests.tiny_models import make_tiny_model

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
    return what_if_report(Home(tmp_path / "home"), config, file)


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


def test_what_does_not_fit_says_what_would(model: Path, tmp_path: Path) -> None:
    """The advice is true: the change it names makes a plan, one that it denies does not."""
    pcs = {"devices": [{"name": f"pc {n}", "preset": "rtx-4060-ti-16"} for n in (1, 2)]}
    options = {"max_seq_length": 2048}
    with pytest.raises(DoesNotFitError) as caught:
        report(model, tmp_path, pcs, **options)
    text = str(caught.value)
    assert text.startswith(
        "does not fit: needs 4.8 GB more on every split (usable: pc 1 14.1 GB, pc 2 14.1 GB); "
    )
    assert "--checkpoint-activations fits on 2 devices" in text
    assert "--rank 4 → still no, 4.7 GB missing" in text
    fitting = report(model, tmp_path, pcs, **options, checkpoint_activations=True)
    assert len(fitting["stages"]) == 2
    with pytest.raises(DoesNotFitError):
        report(model, tmp_path, pcs, **options, rank=4)


def test_memory_is_told_by_kind(model: Path, tmp_path: Path) -> None:
    found = report(model, tmp_path, {"devices": [STUDIO, DESK]})
    for stage in found["stages"]:
        assert sum(stage["memory_by_kind"].values()) == stage["memory_bytes"]
    weights = sum(stage["memory_by_kind"]["weights_bytes"] for stage in found["stages"])
    assert weights == 2 * 8_030_261_248
    adapters = sum(stage["memory_by_kind"]["adapters_bytes"] for stage in found["stages"])
    assert adapters == 16 * 41_943_040 // 2, "rank 8"


def test_links_are_told_both_ways(model: Path, tmp_path: Path) -> None:
    found = report(model, tmp_path, {"devices": [STUDIO, DESK]}, max_seq_length=512)
    first, last = (stage["device"] for stage in found["stages"])
    pairs = [(link["from"], link["to"]) for link in found["links"]]
    assert pairs == [(first, last), (last, first)]
    for link in found["links"]:
        assert link["bytes_per_step"] == 16 * 512 * 4096 * 2, "16 sequences in bf16"
        message_bytes = found["inputs"]["boundary_bytes"]
        assert link["time_s"] == pytest.approx(0.0005 + message_bytes / 117.5e6)


def test_microbatches_are_chosen_unless_given(model: Path, tmp_path: Path) -> None:
    home = {
        "devices": [STUDIO, DESK],
        "links": [{"between": ["studio", "desk"], "mbit": 1000, "latency_ms": 2000}],
    }
    chosen = report(model, tmp_path, home)
    assert chosen["microbatch_size_chosen"]
    tried = {c["microbatch_size"]: c["step_s"] for c in chosen["microbatch_candidates"]}
    assert set(tried) == {1, 2, 4, 8, 16}
    best = tried[chosen["microbatch_size"]]
    assert best == pytest.approx(chosen["step_s"])
    assert best <= 1.01 * min(step_s for step_s in tried.values() if step_s)
    assert chosen["microbatch_size"] > 1, "an answer takes 4 s"
    given = report(model, tmp_path, home, microbatch_size=1)
    assert not given["microbatch_size_chosen"]
    assert (given["microbatch_size"], given["num_microbatches"]) == (1, 16)
    assert given["step_s"] > chosen["step_s"]


def test_times_in_the_file_are_of_one_sequence(model: Path, tmp_path: Path) -> None:
    home = {"devices": [{**DESK, "memory": "60GB"}]}
    one, four = (report(model, tmp_path, home, microbatch_size=size) for size in (1, 4))
    for found, size in ((one, 1), (four, 4)):
        (device,) = found["inputs"]["devices"]
        assert device["layer_s"] == pytest.approx(0.040 * size)
        assert device["head_s"] == pytest.approx(0.090 * size)
    assert (
        one["step_s"] == pytest.approx(four["step_s"]) == pytest.approx(16 * (32 * 0.040 + 0.091))
    )


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """Ten rows of four tokens each, as the tiny tokenizer writes them: a letter is a token."""
    file = tmp_path / "rows.jsonl"
    line = json.dumps({"prompt": "a", "completion": "xyz"})
    file.write_text("\n".join([line] * 10), "utf-8")
    return file


def test_an_epoch_counts_rows_tokens_and_padding(tmp_path: Path, rows: Path) -> None:
    tiny = make_tiny_model(tmp_path / "tiny", num_layers=4)
    for weights in tiny.glob("*.safetensors"):
        weights.unlink()
    home = {"devices": [{"name": "desk", "memory": "4GB", "layer_ms": 10, "head_ms": 0}]}
    options = {"batch_size": 4, "max_seq_length": 64, "data": str(rows)}
    found = report(tiny, tmp_path, home, **options)
    data = found["data"]
    assert (data["num_rows"], data["num_steps"]) == (10, 3)
    assert data["positions"] == 80, "each of ten sequences is padded to 8"
    assert 30 <= data["tokens"] < 80
    # Four layers of 10 ms for 64 positions; 80 positions in all.
    assert found["epoch_s"] == pytest.approx(0.040 * 80 / 64)
    assert "epoch: 10 rows, 3 steps" in printed(found)


def test_without_a_tokenizer_the_epoch_is_not_guessed(
    model: Path, tmp_path: Path, rows: Path
) -> None:
    found = report(model, tmp_path, {"devices": [STUDIO, DESK]}, data=str(rows), batch_size=4)
    assert found["epoch_s"] is None
    assert found["data"]["tokens"] is None
    assert found["data"]["num_steps"] == 3
    assert "no tokenizer of" in printed(found)
    assert "the predicted step times 3 at most" in " ".join(printed(found).split())


def test_a_bad_row_is_refused_by_line(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_text('{"text": "fine"}\n{"txt": 1}\n', "utf-8")
    with pytest.raises(DataError, match=r"line 2.*did you mean 'text'"):
        report(model, tmp_path, {"devices": [STUDIO, DESK]}, data=str(file))


def printed(found: dict[str, Any], width: int = 140) -> str:
    console = Console(width=width, file=io.StringIO(), color_system=None)
    console.print(plan_screen(found))
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_the_screen_has_what_a_person_asks(model: Path, tmp_path: Path) -> None:
    small = [{**d, "memory": "14GB"} for d in (STUDIO, {**DESK, "name": "[bold]desk"})]
    found = report(model, tmp_path, {"devices": small})
    text = printed(found)
    assert "[bold]desk" in text, "a name is no markup"
    lines = text.splitlines()
    stages = {name: [line for line in lines if name in line] for name in ("studio", "[bold]desk")}
    slowest = max(found["stages"], key=lambda stage: stage["time_s"])["device"]
    bars = {name: shown[0].count("█") for name, shown in stages.items()}
    assert bars[slowest] == max(bars.values()) == 24
    for stage in found["stages"]:
        needed = f"{stage['memory_bytes'] / 1e9:.1f} of 14.0 GB"
        assert needed in stages[stage["device"]][0]
        assert f"{stage['memory_by_kind']['weights_bytes'] / 1e9:.1f}" in stages[stage["device"]][1]
    assert "verdict: no device has room for the model alone" in text
    assert "runner-up: none, nothing else fits" in text
    assert "microbatches: 16 of 1 sequence (chosen)" in text
    assert text.count("67.1 MB a step") == 2
    assert f"{found['tokens_per_s']:.0f} tokens/s" in text


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
