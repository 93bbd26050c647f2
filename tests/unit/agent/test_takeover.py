"""When a device goes on with a run whose coordinator is gone, how often, and when it does not."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from exo_train.agent.succession import Succession
from exo_train.agent.takeover import GRACE_S, WINDOW_S, Part, Takeover
from exo_train.cluster.home import Home
from exo_train.models.manifest import build_manifest
from exo_train.models.open import open_model
from exo_train.peer import NodeId
from exo_train.wire.pb import control_pb2 as pb
from tests.agent.running_agents import wait_until
from tests.tiny_models import make_tiny_model

OWN, OTHER = NodeId("a" * 32), NodeId("b" * 32)
RUN_ID = "r1"


class World:
    """A device that keeps a copy of a run; its driver is a program that ends at once."""

    def __init__(self, root: Path, model: Path, *, wanted: bool = True, then: str = "") -> None:
        self.home = Home(root / "home")
        self.folder = self.home.replicas / RUN_ID
        self.folder.mkdir(parents=True)
        (self.folder / "config.yaml").write_text("devices: [attic, hall]\n")
        spec, source = open_model(model)
        Succession(
            run_id=RUN_ID,
            wanted=wanted,
            models=("org/model", str(model)),
            model_hash=build_manifest(source, spec, cache_dir=self.home.cache).model_hash,
            coordinator=OTHER,
            coordinator_name="attic",
        ).write(self.folder)
        self.started = root / "started"
        script = (
            "import sys; from pathlib import Path; "
            f"Path({str(self.started)!r}).open('a').write(' '.join(sys.argv[1:]) + chr(10)); {then}"
        )
        self.now_s = 0.0
        self.own: bool | None = True  # orphaned, led, or no part in it
        self.other: bool | None = None
        self.ended_generation = 0  # as the other one tells it
        self.takeover = Takeover(
            self.home,
            self.parts,
            say=lambda sentence: None,
            clock_s=lambda: self.now_s,
            command=(sys.executable, "-c", script),
        )

    def parts(self) -> Iterator[Part]:
        for node_id, name, orphaned in ((OWN, "hall", self.own), (OTHER, "desk", self.other)):
            run = None
            if orphaned is not None:
                run = pb.RunFacts(run_id=RUN_ID, generation=3, orphaned=orphaned)
            ended = ()
            if node_id == OTHER and self.ended_generation:
                ended = (pb.EndedRun(run_id=RUN_ID, generation=self.ended_generation),)
            yield Part(node_id=node_id, name=name, run=run, ended=ended)

    def wait(self, seconds: float) -> None:
        self.takeover.look()
        self.now_s += seconds
        self.takeover.look()

    @property
    def commands(self) -> list[str]:
        """What was started, when all of it has ended."""
        for watched in self.takeover._watched.values():
            if watched.driver is not None:
                watched.driver.wait(60)
        return self.started.read_text().splitlines() if self.started.exists() else []


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny", num_layers=1)


@pytest.fixture
def world(tmp_path: Path, model: Path) -> Iterator[World]:
    world = World(tmp_path, model)
    yield world
    world.takeover.close()


def test_a_run_that_stays_alone_is_gone_on_with_once(world: World, model: Path) -> None:
    world.wait(GRACE_S - 1)
    assert not world.commands
    world.wait(2)
    world.wait(60)
    wanted = f"train {model} --resume {world.folder} --min-devices 1 --devices hall"
    assert world.commands == [wanted], "attic, which led it, is not here"
    assert "is gone" in world.takeover.sentences()[0] or "done" in world.takeover.sentences()[0]


def test_a_coordinator_that_comes_back_keeps_its_run(world: World) -> None:
    world.wait(GRACE_S - 1)
    world.own = False
    world.wait(1)
    world.own = True
    world.wait(GRACE_S - 1)
    assert not world.commands


@pytest.mark.parametrize(("ended_generation", "starts"), [(3, 0), (4, 0), (2, 1)])
def test_a_run_that_was_ended_is_not_gone_on_with(
    world: World, ended_generation: int, starts: int
) -> None:
    """This device slept over the run's end; an earlier end, before a resume, does not count."""
    world.other, world.ended_generation = None, ended_generation
    world.wait(GRACE_S + 1)
    assert len(world.commands) == starts


def test_a_run_that_is_led_elsewhere_is_left_alone(world: World) -> None:
    """One lost connection of this device is no death."""
    world.wait(1)
    world.other = False
    world.wait(60)
    assert not world.commands


def test_a_device_without_a_part_goes_on_when_others_are_alone(world: World) -> None:
    world.own, world.other = None, True
    world.wait(60)
    assert len(world.commands) == 1


def test_a_run_that_is_over_is_left_alone(world: World) -> None:
    world.own = None
    world.wait(60)
    assert not world.commands


@pytest.mark.parametrize("status", ["done", "interrupted"])
def test_a_run_that_ended_well_is_left_alone(world: World, status: str) -> None:
    (world.folder / "summary.json").write_text(json.dumps({"status": status}))
    world.wait(60)
    assert not world.commands


def test_who_does_not_want_it_is_left_alone(tmp_path: Path, model: Path) -> None:
    world = World(tmp_path, model, wanted=False)
    world.wait(60)
    assert not world.commands


def test_without_the_model_it_says_what_is_missing(world: World, model: Path) -> None:
    text = (world.folder / "takeover.json").read_text()
    (world.folder / "takeover.json").write_text(text.replace(str(model), "/nowhere"))
    world.wait(60)
    assert not world.commands
    (said,) = world.takeover.sentences()
    assert "the model is only on attic" in said
    assert f"exo-train train --resume {world.folder} MODEL" in said


def test_one_death_after_the_other_is_bounded(world: World) -> None:
    for death in range(5):
        world.own = False
        world.wait(1)
        world.own = True
        world.wait(GRACE_S)
        assert len(world.commands) == min(death + 1, 3)
    assert len(world.commands) == 3
    assert "3 times within 10 minutes" in world.takeover.sentences()[0]
    world.now_s += WINDOW_S
    world.own = False
    world.wait(1)
    world.own = True
    world.wait(GRACE_S)
    assert len(world.commands) == 4


def test_a_driver_saves_and_ends_with_the_agent_that_started_it(
    tmp_path: Path, model: Path
) -> None:
    """Its input is a pipe that the agent holds: the system closes it, however the agent ends."""
    saved = tmp_path / "saved"
    wait_and_save = (
        "from exo_train.agent import driver; from exo_train.train.watcher import Watcher; "
        "import os, time; assert os.environ[driver.TIED_VARIABLE]; "
        "watcher = driver._tied_to_input(Watcher()); "
        f"Path({str(tmp_path / 'up')!r}).touch(); "
        "any(time.sleep(0.05) for _ in iter(watcher.wants_stop, True)); "
        f"Path({str(saved)!r}).touch()"
    )
    world = World(tmp_path, model, then=wait_and_save)
    world.wait(60)
    watched = world.takeover._watched[RUN_ID]
    driver = watched.driver
    assert driver is not None
    assert driver.stdin is not None
    try:
        wait_until((tmp_path / "up").exists, 60, lambda: "the driver did not come up")
        assert driver.poll() is None, "it goes on while the agent is there"
        assert not saved.exists()
        driver.stdin.close()
        assert driver.wait(60) == 0
    finally:
        driver.kill()
        driver.wait()
        world.takeover.close()
    assert saved.exists()


def test_what_a_member_sent_ends_neither_the_thread_nor_the_takeover(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    for config in ("devices: 5", "devices: {a: 1}", "devices: [5, null]", "[" * 10_000):
        (world.folder / "config.yaml").write_text(config)
        world.own = False
        world.wait(1)
        world.own = True
        world.now_s += WINDOW_S
        world.wait(GRACE_S)
        assert world.commands[-1].endswith("--min-devices 1")
    assert len(world.commands) == 4


@pytest.mark.parametrize("sent", ["[" * 100_000, "[]", '{"run_id": 1}', "\xff"])
def test_a_strange_succession_is_none(world: World, sent: str) -> None:
    (world.folder / "takeover.json").write_bytes(sent.encode("latin-1"))
    world.wait(60)
    assert not world.commands


def test_the_thread_outlives_what_it_did_not_expect(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("exo_train.agent.takeover.LOOK_S", 0.01)
    looks = []

    def look() -> None:
        looks.append(1)
        if len(looks) == 1:
            raise TypeError("devices")

    monkeypatch.setattr(world.takeover, "look", look)
    world.takeover.start()
    wait_until(lambda: len(looks) > 2, 60, lambda: caplog.text)
    world.takeover.close()
    assert "looking at runs without a coordinator failed" in caplog.text
