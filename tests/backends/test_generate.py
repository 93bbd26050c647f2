"""Generation with the adapter on: what full forwards say, with a cache."""

from __future__ import annotations

import numpy as np
import pytest

from exo_train.backends.base import Stage
from exo_train.backends.sampling import choose_token, generate_tokens
from tests.backends.hand_ring import load_ring

PROMPT = [5, 17, 200, 31, 8]


def ids(stage: Stage, **changes: object) -> list[int]:
    settings = {"max_tokens": 14, "temperature": 0.0, "seed": 0, "stop_ids": set(), **changes}
    return list(generate_tokens(stage.start_decoding(), PROMPT, **settings))


@pytest.mark.parametrize("model", ["llama3-rope", "mistral-window", "qwen3"])
def test_greedy_ids_are_those_of_full_forwards_in_both_backends(model: str) -> None:
    stages = {name: load_ring(model, [name])[0] for name in ("mlx", "torch")}
    got = ids(stages["torch"])
    assert got == ids(stages["mlx"])
    assert len(got) == 14  # past the sliding window of 8
    seen = list(PROMPT)
    for token in got:
        without_cache = generate_tokens(
            stages["torch"].start_decoding(),
            seen,
            max_tokens=1,
            temperature=0.0,
            seed=0,
            stop_ids=set(),
        )
        assert next(without_cache) == token
        seen.append(token)


@pytest.mark.parametrize("backend", ["mlx", "torch"])
def test_sampling_repeats_with_its_seed_and_stops(backend: str) -> None:
    (stage,) = load_ring("llama", [backend])
    first = ids(stage, temperature=1.5, seed=1)
    assert first == ids(stage, temperature=1.5, seed=1)
    assert first != ids(stage, temperature=1.5, seed=2)
    stopped = ids(stage, temperature=1.5, seed=1, stop_ids={first[3]})
    assert stopped == first[: first.index(first[3])]


def test_the_adapter_is_on() -> None:
    (stage,) = load_ring("llama", ["torch"])
    before = ids(stage)
    stage.load_adapter({name: 10 * value for name, value in stage.adapter().items()})
    assert ids(stage) != before


def test_temperature_one_draws_the_softmax() -> None:
    logits_V = np.log(np.array([0.7, 0.2, 0.1]))
    rng = np.random.default_rng(0)
    drawn = [choose_token(logits_V, temperature=1.0, rng=rng) for _ in range(4000)]
    np.testing.assert_allclose(np.bincount(drawn) / 4000, [0.7, 0.2, 0.1], atol=0.03)
    assert choose_token(logits_V, temperature=0.0, rng=rng) == 0
