"""What a refusal advises, with Llama 3.1 8B on devices that are too small."""

from __future__ import annotations

import dataclasses
import time
from dataclasses import replace

import pytest

from exo_train.config import TrainConfig
from exo_train.errors import DoesNotFitError
from exo_train.plan.exact import exact_plan
from exo_train.plan.memory import ModelShape, WeightForm
from exo_train.plan.profiles import DeviceProfile, Household, LinkProfile
from exo_train.plan.suggestions import Attempt, refusal, suggest

GB = 10**9
LLAMA_8B = ModelShape(
    num_layers=32,
    hidden_size=4096,
    intermediate_size=14336,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    vocab_size=128256,
    tied_embeddings=False,
)


def attempt(
    *memory_gb: float, microbatch_size: int = 1, value_bytes: int = 2, **options
) -> Attempt:
    return Attempt(
        config=TrainConfig(**options),
        usable_bytes=tuple((f"d{i}", int(gb * GB)) for i, gb in enumerate(memory_gb)),
        microbatch_size=microbatch_size,
        value_bytes=value_bytes,
    )


def by_change(tried: Attempt) -> dict[str, object]:
    return {found.change: found for found in suggest(tried, LLAMA_8B)}


def test_the_sentence_says_what_is_missing_and_what_would_fit():
    assert refusal(attempt(10.5, 10.5, max_seq_length=2048), LLAMA_8B) == (
        "does not fit: needs 8.1 GB more on every split (usable: d0 10.5 GB, d1 10.5 GB); "
        "--checkpoint-activations fits on 2 devices; --max-seq-length 256 fits on 2 devices; "
        "--rank 4 → still no, 7.8 GB missing; --quantize 4 → still no, "
        "2.9 GB missing; one more device like d1 (10.5 GB) → still no, 3.7 GB missing"
    )


def test_a_run_whose_strength_is_said_as_a_scale_is_advised_all_the_same():
    with_alpha = attempt(10.5, 10.5, max_seq_length=2048)
    with_scale = attempt(10.5, 10.5, max_seq_length=2048, scale=2.0)
    assert refusal(with_scale, LLAMA_8B) == refusal(with_alpha, LLAMA_8B)


def test_a_pair_is_tried_where_no_single_change_is_enough():
    found = by_change(attempt(9.2, 9.2, max_seq_length=2048))
    assert not found["--checkpoint-activations"].fits
    assert not found["--max-seq-length 128"].fits
    pair = found["--checkpoint-activations and --max-seq-length 256"]
    assert pair.fits
    assert pair.num_devices == 2


def test_all_changes_together_are_the_last_resort():
    found = by_change(attempt(8, 9, 6, max_seq_length=4096, microbatch_size=4, rank=64))
    pair = found["--checkpoint-activations and --microbatch-size 1"]
    assert not pair.fits
    (every,) = [change for change in found if "--rank" in change and " and " in change]
    assert every.startswith("--checkpoint-activations, --microbatch-size 1, --max-seq-length 128 ")
    assert found[every].fits


def test_what_is_on_already_is_not_advised():
    tried = attempt(4, checkpoint_activations=True, max_seq_length=128, rank=4)
    assert list(by_change(tried)) == ["--quantize 4", "one more device like d0 (4.0 GB)"]


def test_fp32_is_advised_to_be_halved_and_nothing_more():
    """What fits by a single change needs no two."""
    found = by_change(attempt(24, value_bytes=4))
    assert found["--dtype bf16"].fits
    assert not found["--checkpoint-activations"].fits
    assert not found["--rank 4"].fits
    assert not [change for change in found if " and " in change]


def test_a_4_bit_base_fits_where_it_does():
    four_bit = by_change(attempt(8, checkpoint_activations=True))["--quantize 4"]
    assert str(four_bit) == "--quantize 4 fits on 1 device"
    assert "--quantize 4" not in by_change(attempt(4, quantize=4))


def test_a_base_that_is_quantised_is_advised_to_stay_packed():
    packed = replace(LLAMA_8B, layer_weights=WeightForm.packed(bits=4, group_size=64))
    changes = {found.change for found in suggest(attempt(8, base_weights="dense"), packed)}
    assert "--base-weights packed" in changes
    assert "--quantize 4" not in changes
    changes = {found.change for found in suggest(attempt(4), packed)}
    assert not changes & {"--base-weights packed", "--quantize 4"}


def test_one_more_device_is_like_the_largest():
    found = by_change(attempt(9, 11, checkpoint_activations=True, max_seq_length=8192))
    assert found["one more device like d1 (11.0 GB)"].num_devices == 3


def test_each_process_takes_memory_before_it_holds_a_model():
    """On one device the missing bytes grow by the process; two need it once each."""
    plain = attempt(10, max_seq_length=2048)
    with_process = dataclasses.replace(plain, process_bytes=GB)
    missing = [tried.shortfall(LLAMA_8B).missing_bytes() for tried in (plain, with_process)]
    assert missing[1] - missing[0] == GB
    assert "more than the 10.0 GB of d0" in refusal(with_process, LLAMA_8B)


def test_no_device_with_memory():
    assert "no device has memory for anything" in refusal(attempt(0), LLAMA_8B)


@pytest.mark.parametrize("process_bytes", [0, 800_000_000])
@pytest.mark.parametrize("memory_gb", [(10.0, 10.0), (6.5, 9.5, 5.0), (19.0,)])
def test_what_is_said_to_fit_is_planned_and_what_is_not_is_refused(memory_gb, process_bytes):
    """The planner itself judges each single change."""
    tried = attempt(*memory_gb, max_seq_length=2048)
    tried = dataclasses.replace(tried, process_bytes=process_bytes)
    changes = {
        "--checkpoint-activations": {"checkpoint_activations": True},
        **{f"--max-seq-length {n}": {"max_seq_length": n} for n in (1024, 512, 256, 128)},
        "--rank 4": {"rank": 4},
    }
    found = by_change(tried)
    judged = [change for change in changes if change in found]
    assert len(judged) == 3
    for change in judged:
        config = dataclasses.replace(tried.config, **changes[change])
        plan = plan_of(dataclasses.replace(tried, config=config))
        assert (plan is not None) == found[change].fits, change


def plan_of(tried: Attempt):
    link = LinkProfile(latency_s=0.0, bytes_per_s=1e9)
    size = range(len(tried.usable_bytes))
    base = tried.workload(LLAMA_8B).stage_costs
    process = dataclasses.replace(base.per_stage, static_bytes=tried.process_bytes)
    devices = tuple(
        DeviceProfile(
            name=name,
            usable_bytes=memory,
            layer_s=1.0,
            embedding_s=0.0,
            head_s=0.0,
            costs=dataclasses.replace(base, per_stage=process),
        )
        for name, memory in tried.usable_bytes
    )
    home = Household(devices=devices, links={(a, b): link for a in size for b in size if a != b})
    try:
        return exact_plan(home, tried.workload(LLAMA_8B))
    except DoesNotFitError:
        return None


def test_eight_devices_are_judged_in_bounded_time():
    """0.2 s measured; the limit leaves room for a busy machine."""
    tried = attempt(
        *(2 + i / 10 for i in range(8)), max_seq_length=8192, microbatch_size=4, rank=64
    )
    started_s = time.perf_counter()
    assert len(suggest(tried, LLAMA_8B)) >= 6
    assert time.perf_counter() - started_s < 3.0
