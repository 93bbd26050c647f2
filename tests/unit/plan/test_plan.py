"""A plan survives the network unchanged, and a wrong one is refused in words."""

from __future__ import annotations

import dataclasses
import json

import pytest

from exo_train.errors import ProtocolError
from exo_train.lora_config import LoraConfig
from exo_train.optimizer_config import OptimizerConfig
from exo_train.peer import Address, NodeId
from exo_train.plan.plan import Plan, RankPlan
from exo_train.plan.stages import StageSpec


def make_plan(*layers: tuple[int, int], num_layers: int = 16, **changes) -> Plan:
    layers = layers or ((0, 7), (7, 16))
    ranks = tuple(
        RankPlan(
            rank=i,
            node_id=NodeId(f"node{i}"),
            name=["küche-mac", "attic pc", "c", "d"][i],
            backend="mlx" if i % 2 else "torch",
            device="cpu",
            compute_dtype="fp32",
            stage=StageSpec(start=s, end=e, embedding=i == 0, head=i == len(layers) - 1),
            addresses=(Address("fe80::1%en0", 50051), Address("10.0.0.2", 50051)),
        )
        for i, (s, e) in enumerate(layers)
    )
    plan = Plan(
        cluster="home",
        run_id="r1",
        generation=3,
        model_hash="ab" * 32,
        num_layers=num_layers,
        hidden_size=64,
        ranks=ranks,
        pipeline_schedule="1f1b",
        microbatch_size=2,
        max_seq_length=512,
        wire_dtype="bf16",
        lora=LoraConfig(rank=4, alpha=12.0, targets=("q_proj", "up_proj")),
        optimizer=OptimizerConfig(),
        seed=7,
    )
    return dataclasses.replace(plan, **changes)


def test_round_trip_keeps_everything_and_the_hash():
    plan = make_plan()
    again = Plan.from_json(plan.to_json())
    assert again == plan
    assert again.hash == plan.hash
    assert len(plan.hash) == 64


def test_hash_does_not_depend_on_layout_or_number_spelling():
    plan = make_plan()
    pretty = json.dumps(json.loads(plan.to_json()), indent=2, ensure_ascii=False)
    assert Plan.from_json(pretty).hash == plan.hash
    whole = dataclasses.replace(plan, lora=dataclasses.replace(plan.lora, alpha=12))
    assert whole.hash == plan.hash


def test_json_is_canonical():
    text = make_plan().to_json()
    assert text == json.dumps(json.loads(text), sort_keys=True, separators=(",", ":"))
    assert text.isascii()


@pytest.mark.parametrize(
    "changes",
    [{"seed": 8}, {"generation": 4}, {"wire_dtype": "fp32"}, {"lora": LoraConfig()}],
)
def test_any_change_changes_the_hash(changes):
    assert make_plan(**changes).hash != make_plan().hash


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        (((0, 7), (8, 16)), "layer 7 has no owner before rank 1 (attic pc)"),
        (((0, 7), (5, 16)), "layers 5..6 have an owner before rank 1 (attic pc) already"),
        (((0, 7), (7, 14)), "layers 14..15 have no owner"),
        (((2, 7), (7, 16)), "layers 0..1 have no owner before rank 0"),
        (((0, 7), (7, 7)), "rank 1 (attic pc) has no layer"),
        (((0, 7), (7, 18)), "ends at layer 17, the model's last is 15"),
        (((8, 16), (0, 8)), "layers 0..7 have no owner before rank 0"),
    ],
)
def test_layers_need_exactly_one_owner(layers, message):
    with pytest.raises(ProtocolError) as caught:
        Plan.from_json(make_plan(*layers).to_json())
    assert message in str(caught.value)


def test_embedding_and_head_have_their_places():
    plan = make_plan()
    stage = dataclasses.replace(plan.ranks[1].stage, head=False)
    ranks = (plan.ranks[0], dataclasses.replace(plan.ranks[1], stage=stage))
    with pytest.raises(ProtocolError, match="rank 1 \\(attic pc\\) lacks the head"):
        dataclasses.replace(plan, ranks=ranks).validate()
    stage = dataclasses.replace(plan.ranks[1].stage, embedding=True)
    ranks = (plan.ranks[0], dataclasses.replace(plan.ranks[1], stage=stage))
    with pytest.raises(ProtocolError, match="rank 1 \\(attic pc\\) has the embedding"):
        dataclasses.replace(plan, ranks=ranks).validate()


def test_ranks_are_contiguous():
    plan = make_plan()
    with pytest.raises(ProtocolError, match="rank 1 \\(attic pc\\) at place 0"):
        dataclasses.replace(plan, ranks=plan.ranks[::-1]).validate()


def test_one_device_may_hold_several_stages():
    """The comparison of `verify` runs a ring's split on one device."""
    plan = make_plan()
    twin = dataclasses.replace(plan.ranks[1], node_id=plan.ranks[0].node_id)
    dataclasses.replace(plan, ranks=(plan.ranks[0], twin)).validate()


def changed(path: str, value: object) -> str:
    """Give a good plan's JSON with the value at `path` replaced (None: the key removed)."""
    plain = json.loads(make_plan().to_json())
    *parents, last = [int(p) if p.isdigit() else p for p in path.split(".")]
    inner = plain
    for parent in parents:
        inner = inner[parent]
    if value is None:
        del inner[last]
    else:
        inner[last] = value
    return json.dumps(plain)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("seed", None, "plan lacks 'seed'"),
        ("sede", 1, "plan has the unknown key 'sede'"),
        ("seed", "7", "plan.seed must be a whole number"),
        ("seed", True, "plan.seed must be a whole number"),
        ("seed", -1, "plan.seed must be a whole number"),
        ("seed", 2**63, "plan.seed must be a whole number"),
        ("schema", 2, "plan.schema must be a whole number from 1 to 1, got 2"),
        ("num_layers", 10**9, "plan.num_layers"),
        ("checkpoint_activations", 1, "must be true or false"),
        ("wire_dtype", "auto", "must be one of fp32, bf16, fp16"),
        ("pipeline_schedule", "zb", "must be one of 1f1b, gpipe"),
        ("ranks.1.name", "\x1b[2Jevil", "without control characters"),
        ("ranks.1.name", "x" * 257, "without control characters"),
        ("ranks.0.backend", "cuda", "plan.ranks[0].backend must be one of mlx, torch"),
        ("ranks.0.stage.layers", [0, 7, 9], "a list of at most 2 items"),
        ("ranks.0.stage.layers", [0], "must be [start, end]"),
        ("ranks.0.stage.layers", [0, 7.5], "must be a whole number"),
        ("ranks.0.addresses.0.port", 0, "must be a whole number from 1 to 65535"),
        ("ranks.0.addresses.0.user", "x", "unknown key 'user'"),
        ("ranks", [], "plan has no ranks"),
        ("ranks", {}, "a list of at most 256 items"),
        ("ranks.0", 5, "plan.ranks[0] must be an object, got 5"),
        ("lora.targets", ["q_proj", "q_proj"], "names a projection twice"),
        ("lora.targets", ["lm_head"], "no projection is called 'lm_head'; known: q_proj"),
        ("lora.rank", 0, "plan.lora.rank"),
        ("lora.alpha", 0, "plan.lora.alpha must be a finite number"),
        ("optimizer.beta1", 1.0, "plan.optimizer.beta1"),
    ],
)
def test_wrong_fields_are_refused_by_name(path, value, message):
    with pytest.raises(ProtocolError) as caught:
        Plan.from_json(changed(path, value))
    assert message in str(caught.value)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not valid JSON"),
        ("[1]", "must be an object"),
        ("[" * 100_000, "nested too deeply"),
        ('{"seed": ' + "9" * 100 + "}", "a number has 100 digits"),
        ('{"seed": NaN}', "NaN is not a number"),
        ('{"seed": 1, "seed": 2}', "a key comes twice"),
        (" " * 1_000_001, "the limit is 1000000"),
    ],
    ids=["empty", "array", "deep", "digits", "nan", "twice", "long"],
)
def test_json_bombs_are_refused(text, message):
    with pytest.raises(ProtocolError, match=message):
        Plan.from_json(text)
