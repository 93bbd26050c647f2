"""Ask the planner who would get which layers, for devices that need not exist.

    python examples/plan_a_split.py

Arithmetic only: no model file, no network, no tensor framework. Change MODEL and DEVICES.
"""

from __future__ import annotations

from exo_train.errors import DoesNotFitError
from exo_train.lora_config import LoraConfig
from exo_train.plan.memory import ModelShape, boundary_cost, pseudo_layer_costs
from exo_train.plan.partition import DeviceBudget, one_f_one_b_depth, partition

GB = 10**9
# Llama 3.2 3B, from its config.json.
MODEL = ModelShape(
    num_layers=28,
    hidden_size=3072,
    intermediate_size=8192,
    num_heads=24,
    num_kv_heads=8,
    head_dim=128,
    vocab_size=128_256,
    tied_embeddings=True,
)
# Usable memory, in ring order: the first has the embedding, the last the head.
DEVICES = {"macbook": 5 * GB, "mac-mini": 9 * GB, "den-pc": 9 * GB}
BYTES_PER_VALUE = 2  # bf16 weights and activations
MICROBATCH_TOKENS = 1 * 512  # sequences x positions
NUM_MICROBATCHES = 8


def main() -> None:
    show(DEVICES)
    print()
    show({"macbook": DEVICES["macbook"]})


def show(devices: dict[str, int]) -> None:
    """Print the split over `devices`, or why there is none."""
    costs = pseudo_layer_costs(
        MODEL,
        weight_bytes_per_param=BYTES_PER_VALUE,
        lora=LoraConfig(rank=8),
        microbatch_tokens=MICROBATCH_TOKENS,
        activation_bytes=BYTES_PER_VALUE,
        checkpoint_activations=False,
    )
    budgets = [
        DeviceBudget(name=name, weight=usable, usable_bytes=usable)
        for name, usable in devices.items()
    ]
    per_stage = boundary_cost(
        hidden_size=MODEL.hidden_size,
        microbatch_tokens=MICROBATCH_TOKENS,
        wire_bytes=BYTES_PER_VALUE,
    )
    try:
        split = partition(
            costs, budgets, in_flight=one_f_one_b_depth(NUM_MICROBATCHES), per_stage=per_stage
        )
    except DoesNotFitError as error:
        print(f"does not fit: {error}")
        return
    for part in split:
        stage, device = part.stage, budgets[part.device]
        ends = ("embedding, " if stage.embedding else "", ", head" if stage.head else "")
        print(
            f"{device.name:<10} {ends[0]}layers {stage.start}..{stage.end - 1}{ends[1]}: "
            f"{part.needed_bytes / GB:.1f} of {device.usable_bytes / GB:.1f} GB, "
            f"microbatches in flight: {part.in_flight}"
        )


if __name__ == "__main__":
    main()
