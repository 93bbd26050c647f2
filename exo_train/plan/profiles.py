"""What the measured planner works from: how fast devices and links are. Pure value types.

Times are of one microbatch of the run's shape, in seconds; a layer's time is forward plus
backward (recompute included where activations are checkpointed).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from exo_train.plan.memory import LayerCost


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCosts:
    """Memory of a stage's parts; `per_stage` is added to every stage."""

    embedding: LayerCost
    layer: LayerCost
    head: LayerCost
    per_stage: LayerCost


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceProfile:
    """One device. `usable_bytes` is after its reserve; 0 keeps it out.

    `head_layer_s` is a decoder layer's time on the stage with the head (None: as elsewhere),
    `overhead_s` what any stage adds to a microbatch, `layer_update_s` a layer's share of what is
    done once a step. `costs` are there where the device stores or computes otherwise than the
    workload says: another dtype, another backend.
    """

    name: str
    usable_bytes: int
    layer_s: float
    embedding_s: float
    head_s: float
    head_layer_s: float | None = None
    overhead_s: float = 0.0
    layer_update_s: float = 0.0
    costs: StageCosts | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkProfile:
    """One direction between two devices; `medium` names what it shares with others (Wi-Fi air).

    A message of b bytes takes `latency_s + b / bytes_per_s`; all links of one medium take turns.
    """

    latency_s: float
    bytes_per_s: float
    medium: str = ""


Links = dict[tuple[int, int], LinkProfile]


def links_among(links: Mapping[tuple[int, int], LinkProfile], devices: Sequence[int]) -> Links:
    """Give the links between `devices`, renumbered in their order."""
    place = {index: position for position, index in enumerate(devices)}
    return {(place[a], place[b]): link for (a, b), link in links.items() if {a, b} <= place.keys()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Household:
    """Devices, and a link for every ordered pair of their indices."""

    devices: tuple[DeviceProfile, ...]
    links: Links = field(default_factory=dict)

    def part(self, devices: Sequence[int]) -> Household:
        """Give the household of `devices` only, renumbered in their order."""
        return Household(
            devices=tuple(self.devices[index] for index in devices),
            links=links_among(self.links, devices),
        )

    def with_times(self, factor: float) -> Household:
        """Multiply what grows with a microbatch: not the overhead, nor the update of a step."""
        return Household(
            devices=tuple(
                dataclasses.replace(
                    device,
                    layer_s=factor * device.layer_s,
                    embedding_s=factor * device.embedding_s,
                    head_s=factor * device.head_s,
                    head_layer_s=(
                        None if device.head_layer_s is None else factor * device.head_layer_s
                    ),
                )
                for device in self.devices
            ),
            links=self.links,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What one step asks of whatever devices do it.

    `costs` are embedding, decoder layers (all alike) and head; `per_stage` is added to every
    stage; a device with costs of its own has those instead. `boundary_bytes` is one message, one
    way; so often as `num_forwards` says a microbatch sends one up.
    """

    costs: tuple[LayerCost, ...]
    boundary_bytes: int
    num_microbatches: int
    num_forwards: int = 1
    schedule: Literal["1f1b", "gpipe"] = "1f1b"
    per_stage: LayerCost = LayerCost(static_bytes=0, per_microbatch_bytes=0)  # noqa: RUF009

    def __post_init__(self) -> None:
        if len(self.costs) < 3 or len(set(self.costs[1:-1])) > 1:
            raise ValueError("costs must be embedding, one or more equal decoder layers and head")
        if self.num_microbatches < 1 or self.boundary_bytes < 0:
            raise ValueError("a step needs at least 1 microbatch and messages of 0 bytes or more")

    @property
    def num_layers(self) -> int:
        return len(self.costs) - 2

    @property
    def stage_costs(self) -> StageCosts:
        embedding, layer, *_, head = self.costs
        return StageCosts(embedding=embedding, layer=layer, head=head, per_stage=self.per_stage)

    def costs_of(self, device: DeviceProfile) -> StageCosts:
        """Give what a stage's parts take on `device`."""
        return device.costs or self.stage_costs
