"""One contract for both backends: a ring equals one stage, whatever it is made of."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from exo_train.errors import ConfigError
from exo_train.lora_config import LoraConfig
from exo_train.wire.tensor import DType, HostTensor
from tests.backends.hand_ring import (
    LORA,
    MODELS,
    ONE_STAGE,
    OPTIONS,
    accumulate,
    assert_same_run,
    load_ring,
    merged,
    microbatches,
    one_stage_run,
    relative_error,
    rows,
    tiny,
    train,
)

BACKENDS = ("mlx", "torch")
DROPOUT = replace(LORA, dropout=0.2)
each_backend = pytest.mark.parametrize("backend", BACKENDS)


@each_backend
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("bounds", [(0, 1, 4), (0, 1, 3, 4)], ids=["two", "three"])
def test_a_split_equals_one_stage(backend: str, model: str, bounds: tuple[int, ...]) -> None:
    split = train(load_ring(model, [backend], bounds))
    assert_same_run(split, one_stage_run(model, backend))


@pytest.mark.parametrize("model", MODELS)
def test_mlx_equals_torch(model: str) -> None:
    assert_same_run(one_stage_run(model, "mlx"), one_stage_run(model, "torch"))


@pytest.mark.parametrize("model", ["llama", "qwen3"])
@pytest.mark.parametrize("backends", [("torch", "mlx"), ("mlx", "torch"), ("mlx", "torch", "mlx")])
def test_a_mixed_ring_equals_one_stage(model: str, backends: tuple[str, ...]) -> None:
    bounds = (0, 2, 4) if len(backends) == 2 else (0, 1, 3, 4)
    assert_same_run(train(load_ring(model, backends, bounds)), one_stage_run(model, "torch"))


def test_the_comparison_catches_a_gradient_off_by_one_percent() -> None:
    faulty = train(load_ring("llama", ["torch"], (0, 2, 4)), grad_fault=1.01)
    with pytest.raises(AssertionError):
        assert_same_run(faulty, one_stage_run("llama", "torch"))


@each_backend
def test_loss_goes_down_and_every_adapter_array_moves(backend: str) -> None:
    stages = load_ring("llama", [backend])
    before = merged(stage.adapter() for stage in stages)
    losses = []
    for step in range(8):
        losses.append(accumulate(stages, rows(seed=0), step=step))
        stages[0].apply(learning_rate=1e-2, grad_scale=1.0)
    assert losses[-1] < losses[0] - 0.5
    after = stages[0].adapter()
    assert all(np.abs(after[name] - value).max() > 1e-3 for name, value in before.items())
    assert len(after) == 4 * 7 * 2


@each_backend
@pytest.mark.parametrize("lora", [LORA, DROPOUT], ids=["plain", "dropout"])
def test_checkpointing_changes_no_number(backend: str, lora: LoraConfig) -> None:
    options = replace(OPTIONS, checkpoint_activations=True)
    checkpointed = load_ring("qwen2", [backend], (0, 2, 4), lora=lora, options=options)
    plain = load_ring("qwen2", [backend], (0, 2, 4), lora=lora)
    assert_same_run(train(checkpointed), train(plain))
    (batch,) = microbatches(rows(), 4)
    first, second = (stages[0].evaluate(batch) for stages in (checkpointed, plain))
    assert isinstance(first, HostTensor)
    assert isinstance(second, HostTensor)
    np.testing.assert_allclose(first.to_numpy(), second.to_numpy(), atol=1e-4)


@each_backend
@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("lora", [LORA, DROPOUT], ids=["plain", "dropout"])
def test_microbatch_size_and_padding_change_no_number(
    backend: str, size: int, lora: LoraConfig
) -> None:
    expected = train(load_ring("llama", [backend], lora=lora), microbatch_size=2)
    got = train(load_ring("llama", [backend], lora=lora), microbatch_size=size)
    assert_same_run(got, expected)


@each_backend
def test_a_short_row_counts_by_its_tokens_however_a_step_is_cut(backend: str) -> None:
    """F53: rows of 4 and of 50 tokens in one microbatch, and in two."""
    chosen = [replace(row, supervised=row.supervised | True) for row in rows(lengths=(4, 50))]
    (stage,) = load_ring("llama", [backend])
    loss, gradients = accumulate([stage], chosen, microbatch_size=2), stage.gradients()
    assert accumulate([stage], chosen, microbatch_size=1) == pytest.approx(loss, rel=1e-6)
    assert relative_error(stage.gradients(), gradients) < 1e-5
    each = [accumulate([stage], [row]) for row in chosen]
    assert loss == pytest.approx((4 * each[0] + 50 * each[1]) / 54, rel=1e-6)
    assert abs(loss - sum(each) / 2) > 1e-3, "this test could not fail"


def test_dropout_is_the_same_for_any_split_and_backend() -> None:
    expected = train(load_ring("llama", ["torch"], lora=DROPOUT))
    assert relative_error(expected.gradients, one_stage_run("llama", "torch").gradients) > 0.05
    for backends, bounds in [(["mlx"], ONE_STAGE), (["mlx", "torch"], (0, 3, 4))]:
        assert_same_run(train(load_ring("llama", backends, bounds, lora=DROPOUT)), expected)


@each_backend
def test_evaluate_has_no_dropout_and_leaves_the_step_alone(backend: str) -> None:
    plain, dropping = (load_ring("llama", [backend], lora=lora)[0] for lora in (LORA, DROPOUT))
    (batch,) = microbatches(rows(), 4)
    accumulate([dropping], rows())
    gradients, loss = dropping.gradients(), dropping.loss_sum()
    assert dropping.evaluate(batch) == plain.evaluate(batch)
    assert dropping.loss_sum() == loss
    assert relative_error(dropping.gradients(), gradients) == 0


@each_backend
@pytest.mark.parametrize("wire", [DType.BF16, DType.FP16])
def test_a_16_bit_wire_stays_close(backend: str, wire: DType) -> None:
    options = replace(OPTIONS, wire_dtype=wire)
    stages = load_ring("llama", [backend], (0, 2, 4), options=options)
    got, expected = train(stages, steps=2), one_stage_run("llama", backend)
    np.testing.assert_allclose(got.losses, expected.losses[:2], rtol=2e-3)
    assert relative_error(got.gradients, expected.gradients) < 0.05
    (batch,) = microbatches(rows(), 4)
    hidden = stages[0].evaluate(batch)
    assert isinstance(hidden, HostTensor)
    assert hidden.dtype is wire
    assert hidden.num_bytes == 4 * 24 * 64 * 2


@each_backend
@pytest.mark.parametrize("dtype", [DType.BF16, DType.FP16])
def test_a_16_bit_base_stays_close_and_keeps_the_adapter_in_fp32(
    backend: str, dtype: DType
) -> None:
    options = replace(OPTIONS, compute_dtype=dtype, wire_dtype=dtype)
    got = train(load_ring("llama", [backend], (0, 2, 4), options=options), steps=2)
    np.testing.assert_allclose(got.losses, one_stage_run("llama", backend).losses[:2], rtol=1e-2)
    assert relative_error(got.gradients, one_stage_run("llama", backend).gradients) < 0.2
    assert {array.dtype for array in got.adapter.values()} == {np.dtype(np.float32)}


@each_backend
def test_nothing_supervised_gives_loss_zero_and_no_gradient(backend: str) -> None:
    stages = load_ring("llama", [backend], (0, 2, 4))
    for stage in stages:
        stage.begin_step(step=0, loss_scale=1.0)
    (batch,) = microbatches([replace(r, supervised=r.supervised & False) for r in rows()], 4)
    stages[1].forward(replace(batch, hidden_BTD=stages[0].forward(batch)))
    grad_BTD = stages[1].backward(0, None)
    assert grad_BTD is not None
    assert grad_BTD.shape == (4, 24, 64)
    assert not grad_BTD.to_numpy().any()
    assert stages[0].backward(0, grad_BTD) is None
    assert stages[1].loss_sum() == 0.0
    assert stages[1].evaluate(replace(batch, hidden_BTD=stages[0].evaluate(batch))) == 0.0
    assert sum(stage.grad_square_sum() for stage in stages) == 0.0


@each_backend
def test_grad_square_sum_is_that_of_the_gradients(backend: str) -> None:
    (stage,) = load_ring("llama", [backend])
    accumulate([stage], rows())
    expected = sum(float((g.astype(np.float64) ** 2).sum()) for g in stage.gradients().values())
    assert stage.grad_square_sum() == pytest.approx(expected, rel=1e-6)


@each_backend
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("start", "end"), [(0, 1), (1, 3), (3, 4), (0, 4)])
def test_a_stage_reads_its_own_tensors_only(backend: str, tied: bool, start: int, end: int) -> None:
    model = "llama" if tied else "llama-untied-biased"
    spec, source = tiny(model)
    source.names_read.clear()
    load_ring(model, [backend], (start, end))
    expected = spec.tensor_shapes(start=start, end=end, embedding=start == 0, head=end == 4)
    assert sorted(source.names_read) == sorted(expected)


@pytest.mark.parametrize("before", BACKENDS)
@pytest.mark.parametrize("after", BACKENDS)
def test_a_run_goes_on_exactly_on_another_split_and_backend(before: str, after: str) -> None:
    saved = train(load_ring("llama", [before], (0, 1, 4)), steps=3)
    stages = load_ring("llama", [after], (0, 3, 4), options=replace(OPTIONS, seed=99))
    for stage in stages:
        stage.load_adapter(saved.adapter)
        stage.load_optimizer_state(saved.optimizer_state)
    assert saved.optimizer_state["step"] == 3
    resumed = train(stages, steps=2, first_step=3)
    expected = one_stage_run("llama", after)
    np.testing.assert_allclose(resumed.losses, expected.losses[3:], rtol=1e-6)
    for name, value in expected.adapter.items():
        np.testing.assert_allclose(resumed.adapter[name], value, atol=1e-5, rtol=0)
    assert resumed.optimizer_state["step"] == 5


@each_backend
def test_a_foreign_adapter_is_refused_by_name(backend: str) -> None:
    stages = load_ring("llama", [backend], (0, 2, 4))
    saved = merged(stage.adapter() for stage in stages)
    name = "model.layers.1.self_attn.q_proj.lora_a"
    with pytest.raises(ConfigError, match=f"{name}' has shape"):
        stages[0].load_adapter({**saved, name: saved[name][:, :2]})
    with pytest.raises(ConfigError, match=f"no '{name}'"):
        stages[0].load_adapter({k: v for k, v in saved.items() if k != name})
    narrow = load_ring("llama", [backend], lora=replace(LORA, targets=("v_proj",)))[0]
    with pytest.raises(ConfigError, match="'targets'"):
        narrow.load_adapter(saved)


@each_backend
def test_a_step_begun_again_forgets_the_first_try(backend: str) -> None:
    (stage,) = load_ring("llama", [backend])
    first = accumulate([stage], rows())
    gradients = stage.gradients()
    assert accumulate([stage], rows()) == first
    assert relative_error(stage.gradients(), gradients) == 0


@each_backend
def test_tensors_given_out_do_not_change_later(backend: str) -> None:
    stages = load_ring("llama", [backend], (0, 2, 4))
    (batch,) = microbatches(rows(), 4)
    for stage in stages:
        stage.begin_step(step=0, loss_scale=1.0)
    hidden = stages[0].forward(batch)
    assert hidden is not None
    adapter, copy = stages[0].adapter(), hidden.to_numpy().copy()
    held = {name: value.copy() for name, value in adapter.items()}
    stages[1].forward(replace(batch, hidden_BTD=hidden))
    stages[0].backward(0, stages[1].backward(0, None))
    stages[0].apply(learning_rate=1.0, grad_scale=1.0)
    np.testing.assert_array_equal(hidden.to_numpy(), copy)
    assert relative_error(adapter, held) == 0


@each_backend
def test_an_unknown_device_is_refused_by_name(backend: str) -> None:
    with pytest.raises(ConfigError, match="no device 'toaster'; use"):
        load_ring("llama", [backend], device="toaster")


@each_backend
def test_memory_is_told(backend: str) -> None:
    (stage,) = load_ring("llama", [backend])
    assert stage.peak_memory_bytes() > 1_000_000
