"""The commit protocol under a hostile network: whatever happens, there are never two histories."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from exo_train.models.manifest import ModelManifest
from tests.property.commit_world import Driver
from tests.property.hostile_ranks import Fate, Harm, no_real_time
from tests.ring.rings import manifest_of
from tests.tiny_models import make_tiny_model

DEVICES = ("attic", "desk", "hall", "shed")
NUM_LAYERS = 5
SEEDS = 16
ORDERS = ("prepare", "rewind", "load", "step_input", "commit", "mark", "state_request")
ANSWERS = ("prepared", "rewound", "loaded", "step_report", "committed", "state_stored", "shadowed")
POINTS = (
    "loading", "take", "compute", "before apply", "half apply", "after apply", "keep",
    "before copy", "after copy",
)  # fmt: skip
# The pieces of a set of arrays are counted on to come in order: a stream has no other.
MESSAGES = st.tuples(
    st.sampled_from((*ORDERS, *ANSWERS)),
    st.sampled_from(("double", "late", "stall", "cut", "silence", "kill", "off")),
) | st.tuples(st.just("state_array"), st.sampled_from(("double", "stall", "cut", "kill")))
WHAT = MESSAGES | st.tuples(st.sampled_from(POINTS), st.sampled_from(("kill", "off", "error")))
WHAT |= st.tuples(st.just("copy"), st.sampled_from(("late", "lost")))
WHAT |= st.tuples(st.sampled_from(("commit", "committed")), st.sampled_from(("double", "late")))
Harmful = tuple[tuple[str, str], int, int, int]
# To a device, after so many looks of the driver where it is late, to the message after so many.
HARM = st.tuples(WHAT, st.integers(0, 3), st.sampled_from((1, 5, 18, 40)), st.integers(0, 2))


@pytest.fixture(autouse=True, scope="module")
def time_of_its_own() -> Iterator[None]:
    with no_real_time():
        yield


@pytest.fixture(autouse=True, scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> ModelManifest:
    model = make_tiny_model(tmp_path_factory.mktemp("commit") / "m", num_layers=NUM_LAYERS)
    CommitProtocol.manifest = manifest_of(model)
    return CommitProtocol.manifest


class CommitProtocol(RuleBasedStateMachine):
    """A run of many steps in which ranks, messages and copies come to harm at any point."""

    manifest: ModelManifest

    @initialize(
        num_devices=st.integers(2, 4),
        shadow=st.sampled_from(("1", "1", "3", "off")),
        seed=st.integers(0, 2**16),
    )
    def begin(self, num_devices: int, shadow: str, seed: int) -> None:
        self.harm = Harm()
        self.driver = Driver(self.manifest, self.harm, DEVICES[:num_devices], shadow, seed)

    @rule(harms=st.lists(HARM, max_size=3), is_finite=st.sampled_from((True, True, False)))
    def train(self, harms: list[Harmful], is_finite: bool) -> None:
        for (kind, what), place, looks, after in harms:
            device = self.driver.devices[place % len(self.driver.devices)]
            self.harm.fates.append(Fate(kind, device, what, looks, after))
        self.driver.train(is_finite=is_finite)

    @rule(count=st.integers(2, 4))
    def train_on(self, count: int) -> None:
        for _ in range(count):
            self.driver.train(is_finite=True)

    @rule()
    def save(self) -> None:
        self.driver.save()

    @rule()
    def take_devices_in(self) -> None:
        self.harm.off.clear()
        self.driver.form_anew("a device has come back")

    @rule()
    def resume_elsewhere(self) -> None:
        self.driver.restart()

    @precondition(lambda self: self.harm.held)
    @rule()
    def let_late_ones_come(self) -> None:
        self.harm.let_through(1000)

    @invariant()
    def there_is_one_history(self) -> None:
        if hasattr(self, "driver"):
            self.driver.check()

    def teardown(self) -> None:
        """When it is quiet the run goes on: ten steps, each done once."""
        if not hasattr(self, "driver"):
            return
        self.harm.fates.clear()
        before = self.driver.at.step
        for _ in range(12):
            self.driver.train(is_finite=True)
        self.driver.check()
        assert self.driver.at.step >= before + 10
        self.driver.close()


A, B = DEVICES[:2]
SCRIPTS: dict[str, tuple[int, str, list[int | str | Fate]]] = {
    "a commit comes twice": (2, "1", [2, Fate("commit", A, "double"), 3]),
    "a rank dies before its copy is made": (3, "1", [4, Fate("compute", A, "kill"), 3]),
    "a rank dies, then the one that had its copy": (
        2,
        "1",
        [4, Fate("compute", B, "kill"), 2, Fate("compute", A, "kill"), 3],
    ),
    "half a commit is not the state before it": (2, "off", [2, Fate("half apply", A, "error"), 3]),
    "half a restored state is none": (
        3,
        "1",
        [4, Fate("compute", B, "kill"), Fate("take", A, "error", after=1), 3],
    ),
    "all applied a step that was not recorded": (
        2,
        "off",
        [Fate("committed", A, "late", 40), 2, Fate("half apply", B, "error"), 3],
    ),
    "a step was done in two generations": (
        2,
        "off",
        [
            *(3, "save", 1, Fate("compute", B, "kill"), 2),
            *(Fate("half apply", A, "error"), Fate("commit", B, "late", 40), 3),
        ],
    ),
    "a commit comes a generation late": (
        2,
        "1",
        [2, Fate("commit", A, "late", 18), Fate("step_report", B, "late", 12, after=1), 3],
    ),
    "an answer comes a generation late": (
        2,
        "1",
        [2, Fate("committed", A, "late", 18), Fate("commit", A, "late", 12, after=1), 3],
    ),
    "a piece of state comes twice": (4, "1", [2, Fate("state_array", A, "double"), "save", 2]),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_dangers_that_are_known(name: str, manifest: ModelManifest) -> None:
    """The same with many splits, and ends of ranks: some of them are the dangerous ones."""
    num_devices, shadow, script = SCRIPTS[name]
    for seed in range(SEEDS):
        harm = Harm()
        driver = Driver(manifest, harm, DEVICES[:num_devices], shadow, seed)
        for act in script:
            if isinstance(act, Fate):
                harm.fates.append(replace(act))
            elif act == "save":
                driver.save()
            else:
                for _ in range(int(act)):
                    driver.train(is_finite=True)
                    driver.check()
        driver.close()


TestCommitProtocol = CommitProtocol.TestCase
# Without Phase.explain: it traces every line of a failing example, for minutes.
TestCommitProtocol.settings = settings(
    max_examples=60,
    stateful_step_count=20,
    deadline=None,
    phases=(Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink),
)
