"""A stage's time from a block's, and what another process may say."""

from __future__ import annotations

import json
from typing import Any

import pytest

from exo_train.errors import ProtocolError
from exo_train.lora_config import LoraConfig
from exo_train.plan.block_times import (
    MAX_REQUEST_CHARS,
    BlockMemory,
    BlockTimes,
    EndTimes,
    ProfileRequest,
)

TIMES = BlockTimes(
    layer_forward_s=1.0,
    layer_backward_s=2.0,
    overhead_s=0.5,
    layer_update_s=0.1,
    slowdown=1.1,
    num_repetitions=7,
    ends=EndTimes(embedding_s=0.25, head_s=4.0, head_layer_s=2.0, head_workspace_bytes=9),
    memory=BlockMemory(layer_in_flight_bytes=1, layer_workspace_bytes=2, workspace_bytes=3),
)
REQUEST = ProfileRequest(
    config_json='{"hidden_size": 64}',
    backend="torch",
    device="cuda:0",
    compute_dtype="bf16",
    lora=LoraConfig(rank=4, alpha=8.0, dropout=0.1, targets=("q_proj", "v_proj")),
    microbatch_size=2,
    sequence=128,
    checkpoint_activations=True,
    with_ends=False,
    budget_s=2.5,
)


def test_a_stage_is_its_layers_its_ends_and_what_any_stage_adds() -> None:
    assert TIMES.stage_s(0) == pytest.approx(0.5)
    assert TIMES.stage_s(10) == pytest.approx(30.5)
    assert TIMES.stage_s(10, embedding=True) == pytest.approx(30.75)
    # Under the head a layer takes 2 s here, not 3.
    assert TIMES.stage_s(10, head=True) == pytest.approx(24.5)
    assert TIMES.stage_s(10, embedding=True, head=True) == pytest.approx(24.75)


def test_times_survive_a_pipe() -> None:
    for times in (TIMES, BlockTimes(**{**_fields(TIMES), "ends": None, "memory": None})):
        sent = json.loads(json.dumps(times.to_fields()))
        assert BlockTimes.from_fields(sent, place="there") == times


def test_a_request_survives_a_pipe() -> None:
    assert ProfileRequest.from_json(REQUEST.to_json(), place="there") == REQUEST


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"config_json": "{}"}, "'config_json' must be an object"),
        ({"microbatch_size": 0}, "microbatch_size must be a whole number from 1"),
        ({"sequence": 1.5}, "sequence must be a whole number"),
        ({"compute_dtype": "fp8"}, "compute_dtype must be one of fp32, bf16, fp16"),
        ({"budget_s": 3600}, "budget_s must be a finite number from 0 to 60"),
        ({"lora": {"rank": 4}}, "lacks 'alpha'"),
        ({"schema": 2}, "schema"),
        ({"surprise": 1}, "unknown key"),
    ],
)
def test_a_wrong_request_is_refused(changed: dict[str, Any], message: str) -> None:
    document = json.dumps({**json.loads(REQUEST.to_json()), **changed})
    with pytest.raises(ProtocolError, match=message):
        ProfileRequest.from_json(document, place="there")


@pytest.mark.parametrize("document", ["", "[]", "3", "{", "[" * 99_999, " " * MAX_REQUEST_CHARS])
def test_noise_is_refused(document: str) -> None:
    with pytest.raises(ProtocolError):
        ProfileRequest.from_json(document + " ", place="there")


def test_an_unknown_projection_is_refused() -> None:
    content = json.loads(REQUEST.to_json())
    content["lora"]["targets"] = ["q_proj", "z_proj"]
    with pytest.raises(
        ProtocolError, match=r"there\.lora: 'targets': no projection is called 'z_proj'"
    ):
        ProfileRequest.from_json(json.dumps(content), place="there")


@pytest.mark.parametrize(
    "changed",
    [
        {"layer_forward_s": 0.0, "layer_backward_s": 0.0},
        {"layer_forward_s": 1e-9, "layer_backward_s": 1e-9},
        {"layer_backward_s": 1e5},
        {"overhead_s": float("nan")},
        {"layer_update_s": float("inf")},
        {"process_bytes": 1 << 45},
        {"memory": [{**TIMES.to_fields()["memory"][0], "workspace_bytes": 1 << 45}]},
        {"ends": [{**TIMES.to_fields()["ends"][0], "head_layer_s": 0.0}]},
        {"ends": [{**TIMES.to_fields()["ends"][0], "head_s": 1e5}]},
    ],
    ids=range(9),
)
def test_times_that_no_device_has_are_refused(changed: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError, match=r"^what den-pc says\b.*(must|at least)"):
        BlockTimes.from_fields({**TIMES.to_fields(), **changed}, place="what den-pc says")


def test_a_backend_that_makes_its_gradients_in_the_forward_is_believed() -> None:
    fields = {**TIMES.to_fields(), "layer_backward_s": 0.0}
    assert BlockTimes.from_fields(fields, place="there").layer_s == 1.0


def test_few_or_uneven_calls_are_not_steady() -> None:
    assert TIMES.is_steady
    assert not BlockTimes(**{**_fields(TIMES), "num_repetitions": 2}).is_steady
    assert not BlockTimes(**{**_fields(TIMES), "slowdown": 2.0}).is_steady


def _fields(times: BlockTimes) -> dict[str, Any]:
    return {name: getattr(times, name) for name in BlockTimes.__dataclass_fields__}
