"""Training over the LAN: mutual TLS and real links, and the numbers of one device."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.lan.lan_agents import NUM_STEPS, LanAgent, LanAgents, wait_all_see
from tests.lan.namespaces import Lan

pytestmark = [pytest.mark.lan, pytest.mark.processes, pytest.mark.xdist_group("lan")]

NUM_DEVICES = 3


def test_rings_of_all_sizes_equal_one_device(lan: Lan, launch: LanAgents, tmp_path: Path) -> None:
    """L15: what is fine with two is fine with three."""
    for number in range(1, NUM_DEVICES + 1):
        lan.add_host(number)
    agents = launch(*range(1, NUM_DEVICES + 1))
    wait_all_see(agents)
    one = agents[0]
    alone = _losses(one, tmp_path, ["host1"])
    assert len(alone) == NUM_STEPS
    for size in (2, NUM_DEVICES):
        names = [agent.name for agent in agents[:size]]
        assert _losses(one, tmp_path, names) == pytest.approx(alone, rel=1e-5)


def _losses(one: LanAgent, root: Path, names: list[str]) -> list[float]:
    """Train from `one` on just these devices; give the loss of each step."""
    run_dir = root / f"of {len(names)}"
    wanted = ("--min-devices", f"{len(names)}", "--devices", ",".join(names))
    done = one.train(root, *wanted, "--run-dir", str(run_dir))
    assert done.returncode == 0, done.stderr
    plan = json.loads((run_dir / "plan.json").read_text("utf-8"))
    assert {rank["name"] for rank in plan["ranks"]} == set(names)
    lines = (run_dir / "metrics.jsonl").read_text("utf-8").splitlines()
    return [float(json.loads(line)["loss"]) for line in lines]
