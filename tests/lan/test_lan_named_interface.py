"""An agent on one named interface, whose address changes under it."""

from __future__ import annotations

import pytest

from exo_train.peer import Address
from exo_train.transport.reach import Reach, reach
from tests.agent.running_agents import wait_until
from tests.lan.lan_agents import LanAgents, host, wait_all_see
from tests.lan.namespaces import Lan

pytestmark = [pytest.mark.lan, pytest.mark.processes, pytest.mark.xdist_group("lan")]

FOLLOWED_WITHIN_S = 12.0


def test_it_listens_where_the_interface_is_now(lan: Lan, launch: LanAgents) -> None:
    """L19 with --interface: bound to addresses, not to all of the device."""
    for number in (1, 2):
        lan.add_host(number)
    one, two = launch(1, 2, options=["--interface", "lan0"])
    wait_all_see([one, two])
    port = two.port
    lan.take_address(2, host(2))
    lan.give_address(2, host(22))

    def reached() -> Reach:
        with lan.inside(1):
            return reach(Address(host(22), port), timeout_s=0.5)

    wait_until(lambda: reached() is Reach.CONNECTED, FOLLOWED_WITHIN_S, lambda: two.output)
    moved = f"{host(22)}:{port}"
    wait_until(
        lambda: moved in one.members()[two.id]["addresses"], FOLLOWED_WITHIN_S, lambda: two.output
    )
    assert one.members()[two.id]["state"] == "alive"
