"""What of a model is trained: projections that get an adapter, of which rank, or all weights.

Owns the words for it (targets, layers, patterns) and what they come to on a model of so many
layers. Pure: knows no array and no file. A choice that fits no layer is refused for the whole
model at once, never stage by stage.

| strength | scale of x A B |
|---|---|
| LoRA (Hu et al. 2021, arXiv:2106.09685) | alpha / rank |
| rank-stabilised (Kalajdzievski 2023, arXiv:2312.03732) | alpha / sqrt(rank) |
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from exo_train.errors import ConfigError
from exo_train.options import nearest

ATTENTION_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")
ALL_TARGETS = (*ATTENTION_TARGETS, "gate_proj", "up_proj", "down_proj")
ALL_LINEAR = "all-linear"  # PEFT's word: every projection, but not the head
ALL_LAYERS = ("all",)
DEFAULT_ALPHA = 16.0
FULL_LEARNING_RATE = 2e-5  # weights bear a tenth of what an adapter bears
# What says nothing where no adapter is trained, or would change what cannot be trained then.
NOT_WITH_FULL = (
    *("rank", "alpha", "scale", "rslora", "dora", "dropout", "targets", "rank_pattern"),
    *("alpha_pattern", "init_adapter", "lora_plus_ratio", "quantize"),
)
MAX_RANK = 2**16
MAX_ALPHA = 1e9

_TARGET = re.compile(r"(?:(?:model\.)?layers\.([0-9]{1,5})\.)?(?:(self_attn|mlp)\.)?(\w+)")
_LAST = re.compile(r"last:([0-9]{1,5})")
_RANGE = re.compile(r"([0-9]{1,5})(?:-([0-9]{1,5}))?")
_T = TypeVar("_T", int, float)

Pattern = tuple[tuple[str, _T], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraConfig:
    """W x + scale · B A x, or with `dora` m · (W + scale · B A) x / |W + scale · B A|.

    `rank_pattern` and `alpha_pattern` name what differs from `rank` and `alpha`; of two that fit
    a projection the one with its layer counts. `layers` are as `chosen_layers` reads them. `full`:
    no adapter, the layers' own weights are trained, and only `layers` count.
    """

    rank: int = 8
    alpha: float = DEFAULT_ALPHA
    dropout: float = 0.0
    targets: tuple[str, ...] = ALL_TARGETS
    layers: tuple[str, ...] = ALL_LAYERS
    rslora: bool = False
    dora: bool = False
    rank_pattern: Pattern[int] = ()
    alpha_pattern: Pattern[float] = ()
    full: bool = False

    @property
    def scale(self) -> float:
        """The strength of projections that no pattern names."""
        return scale_of(self.alpha, self.rank, rslora=self.rslora)


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """One projection that has an adapter; `layer` is the model's own number."""

    layer: int
    target: str
    rank: int
    alpha: float
    rslora: bool = False

    @property
    def block(self) -> str:
        return block_of(self.target)

    @property
    def prefix(self) -> str:
        return adapter_prefix(self.layer, self.target)

    @property
    def scale(self) -> float:
        return scale_of(self.alpha, self.rank, rslora=self.rslora)


def scale_of(alpha: float, rank: int, *, rslora: bool) -> float:
    return alpha / (math.sqrt(rank) if rslora else rank)


def alpha_of(scale: float, rank: int, *, rslora: bool) -> float:
    """Give the alpha that makes `scale`; twelve digits take off what dividing has left behind."""
    return float(f"{scale * (math.sqrt(rank) if rslora else rank):.12g}")


def said_over(weaker: Mapping[str, Any], stronger: Mapping[str, Any]) -> dict[str, Any]:
    """Join two places of options; a scale or an alpha is in place of the weaker place's other."""
    strengths = {"scale", "alpha"}
    hidden = strengths if strengths & stronger.keys() else set[str]()
    return {**{k: v for k, v in weaker.items() if k not in hidden}, **stronger}


def block_of(target: str) -> str:
    return "self_attn" if target in ATTENTION_TARGETS else "mlp"


def module_path(target: str) -> str:
    """Give the path of a projection inside its decoder layer."""
    return f"{block_of(target)}.{target}"


def adapter_prefix(layer: int, target: str) -> str:
    return f"model.layers.{layer}.{module_path(target)}"


@functools.lru_cache(maxsize=64)
def placements(lora: LoraConfig, num_layers: int) -> tuple[Placement, ...]:
    """Give every projection that gets an adapter, in the order of computing; none with `full`.

    Raises ConfigError for a target, layer or pattern that fits nothing in `num_layers` layers.
    """
    chosen = _chosen(lora, num_layers)
    if lora.full:
        return ()
    ranks = _pattern(lora.rank_pattern, "rank_pattern", chosen)
    alphas = _pattern(lora.alpha_pattern, "alpha_pattern", chosen)
    return tuple(
        Placement(
            layer=layer,
            target=target,
            rank=_looked_up(ranks, layer, target, lora.rank),
            alpha=_looked_up(alphas, layer, target, lora.alpha),
            rslora=lora.rslora,
        )
        for layer, target in chosen
    )


def densest_layer(lora: LoraConfig, num_layers: int) -> dict[str, int]:
    """Give target and rank of a layer that has every adapter that any layer has.

    What plans and profiles reckon each layer with: none has more.
    """
    ranks: dict[str, int] = {}
    for placement in placements(lora, num_layers):
        ranks[placement.target] = max(placement.rank, ranks.get(placement.target, 0))
    return {target: ranks[target] for target in ALL_TARGETS if target in ranks}


def in_every_layer(lora: LoraConfig, num_layers: int) -> LoraConfig:
    """Give the adapters of `densest_layer` for a model of any number of layers."""
    if lora.full:
        return LoraConfig(full=True)
    ranks = densest_layer(lora, num_layers)
    return LoraConfig(
        rank=lora.rank,
        alpha=lora.alpha,
        dropout=lora.dropout,
        targets=tuple(ranks),
        rslora=lora.rslora,
        dora=lora.dora,
        rank_pattern=tuple((t, rank) for t, rank in ranks.items() if rank != lora.rank),
    )


def described(
    adapted: Mapping[tuple[int, str], tuple[int, float]], like: LoraConfig, *, all_layers: bool
) -> LoraConfig:
    """Say in as few words as possible which rank and alpha each (layer, target) has.

    `like` gives all else, and the rank and alpha that need no pattern. `all_layers`: those of
    `adapted` are all that the model has.
    """
    layers = sorted({layer for layer, _ in adapted})
    targets = [t for t in ALL_TARGETS if any(t == target for _, target in adapted)]
    is_full = len(adapted) == len(layers) * len(targets)
    return replace(
        like,
        # Else each projection by its own name, which says its layer too.
        targets=tuple(targets if is_full else [adapter_prefix(*place) for place in adapted]),
        layers=layer_words(layers) if is_full and not all_layers else ALL_LAYERS,
        rank_pattern=_pattern_of({place: r for place, (r, _) in adapted.items()}, like.rank),
        alpha_pattern=_pattern_of({place: a for place, (_, a) in adapted.items()}, like.alpha),
    )


def _pattern_of(values: Mapping[tuple[int, str], _T], default: _T) -> Pattern[_T]:
    pattern: list[tuple[str, _T]] = []
    for target in ALL_TARGETS:
        here = {place: value for place, value in values.items() if place[1] == target}
        kinds = set(here.values())
        if len(kinds) == 1 and kinds != {default}:
            pattern.append((target, kinds.pop()))
        elif len(kinds) > 1:
            pattern += [(adapter_prefix(*p), v) for p, v in here.items() if v != default]
    return tuple(pattern)


def trains_ends(lora: LoraConfig, num_layers: int) -> bool:
    """Tell whether embedding, final norm and head are trained: where all layers' weights are."""
    return lora.full and len(chosen_layers(lora.layers, num_layers)) == num_layers


def chosen_layers(words: Sequence[str], num_layers: int) -> list[int]:
    """Read `all` (or -1), `last:8`, `0-3` and `7` as layer numbers, in order."""
    chosen: set[int] = set()
    for word in words:
        chosen.update(_layers_of(word, num_layers))
    return sorted(chosen)


def layer_words(layers: Iterable[int]) -> tuple[str, ...]:
    """Give the words that `chosen_layers` reads as these layers."""
    words: list[tuple[int, int]] = []
    for layer in sorted(layers):
        if words and words[-1][1] == layer - 1:
            words[-1] = words[-1][0], layer
        else:
            words.append((layer, layer))
    return tuple(f"{a}-{b}" if a != b else f"{a}" for a, b in words)


def check_words(lora: LoraConfig) -> None:
    """Refuse what no model would have: checks the words, knowing no number of layers."""
    if lora.rank > MAX_RANK:
        raise ConfigError(f"'rank' must be at most {MAX_RANK}, got {lora.rank}")
    if not lora.targets:
        raise ConfigError(f"'targets' is empty; choose among {', '.join(ALL_TARGETS)}")
    if len(set(lora.targets)) != len(lora.targets):
        raise ConfigError(f"'targets' names a projection twice: {', '.join(lora.targets)}")
    for target in lora.targets:
        if target != ALL_LINEAR:
            _parsed(target, "targets")
    if not lora.layers:
        raise ConfigError("'adapter_layers' is empty; use all, last:8, or numbers like 0-3,7")
    for word in lora.layers:
        _bounds(word)
    for name, pattern in (
        ("rank_pattern", lora.rank_pattern),
        ("alpha_pattern", lora.alpha_pattern),
    ):
        places = [_parsed(key, name) for key, _ in pattern]
        for key, place in zip((key for key, _ in pattern), places, strict=True):
            if places.count(place) > 1:
                raise ConfigError(f"'{name}' names {key} twice; leave one out")


def check_no_adapter(values: Mapping[str, object], usual: Mapping[str, object]) -> None:
    """Refuse by name what is said of an adapter where all weights are trained."""
    said = [
        f"--{name.replace('_', '-')}"
        for name in values
        if name not in usual or values[name] != usual[name]
    ]
    if said:
        raise ConfigError(
            f"'full' trains the weights themselves, without an adapter and not quantised: leave "
            f"out {', '.join(said)}, or --full"
        )


def read_pattern(
    items: Sequence[str], name: str, read: Callable[[str], _T], *, above: float, most: float
) -> Pattern[_T]:
    """Read `q_proj=16` pairs; raises ConfigError naming the option `name`."""
    pairs = []
    for item in items:
        key, _, text = item.partition("=")
        try:
            value = read(text)
        except ValueError:
            raise ConfigError(
                f"'{name}' must be like q_proj=16,down_proj=4, got '{item}'"
            ) from None
        if not above < value <= most:
            raise ConfigError(
                f"'{name}': {key.strip()} must be above {above:g} and at most {most:g}, got {text}"
            )
        pairs.append((key.strip(), value))
    return tuple(pairs)


def _chosen(lora: LoraConfig, num_layers: int) -> list[tuple[int, str]]:
    layers = chosen_layers(lora.layers, num_layers)
    found: set[tuple[int, str]] = set()
    for name in lora.targets:
        if name == ALL_LINEAR:
            found.update((layer, target) for layer in layers for target in ALL_TARGETS)
            continue
        layer, target = _parsed(name, "targets")
        if layer is not None and layer >= num_layers:
            raise ConfigError(f"'targets': {name} is beyond the model{_there_are(num_layers)}")
        if layer is not None and layer not in layers:
            raise ConfigError(
                f"'targets': {name} is in layer {layer}, which 'adapter_layers' leaves out "
                f"({','.join(lora.layers)}); add it there"
            )
        found.update((at, target) for at in (layers if layer is None else [layer]))
    return sorted(found, key=lambda place: (place[0], ALL_TARGETS.index(place[1])))


def _parsed(name: str, option: str) -> tuple[int | None, str]:
    """Read a projection's name: alone, with its block, or with its layer."""
    match = _TARGET.fullmatch(name)
    target = match[3] if match else name
    if match is None or target not in ALL_TARGETS:
        raise ConfigError(
            f"'{option}': no projection is called '{name}'{nearest(target, ALL_TARGETS)}; "
            f"known: {', '.join(ALL_TARGETS)}; also as self_attn.q_proj, "
            f"model.layers.3.self_attn.q_proj, or {ALL_LINEAR} for all"
        )
    if match[2] and module_path(target) != f"{match[2]}.{target}":
        raise ConfigError(f"'{option}': '{name}' should be {module_path(target)}")
    return (int(match[1]) if match[1] else None), target


def _pattern(
    pattern: Pattern[_T], name: str, chosen: Sequence[tuple[int, str]]
) -> Mapping[tuple[int | None, str], _T]:
    found = {_parsed(key, name): value for key, value in pattern}
    for key, _ in pattern:
        layer, target = _parsed(key, name)
        if not any(t == target and layer in (None, at) for at, t in chosen):
            raise ConfigError(f"'{name}': {key} gets no adapter; add it to 'targets'")
    return found


def _looked_up(
    found: Mapping[tuple[int | None, str], _T], layer: int, target: str, default: _T
) -> _T:
    return found.get((layer, target), found.get((None, target), default))


def _bounds(word: str) -> tuple[str, int, int]:
    """Give the kind of a word, and its numbers."""
    if word in ("all", "-1"):
        return "all", 0, 0
    if match := _LAST.fullmatch(word):
        if int(match[1]) < 1:
            raise ConfigError(f"'adapter_layers': {word} is no layer; use last:1 or more, or all")
        return "last", int(match[1]), 0
    if match := _RANGE.fullmatch(word):
        first, last = int(match[1]), int(match[2] or match[1])
        if first <= last:
            return "range", first, last
    raise ConfigError(
        f"'adapter_layers' must be all, last:8, or layers like 0-3,7 counted from 0, got '{word}'"
    )


def _layers_of(word: str, num_layers: int) -> range:
    kind, first, last = _bounds(word)
    if kind == "all":
        return range(num_layers)
    if kind == "last":
        if first > num_layers:
            raise ConfigError(
                f"'adapter_layers': {word} asks for {first} layers, the model has {num_layers}; "
                f"use last:{num_layers} or all"
            )
        return range(num_layers - first, num_layers)
    if last >= num_layers:
        raise ConfigError(f"'adapter_layers': {word} is beyond the model{_there_are(num_layers)}")
    return range(first, last + 1)


def _there_are(num_layers: int) -> str:
    return f", whose layers are 0 to {num_layers - 1}"
