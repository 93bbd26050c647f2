"""Wrong input at the command line: one sentence, the documented exit code, nothing left behind."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from exo_train.agent.planning import make_plan
from exo_train.cli.main import main
from exo_train.config import TrainConfig
from exo_train.errors import DoesNotFitError
from exo_train.models.packed import Packing
from tests.packed_models import make_packed_model
from tests.ring.rings import candidates, manifest_of
from tests.tiny_models import make_tiny_model

GOOD_ROW = json.dumps({"prompt": "one two", "completion": " three"}) + "\n"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("bad") / "model", num_layers=2)


@pytest.fixture
def run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str]]:
    """Run the command in this process; gives exit code and standard error."""
    monkeypatch.setenv("EXO_TRAIN_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    def run(*arguments: str) -> tuple[int, str]:
        monkeypatch.setattr("sys.argv", ["exo-train", *arguments])
        with pytest.raises(SystemExit) as caught:
            main()
        code = caught.value.code
        return (code if isinstance(code, int) else 1), capsys.readouterr().err

    return run


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def without_config(model: Path, tmp_path: Path) -> Path:
    copy = shutil.copytree(model, tmp_path / "no-config")
    (copy / "config.json").unlink()
    return copy


def truncated(model: Path, tmp_path: Path) -> Path:
    copy = shutil.copytree(model, tmp_path / "truncated")
    weights = copy / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    return copy


def unknown_architecture(model: Path, tmp_path: Path) -> Path:
    copy = shutil.copytree(model, tmp_path / "unknown")
    config = json.loads((copy / "config.json").read_text("utf-8"))
    config |= {"model_type": "frobnicator", "architectures": ["FrobnicatorForCausalLM"]}
    write(copy / "config.json", json.dumps(config))
    return copy


MODELS: dict[str, tuple[Callable[[Path, Path], Path], tuple[str, ...]]] = {
    "missing": (lambda model, tmp: tmp / "nowhere", ("nowhere",)),
    "no config": (without_config, ("no-config", "config.json")),
    "truncated": (truncated, ("model.safetensors", "truncated")),
    "unknown architecture": (unknown_architecture, ("frobnicator", "llama")),
}


def assert_one_sentence(error: str) -> None:
    assert error.startswith("exo-train: ")
    assert error.count("\n") == 1, error
    assert "Traceback" not in error


def quantised_by(**settings: object) -> Callable[[Path, Path], Path]:
    def make(model: Path, tmp_path: Path) -> Path:
        copy = shutil.copytree(model, tmp_path / "quantised")
        config = json.loads((copy / "config.json").read_text("utf-8"))
        write(copy / "config.json", json.dumps(config | {"quantization": settings}))
        return copy

    return make


MODELS |= {
    "6 bits": (quantised_by(bits=6, group_size=64), ("config.json", "6 bits", "--quantize 4")),
    "mxfp4": (quantised_by(bits=4, group_size=32, mode="mxfp4"), ("config.json", "mxfp4")),
    "gptq": (quantised_by(bits=4, group_size=128, quant_method="gptq"), ("gptq", "GGUF")),
}


@pytest.mark.parametrize("name", MODELS)
def test_wrong_models(
    name: str, model: Path, tmp_path: Path, run: Callable[..., tuple[int, str]]
) -> None:
    make, words = MODELS[name]
    data = write(tmp_path / "data.jsonl", GOOD_ROW * 3)
    run_dir = tmp_path / "run"
    wrong = make(model, tmp_path)
    code, error = run("train", str(wrong), "--data", str(data), "--run-dir", str(run_dir))
    assert code == 2
    assert_one_sentence(error)
    for word in words:
        assert word in error
    assert not run_dir.exists()


DATA = {
    "broken third line": (
        GOOD_ROW * 2 + GOOD_ROW[:20] + "\n",
        ("data.jsonl", "line 3", '{"prompt'),
    ),
    "empty": ("", ("data.jsonl", "0 usable of 0 rows")),
    "nothing to learn": ('{"text": ""}\n', ("data.jsonl", "0 usable of 1 rows")),
    "number as text": ('{"text": 5}\n', ("data.jsonl", "line 1")),
    "no kind of row": (
        GOOD_ROW + '{"txt": "a"}\n',
        ("data.jsonl", "line 2", "did you mean 'text'"),
    ),
}


@pytest.mark.parametrize("name", DATA)
def test_wrong_data_is_found_before_any_model_loads(
    name: str, tmp_path: Path, run: Callable[..., tuple[int, str]]
) -> None:
    text, words = DATA[name]
    data = write(tmp_path / "data.jsonl", text)
    code, error = run("train", "./no-such-model", "--data", str(data))
    assert code == 2
    assert_one_sentence(error)
    for word in words:
        assert word in error
    assert "no-such-model" not in error


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--rank", "0"), ("rank", "at least 1")),
        (("--targets", "q_proj,k_porj"), ("k_porj", "k_proj")),
        (("--dtype", "fp64"), ("dtype", "bf16")),
        (("--learning-rate", "0"), ("learning_rate",)),
        (("--quantize", "3"), ("quantize", "0, 4, 8")),
        (("--max-seq-length", "999999"), ("max_seq_length",)),
        (("--config", "absent.yaml"), ("absent.yaml",)),
        (("--columns", "promt=question"), ("promt", "did you mean 'prompt'")),
        (("--on-bad-row", "ignore"), ("on_bad_row", "error, drop")),
        (("--val-split", "1"), ("val_split", "below 1")),
        (("--val-split", "0.9"), ("3 rows held out of 3", "at most 2")),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_wrong_options(
    arguments: tuple[str, ...],
    words: tuple[str, ...],
    model: Path,
    tmp_path: Path,
    run: Callable[..., tuple[int, str]],
) -> None:
    data = write(tmp_path / "data.jsonl", GOOD_ROW * 3)
    code, error = run("train", str(model), "--data", str(data), *arguments)
    assert code == 2
    assert_one_sentence(error)
    for word in words:
        assert word in error


CHAT_ROW = json.dumps(
    {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}]}
)


def test_chats_for_a_base_model_are_refused_with_the_way_out(
    model: Path, tmp_path: Path, run: Callable[..., tuple[int, str]]
) -> None:
    base = shutil.copytree(model, tmp_path / "base")
    settings = json.loads((base / "tokenizer_config.json").read_text("utf-8"))
    del settings["chat_template"]
    write(base / "tokenizer_config.json", json.dumps(settings))
    data = write(tmp_path / "data.jsonl", f"{CHAT_ROW}\n")
    run_dir = tmp_path / "run"
    code, error = run("train", str(base), "--data", str(data), "--run-dir", str(run_dir))
    assert code == 2
    assert_one_sentence(error)
    assert "data.jsonl, line 1" in error
    assert "--chat-template NAME or FILE (this tokenizer can do chatml," in error
    assert not run_dir.exists()


def test_unknown_template_is_refused_before_any_model_is_looked_for(
    tmp_path: Path, run: Callable[..., tuple[int, str]]
) -> None:
    data = write(tmp_path / "data.jsonl", f"{CHAT_ROW}\n")
    code, error = run("train", "./no-such-model", "--data", str(data), "--chat-template", "chat-ml")
    assert code == 2
    assert_one_sentence(error)
    assert "did you mean 'chatml'?" in error


def test_a_quantised_base_is_not_quantised_again(
    tmp_path: Path, run: Callable[..., tuple[int, str]]
) -> None:
    packed = make_packed_model(tmp_path / "packed", Packing(bits=4, group_size=64), num_layers=1)
    data = write(tmp_path / "data.jsonl", GOOD_ROW * 3)
    code, error = run("train", str(packed), "--data", str(data), "--quantize", "8")
    assert code == 2
    assert_one_sentence(error)
    assert "quantised already (4 bits in groups of 64); leave --quantize out" in error


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--targets", "qkv_proj"], "no projection is called 'qkv_proj'"),
        (["--targets", "layers.2.q_proj"], "layers.2.q_proj is beyond the model, whose layers are"),
        (["--adapter-layers", "last:16"], "last:16 asks for 16 layers, the model has 2"),
        (["--adapter-layers", "0-99"], "0-99 is beyond the model, whose layers are 0 to 1"),
        (["--scale", "3", "--alpha", "16"], "'scale' 3 and 'alpha' 16 disagree"),
        (["--rank-pattern", "up_proj=4", "--targets", "q_proj"], "up_proj gets no adapter"),
        (["--init-adapter", "nowhere"], "nowhere is not an adapter"),
    ],
)
def test_adapters_that_the_model_has_no_place_for(
    arguments: list[str],
    words: str,
    model: Path,
    tmp_path: Path,
    run: Callable[..., tuple[int, str]],
) -> None:
    data = write(tmp_path / "rows.jsonl", GOOD_ROW)
    code, error = run("train", str(model), "--data", str(data), *arguments)
    assert code == 2
    assert_one_sentence(error)
    assert words in error
    assert not (tmp_path / "home" / "runs").exists()


def test_status_without_an_agent(run: Callable[..., tuple[int, str]]) -> None:
    code, error = run("status")
    assert code == 3
    assert "exo-train join" in error


def test_a_model_that_does_not_fit_says_the_numbers(model: Path) -> None:
    small = [replace(c, usable_memory_bytes=100_000) for c in candidates(["torch", "mlx"])]
    with pytest.raises(DoesNotFitError, match=r"device0 0\.1 MB, device1 0\.1 MB") as caught:
        make_plan(small, TrainConfig(), manifest_of(model), cluster="test")
    assert caught.value.exit_code == 4
