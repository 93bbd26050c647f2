"""Bases in NF4: the numbers of bitsandbytes, trained with by both backends.

bitsandbytes itself is asked where it is installed.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from exo_train.models.decode import decode
from exo_train.models.open import open_model
from tests.backends.hand_ring import accumulate, relative_error, rows, train
from tests.backends.test_oracles import peft_model, peft_parameter, plain_loss
from tests.backends.test_packed_bases import BACKENDS, DENSE, assert_same_numbers, load
from tests.packed_models import SIZES, dense_model, make_nf4_model
from tests.tiny_models import make_tiny_model

NUM_LAYERS = 2


@pytest.mark.parametrize("double", [True, False])
def test_both_backends_train_as_on_the_numbers_in_full(tmp_path: Path, double: bool) -> None:
    packed = make_nf4_model(tmp_path / "packed", num_layers=NUM_LAYERS, double=double)
    expected = train(load(dense_model(tmp_path / "dense", packed), ["torch"]), steps=2)
    for backend in BACKENDS:
        assert_same_numbers(train(load(packed, [backend]), steps=2), expected)
        held_in_full = train(load(packed, [backend], options=DENSE), steps=2)
        assert_same_numbers(held_in_full, expected)


def test_torch_makes_large_matrices_dense_in_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = make_nf4_model(tmp_path / "packed", num_layers=NUM_LAYERS)
    expected = train(load(packed, ["torch"]), steps=1)
    monkeypatch.setattr("exo_train.backends.torch_packed.DENSE_BLOCK_VALUES", 128 * 50)
    assert_same_numbers(train(load(packed, ["torch"]), steps=1), expected)


@pytest.fixture(scope="module", params=[True, False], ids=["double", "single"])
def theirs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that transformers has quantised with bitsandbytes, in its own files."""
    pytest.importorskip("bitsandbytes")
    folder = tmp_path_factory.mktemp("theirs")
    plain = make_tiny_model(folder / "plain", num_layers=NUM_LAYERS, **SIZES)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        plain,
        quantization_config=transformers.BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=request.param,
            bnb_4bit_compute_dtype=torch.float32,
        ),
        dtype=torch.float32,
        device_map="cpu",
    )
    model.save_pretrained(folder / "nf4")
    return folder / "nf4"


def test_every_weight_is_that_of_bitsandbytes(theirs: Path) -> None:
    from bitsandbytes import functional

    spec, source = open_model(theirs)
    model = transformers.AutoModelForCausalLM.from_pretrained(theirs, device_map="cpu")
    num_packed = 0
    for name in spec.all_tensor_shapes():
        parameter = model.get_parameter(name)
        if not hasattr(parameter, "quant_state"):
            continue
        expected = functional.dequantize_4bit(parameter.data, parameter.quant_state).numpy()
        got = decode(source.infos[name], source.read(name)).to_numpy()
        assert np.array_equal(got, expected), name
        num_packed += 1
    assert num_packed == 7 * NUM_LAYERS


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")
@pytest.mark.parametrize("backend", BACKENDS)
def test_training_is_that_of_peft_on_bitsandbytes(theirs: Path, backend: str) -> None:
    (stage,) = load(theirs, [backend])
    oracle = peft_model(theirs, stage.adapter())
    oracle.train()  # else bitsandbytes computes in bfloat16 on some CPUs
    expected = plain_loss(oracle, rows())
    assert accumulate([stage], rows()) == pytest.approx(expected.item(), rel=1e-6)
    expected.backward()
    gradients = {name: peft_parameter(oracle, name).grad.numpy().T for name in stage.gradients()}
    assert relative_error(stage.gradients(), gradients) < 1e-5
