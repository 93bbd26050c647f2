"""A rank of a ring of two that a test talks to as its driver would."""

from __future__ import annotations

import pytest
from rewound_rank import Conversation

from exo_train.agent.planning import make_plan
from exo_train.models.manifest import ModelManifest
from exo_train.plan.plan import Plan
from tests.ring.rings import CONFIG, candidates, manifest_of
from tests.tiny_models import make_tiny_model


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> ModelManifest:
    return manifest_of(make_tiny_model(tmp_path_factory.mktemp("rewind") / "m", num_layers=2))


@pytest.fixture(scope="module")
def plan(manifest: ModelManifest) -> Plan:
    return make_plan(candidates(["torch", "torch"]), CONFIG, manifest, cluster="test")


@pytest.fixture
def talk(plan: Plan, manifest: ModelManifest) -> Conversation:
    return Conversation(plan, manifest)
