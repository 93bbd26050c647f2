"""What is read of members and their links before a plan: values, waits and what is left out."""

from __future__ import annotations

import json
from typing import Any

import pytest

from exo_train.agent.live_household import (
    SAME_COMPUTER,
    device_profile,
    links_between,
    links_of,
    request_for,
)
from exo_train.agent.planning import Candidate
from exo_train.config import TrainConfig
from exo_train.errors import InterruptedRunError
from exo_train.peer import NodeId
from exo_train.plan.block_times import BlockTimes, EndTimes
from exo_train.plan.memory import LayerCost
from exo_train.plan.profiles import LinkProfile, StageCosts

A, B, C = (NodeId(letter * 32) for letter in "abc")
NAMES = {A: "den-pc", B: "studio", C: "laptop"}
ENDS = EndTimes(embedding_s=0.1, head_s=0.2, head_layer_s=0.025, head_workspace_bytes=4)
TIMES = BlockTimes(
    layer_forward_s=0.01,
    layer_backward_s=0.02,
    overhead_s=0.003,
    layer_update_s=0.0004,
    slowdown=1.05,
    num_repetitions=20,
    ends=ENDS,
)


def candidate(node_id: NodeId, device: str = "cpu", **changed: Any) -> Candidate:
    values: dict[str, Any] = {
        "node_id": node_id,
        "name": NAMES[node_id],
        "backend": "torch",
        "device": device,
        "usable_memory_bytes": 6 * 10**9,
        "dtypes": ("fp32",),
        "addresses": (),
    }
    return Candidate(**{**values, **changed})


def link(
    a: NodeId,
    b: NodeId,
    *,
    kind: str = "Ethernet",
    hosts: tuple[str, str] = ("10.0.0.1", "10.0.0.2"),
    speeds: tuple[float, float] = (100e6, 90e6),
) -> dict[str, Any]:
    """Give a link as `status --json` has it, measured by `a`."""
    return {
        "ends": [
            {"id": a, "name": NAMES[a], "host": hosts[0]},
            {"id": b, "name": NAMES[b], "host": hosts[1]},
        ],
        "kind": kind,
        "interface": "en0",
        "rtt_s": 0.004,
        "jitter_s": 0.001,
        "bytes_per_s": list(speeds),
        "trouble": "" if min(speeds) else "nothing passes",
        "line": "",
    }


def test_each_direction_has_its_own_speed_and_a_late_messages_latency() -> None:
    found = links_between([link(A, B)], [B, A])
    assert found == {
        (1, 0): LinkProfile(latency_s=pytest.approx(0.003), bytes_per_s=100e6),
        (0, 1): LinkProfile(latency_s=pytest.approx(0.003), bytes_per_s=90e6),
    }


def test_gpus_of_one_computer_share_its_links_and_have_the_loopback_between_them() -> None:
    found = links_between([link(A, B)], [A, A, B])
    assert found[0, 1] == found[1, 0] == SAME_COMPUTER
    assert found[0, 2] == found[1, 2]
    assert found[0, 2].bytes_per_s == 100e6
    assert found[2, 0] == found[2, 1]
    assert found[2, 1].bytes_per_s == 90e6
    assert len(found) == 6


def test_what_cannot_carry_both_directions_is_no_link() -> None:
    assert links_between([link(A, B, speeds=(100e6, 0.0))], [A, B]) == {}
    assert links_between([link(A, B)], [A, C]) == {}
    assert links_between([], [A]) == {}


def test_wifi_at_either_end_is_the_one_medium() -> None:
    def media(one: dict[str, Any], *wifi_hosts: tuple[NodeId, str]) -> set[str]:
        return {profile.medium for profile in links_between([one], [A, B], wifi_hosts).values()}

    assert media(link(A, B, kind="Wi-Fi")) == {"Wi-Fi"}
    # The laptop is on Wi-Fi; the cabled den-pc measures their link.
    by_cable = link(A, B, hosts=("10.0.0.1", "10.0.0.2"))
    assert media(by_cable, (B, "10.0.0.2")) == {"Wi-Fi"}
    local = link(A, B, hosts=("fe80::1%en0", "fe80::2%en0"))
    assert media(local, (B, "fe80::2")) == {"Wi-Fi"}
    # It has a cable too, and it is by cable that this pair talks; or another has that address.
    assert media(by_cable, (B, "10.1.0.2")) == {""}
    assert media(by_cable, (C, "10.0.0.2")) == {""}


class Household:
    """A status that changes while somebody waits for it; its clock stands still otherwise."""

    def __init__(self, *after_s: tuple[float, dict[str, Any]]) -> None:
        self._after_s = after_s
        self.now_s = 100.0
        self.num_asked = 0
        self.notes: list[str] = []

    def status(self) -> dict[str, Any]:
        self.num_asked += 1
        links = [one for after_s, one in self._after_s if self.now_s - 100.0 >= after_s]
        return {"links": links, "members": [{"id": B, "wifi_hosts": ["10.0.0.2"]}]}

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds

    def links_of(self, *ids: NodeId, **more: Any) -> dict[tuple[int, int], LinkProfile]:
        return links_of(
            self.status,
            [candidate(node_id) for node_id in ids],
            on_note=self.notes.append,
            clock=lambda: self.now_s,
            sleep=self.sleep,
            **more,
        )


def test_measured_links_are_taken_at_once() -> None:
    household = Household((0.0, link(A, B)))
    assert set(household.links_of(A, B)) == {(0, 1), (1, 0)}
    assert (household.num_asked, household.now_s, household.notes) == (1, 100.0, [])
    assert household.links_of(C) == {}
    assert household.num_asked == 1


def test_what_a_member_says_of_its_own_end_counts() -> None:
    """studio says that it is on Wi-Fi; laptop and den-pc have a cable between them."""
    household = Household((0.0, link(A, B)), (0.0, link(A, C, hosts=("10.0.0.1", "10.0.0.3"))))
    found = household.links_of(A, B, C, timeout_s=1.0)
    assert found[0, 1].medium == found[1, 0].medium == "Wi-Fi"
    assert found[0, 2].medium == ""


def test_a_link_that_is_not_measured_yet_is_waited_for() -> None:
    household = Household((0.0, link(A, B)), (3.0, link(B, C)), (3.0, link(A, C)))
    assert len(household.links_of(A, B, C)) == 6
    assert 3.0 <= household.now_s - 100.0 < 3.5
    assert household.notes == ["waiting for the links' speed: den-pc – laptop, laptop – studio"]


def test_a_pair_that_stays_without_a_speed_is_left_out_and_named() -> None:
    household = Household((0.0, link(A, B)), (60.0, link(B, C)), (0.0, link(A, C)))
    found = household.links_of(A, B, C, timeout_s=10.0)
    assert set(found) == {(0, 1), (1, 0), (0, 2), (2, 0)}
    assert 10.0 <= household.now_s - 100.0 < 10.5
    assert "not known for laptop – studio: no plan puts them side by side" in household.notes[-1]


def test_nobody_waits_for_a_link_on_which_nothing_passes() -> None:
    household = Household((0.0, link(A, B, speeds=(0.0, 90e6))))
    assert household.links_of(A, B) == {}
    assert household.now_s == 100.0
    assert "den-pc – studio" in household.notes[0]


def test_the_wait_for_links_can_be_stopped() -> None:
    household = Household()
    with pytest.raises(InterruptedRunError, match="nothing was begun"):
        household.links_of(A, B, wants_stop=lambda: household.now_s > 101.0)
    assert household.now_s < 102.0


def test_the_planner_gets_every_time_that_was_measured() -> None:
    cost = LayerCost(static_bytes=1, per_microbatch_bytes=2)
    costs = StageCosts(embedding=cost, layer=cost, head=cost, per_stage=cost)
    profile = device_profile(candidate(B), TIMES, costs)
    assert (profile.name, profile.usable_bytes, profile.costs) == ("studio", 6 * 10**9, costs)
    assert profile.layer_s == pytest.approx(0.03)
    assert (profile.embedding_s, profile.head_s, profile.head_layer_s) == (0.1, 0.2, 0.025)
    assert (profile.overhead_s, profile.layer_update_s) == (0.003, 0.0004)


def test_a_run_asks_for_its_own_layer() -> None:
    config = TrainConfig(rank=4, checkpoint_activations=True)
    asked = request_for(
        candidate(A, "cuda:1"),
        json.dumps({"hidden_size": 64}),
        config,
        lora=config.lora,
        compute_dtype="bf16",
        microbatch_size=3,
        sequence=96,
    )
    assert (asked.backend, asked.device, asked.compute_dtype) == ("torch", "cuda:1", "bf16")
    assert (asked.microbatch_size, asked.sequence) == (3, 96)
    assert asked.lora == config.lora
    assert asked.checkpoint_activations
    assert asked.with_ends
    assert 2.0 <= asked.budget_s <= 5.0
