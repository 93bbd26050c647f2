"""A trained model on disk: whole, as it was trained, and refused where it is neither."""

from __future__ import annotations

import json
from pathlib import Path

import mlx_lm
import numpy as np
import pytest
import torch
import transformers

from exo_train.agent.run_template import save_tokenizer
from exo_train.errors import NumericsError
from exo_train.models.open import open_model
from exo_train.train import full_model
from exo_train.train.full_model import model_bytes, read_weights, write_model
from tests.tiny_models import make_tiny_model

NORM = "model.norm.weight"


def weights(base: Path, *, moved: float = 1e-2) -> dict[str, np.ndarray]:
    spec, _ = open_model(base)
    rng = np.random.default_rng(0)
    return {
        name: value + np.float32(moved) * rng.standard_normal(value.shape, np.float32)
        for name, value in read_weights(base, spec.all_tensor_shapes()).items()
    }


def written(base: Path, trained: dict[str, np.ndarray], folder: Path, steps: int = 3) -> Path:
    return write_model(
        folder / "model",
        trained,
        base=base,
        steps=steps,
        write_tokenizer=lambda to: save_tokenizer(folder, to, model_path=base),
    )


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("dtype", ["F32", "BF16", "F16"])
def test_other_programs_load_it(
    dtype: str, tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In shards, as a large one; transformers and mlx_lm compute the same with it."""
    monkeypatch.setattr(full_model, "SHARD_BYTES", model_bytes_third := 40_000)
    base = make_tiny_model(tmp_path / "base", tied=tied, dtype=dtype)
    (base / "generation_config.json").write_text('{"temperature": 0.5}')
    trained = weights(base)
    model = written(base, trained, tmp_path)
    shards = sorted(model.glob("model-*.safetensors"))
    assert len(shards) > 2
    assert all(shard.stat().st_size < 2 * model_bytes_third + 5000 for shard in shards)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(model, dtype="auto")
    torch_dtype = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}[dtype]
    assert theirs.dtype == torch_dtype
    assert theirs.generation_config.temperature == 0.5
    for name, value in theirs.state_dict().items():
        if name != "lm_head.weight" or not tied:
            expected = torch.from_numpy(trained[name]).to(torch_dtype)
            assert torch.equal(value, expected), name
    tokens = [[1, 5, 9, 200]]
    mlx_model, _ = mlx_lm.load(str(model))
    ours = np.array(mlx_model(mlx_lm.utils.mx.array(tokens)).astype(mlx_lm.utils.mx.float32))
    with torch.no_grad():
        plain = theirs(torch.tensor(tokens)).logits.float().numpy()
    np.testing.assert_allclose(ours, plain, atol=1e-4 if dtype == "F32" else 0.2)


def test_only_chosen_layers_are_replaced(tmp_path: Path) -> None:
    base = make_tiny_model(tmp_path / "base")
    trained = {n: a for n, a in weights(base).items() if n.startswith("model.layers.3.")}
    model = written(base, trained, tmp_path)
    spec, _ = open_model(model)
    before, after = (read_weights(path, spec.all_tensor_shapes()) for path in (base, model))
    changed = {name for name in before if not np.array_equal(before[name], after[name])}
    assert changed == set(trained)
    assert (model / "model.safetensors").stat().st_size > model_bytes(base)
    config = json.loads((model / "config.json").read_text("utf-8"))
    assert config["model_type"] == "llama"


def test_what_is_not_what_was_trained_is_refused(tmp_path: Path) -> None:
    base = make_tiny_model(tmp_path / "base", dtype="BF16")
    layers = {name: array for name, array in weights(base).items() if ".layers." in name}
    still = [name for name in layers if ".0." in name or ".1." in name]
    with pytest.raises(NumericsError, match="nothing has moved after 3 steps in layer 0, layer 1"):
        written(base, layers | read_weights(base, dict.fromkeys(still)), tmp_path)
    hardly = {n: a + np.float32(1e-6) for n, a in read_weights(base, {NORM: ()}).items()}
    with pytest.raises(NumericsError, match="all changes of 3 steps are lost in its BF16"):
        written(base, hardly, tmp_path)
    with pytest.raises(NumericsError, match=r"NaN or infinities in model\.norm\.weight"):
        written(base, weights(base) | {NORM: np.full(64, np.nan)}, tmp_path)
    assert not (tmp_path / "model").exists()
    assert not list(tmp_path.glob(".model*"))


def test_a_damaged_write_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = make_tiny_model(tmp_path / "base")
    usual = full_model._tensor

    def damaged(name: str, trained: dict[str, np.ndarray], source: object) -> object:
        return usual(name, {} if name == "model.norm.weight" else trained, source)

    monkeypatch.setattr(full_model, "_tensor", damaged)
    with pytest.raises(NumericsError, match=r"model\.norm\.weight, read back"):
        written(base, weights(base), tmp_path)
