"""What a run shows, on a terminal, in a pipe and as JSON."""

from __future__ import annotations

import io
import json
import re

import pytest
from rich.console import Console

from exo_train.lora_config import LoraConfig
from exo_train.optimizer_config import OptimizerConfig
from exo_train.peer import NodeId
from exo_train.plan.plan import Plan, RankPlan
from exo_train.plan.stages import StageSpec
from exo_train.train.metrics import RankMetrics, StepMetrics
from exo_train.ui.run_screen import JsonScreen, LiveScreen, PlainScreen, duration

ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def make_plan() -> Plan:
    names = ("kitchen-mac", "den-pc")
    ranks = tuple(
        RankPlan(
            rank=rank,
            node_id=NodeId(f"{rank:032x}"),
            name=name,
            backend="torch",
            device="cpu",
            compute_dtype="fp32",
            stage=StageSpec(start=rank * 4, end=rank * 4 + 4, embedding=rank == 0, head=rank == 1),
        )
        for rank, name in enumerate(names)
    )
    return Plan(
        cluster="home",
        run_id="run",
        generation=1,
        model_hash="0" * 64,
        num_layers=8,
        hidden_size=64,
        ranks=ranks,
        pipeline_schedule="1f1b",
        microbatch_size=1,
        max_seq_length=64,
        wire_dtype="fp32",
        lora=LoraConfig(),
        optimizer=OptimizerConfig(),
        seed=0,
    )


def make_step() -> StepMetrics:
    ranks = tuple(
        RankMetrics(
            rank=rank,
            name=name,
            busy_s=busy,
            bubble_fraction=1 - busy,
            sent_bytes=10,
            peak_memory_bytes=20,
        )
        for rank, (name, busy) in enumerate((("kitchen-mac", 0.75), ("den-pc", 0.5)))
    )
    return StepMetrics(
        step=7,
        epoch=0.5,
        loss=1.2345,
        lr=2e-4,
        grad_norm=0.5,
        tokens=100,
        supervised_tokens=50,
        positions=128,
        tokens_per_s=100.0,
        step_s=1.0,
        period_s=0.2,
        generation=1,
        ranks=ranks,
    )


@pytest.mark.parametrize("kind", [LiveScreen, PlainScreen])
def test_a_line_for_the_step_and_one_for_each_device(
    kind: type[LiveScreen] | type[PlainScreen],
) -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=kind is LiveScreen, width=160)
    screen = kind(console)
    screen.plan(make_plan())
    screen.step(make_step(), 75.0)
    screen.evaluation(7, 1.5)
    screen.close()
    lines = ANSI.sub("", out.getvalue()).splitlines()
    step = [line for line in lines if "step 7" in line and "1.2345" in line]
    assert step
    for word in ("2.00e-04", "0.500", "100 tokens/s", "ETA 1:15"):
        assert word in step[-1]
    for name, layers in (("kitchen-mac", "embedding, layers 0–3"), ("den-pc", "layers 4–7, head")):
        own = [line for line in lines if name in line and layers in line]
        assert own, f"{name} has no line with its layers"
        assert not any(other in own[-1] for other in {"kitchen-mac", "den-pc"} - {name})
    text = "\n".join(lines)
    assert "75%" in text
    assert "50%" in text


def test_json_is_one_object_a_line_with_a_schema() -> None:
    lines: list[str] = []
    screen = JsonScreen(lines.append)
    screen.note("said")
    screen.plan(make_plan())
    screen.step(make_step(), None)
    screen.evaluation(7, 1.5)
    events = [json.loads(line) for line in lines]
    assert [event["event"] for event in events] == ["note", "plan", "step", "evaluation"]
    assert all(event["schema"] == 1 for event in events)
    assert events[2]["ranks"][0]["name"] == "kitchen-mac"


def test_durations_read_well() -> None:
    assert [duration(s) for s in (None, 5, 65, 3725)] == ["?", "0:05", "1:05", "1:02:05"]


def test_json_has_no_number_that_json_cannot_hold() -> None:
    lines: list[str] = []
    JsonScreen(lines.append).evaluation(0, float("nan"))
    assert json.loads(lines[0])["loss"] is None


@pytest.mark.parametrize("kind", [LiveScreen, PlainScreen])
def test_a_long_note_stays_one_line(kind: type[LiveScreen] | type[PlainScreen]) -> None:
    """It may end with a command, which is copied or searched for in a log."""
    note = "step 240: " + "steps take 1.4 times as long; " * 5 + "exo-train train --resume 'my run'"
    out = io.StringIO()
    screen = kind(Console(file=out, force_terminal=kind is LiveScreen, width=40))
    screen.note(note)
    screen.close()
    assert note in ANSI.sub("", out.getvalue()).splitlines()
