"""A run over the LAN while a host loses its power or its network, sleeps, or has poor Wi-Fi.

The driver is a process on host 1, whose events say when the harm is done. Afterwards the losses
are those of the undisturbed run, and all hosts that live tell the same story.
"""

from __future__ import annotations

import json
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.agent.running_agents import wait_until
from tests.lan.hub import ANY, Air, Rule
from tests.lan.lan_agents import NUM_LAYERS, LanAgent, LanAgents, wait_all_see
from tests.lan.namespaces import Lan
from tests.tiny_models import make_tiny_model

pytestmark = [pytest.mark.lan, pytest.mark.processes, pytest.mark.xdist_group("lan")]

STEPS, FIRST_HARM, SECOND_HARM = 30, 3, 15
GOING_ON = "going on with who is left"
SHORT_OUTAGE_S = 5.0  # less than what makes a rank silent
REL = 1e-4
END_WITHIN_S = 120.0
QUIET_WITHIN_S = 40.0
MEET_AGAIN_WITHIN_S = 40.0


class LanRun:
    """`train` typed on host 1, watched line by line."""

    def __init__(self, agents: list[LanAgent], root: Path) -> None:
        self.agents = agents
        self.root = root
        self.notes: list[str] = []
        self.errors = ""
        self.model, self.data = root / "model", root / "rows.jsonl"
        make_tiny_model(self.model, num_layers=NUM_LAYERS)
        rows = [json.dumps({"text": f"the river {'on ' * n}and on"}) for n in range(8)]
        self.data.write_text("\n".join(rows), "utf-8")

    def losses(
        self, name: str, harms: Mapping[int, Callable[[], None]] | None = None
    ) -> list[float]:
        """Train to the end, do harm after the steps that say so, and give each step's loss."""
        left = dict(harms or {})  # a step that is done again does none again
        run_dir = self.root / name
        command = self.agents[0].command(
            "train", str(self.model), "--data", str(self.data), "--steps", f"{STEPS}",
            "--batch-size", "4", "--dtype", "fp32", "--profile-s", "0", "--shadow", "1",
            "--min-devices", f"{len(self.agents)}",
            "--run-dir", str(run_dir), "--json",
        )  # fmt: skip
        with (
            (self.root / f"{name}.err").open("w+") as errors,
            subprocess.Popen(
                command,
                env=self.agents[0].environment(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            ) as process,
        ):
            assert process.stdout is not None
            try:
                for line in process.stdout:
                    self._take(json.loads(line), left)
                code = process.wait(END_WITHIN_S)
            finally:
                process.kill()
            errors.seek(0)
            assert code == 0, f"{errors.read()}\n{self.notes}"
        rows = [json.loads(row) for row in (run_dir / "metrics.jsonl").read_text().splitlines()]
        assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
        return [float(row["loss"]) for row in rows]

    def _take(self, event: dict[str, Any], harms: dict[int, Callable[[], None]]) -> None:
        if event["event"] == "note":
            self.notes.append(event["text"])
        elif event["event"] == "step" and (harm := harms.pop(event["step"], None)):
            harm()

    def said(self, *words: str) -> bool:
        return any(all(word in note for word in words) for note in self.notes)

    def check_quiet(self, *live: LanAgent) -> None:
        """No worker is left, and all that live say the same."""

        def is_quiet() -> bool:
            stories = [agent.status() for agent in live]
            return (
                len({story["view_hash"] for story in stories}) == 1
                and all(story["run"] is None for story in stories)
                and not any(agent.running().children() for agent in live)
            )

        def stories() -> str:
            return "\n".join(
                f"{a.name}: {a.status()['run']}, {a.running().children()}, {a.states()}\n{a.output}"
                for a in live
            )

        wait_until(is_quiet, QUIET_WITHIN_S, stories)


@pytest.fixture
def run(lan: Lan, launch: LanAgents, tmp_path: Path) -> LanRun:
    for number in (1, 2, 3):
        lan.add_host(number)
    agents = launch(1, 2, 3)
    wait_all_see(agents)
    return LanRun(agents, tmp_path)


def test_run_outlives_outages_a_sleep_and_a_power_cut(lan: Lan, run: LanRun) -> None:
    """Host 3 is off the net for some seconds, sleeps, and is cut off; host 2 loses its power."""
    one, two, three = run.agents
    undisturbed = run.losses("undisturbed")
    lan_back = threading.Timer(SHORT_OUTAGE_S, lan.mend, (3,))

    def blink() -> None:
        lan.cut(3)
        lan_back.start()

    def sleep() -> None:
        lan_back.join()
        assert not run.said(GOING_ON), run.notes
        lan.cut(3)
        _signal_all(three, signal.SIGSTOP)

    losses = run.losses("sleep", {FIRST_HARM: blink, SECOND_HARM: sleep})
    assert losses[:SECOND_HARM] == undisturbed[:SECOND_HARM]
    assert losses == pytest.approx(undisturbed, rel=REL)
    assert run.said("host3", GOING_ON), run.notes
    _signal_all(three, signal.SIGCONT)
    lan.mend(3)
    wait_all_see(run.agents, MEET_AGAIN_WITHIN_S)
    run.check_quiet(one, two, three)

    run.notes.clear()

    def lose_power() -> None:
        assert run.said("host3", GOING_ON), run.notes
        lan.cut(2)
        _signal_all(two, signal.SIGKILL)

    losses = run.losses("power", {FIRST_HARM: lambda: lan.cut(3), SECOND_HARM: lose_power})
    assert losses == pytest.approx(undisturbed, rel=REL)
    assert run.said("host2", GOING_ON), run.notes
    lan.mend(3)
    wait_all_see([one, three], MEET_AGAIN_WITHIN_S)
    run.check_quiet(one, three)


def test_wifi_that_stalls_loses_no_device(lan: Lan, launch: LanAgents, tmp_path: Path) -> None:
    for number in (1, 2, 3):
        lan.add_host(number, on_hub=True)
    lan.hub.set_rules(ANY, ANY, Rule(delay_s=0.002, loss=0.02))
    lan.hub.share_air(Air(bits_per_s=60e6, stall_s=(0.1, 0.5)), (1, 2, 3))
    agents = launch(1, 2, 3)
    wait_all_see(agents, MEET_AGAIN_WITHIN_S)
    run = LanRun(agents, tmp_path)
    assert len(run.losses("run")) == STEPS
    assert not run.said(GOING_ON), run.notes
    run.check_quiet(*agents)


def _signal_all(agent: LanAgent, number: signal.Signals) -> None:
    """Signal the agent and its workers: what happens to the whole machine."""
    process = agent.running()
    for one in (*process.children(recursive=True), process):
        one.send_signal(number)
