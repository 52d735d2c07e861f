"""What a member makes of an instance's answers."""

from __future__ import annotations

import pytest
from headrace.common.v1 import common_pb2 as common
from headrace.rollout.v1 import rollout_pb2 as rollout
from headrace.trainer.v1 import trainer_pb2 as trainer
from headrace_coordinator.domain.state import InstanceState
from headrace_coordinator.run.workers.clients import Published
from headrace_coordinator.run.workers.rollout_client import RolloutClient
from headrace_coordinator.run.workers.trainer_client import TrainerClient

VERSION = common.PolicyVersion(number=7, digest="weights")


class OneTrainer:
    """A port to a trainer that can, or cannot yet, publish in RecordStep's reply."""

    def __init__(self, *, knows_publish: bool) -> None:
        self.knows_publish = knows_publish
        self.calls: list[str] = []

    async def call(self, method, request, timeout):
        self.calls.append(method)
        published = trainer.PublishPolicyResponse(version=VERSION)
        if method == "PublishPolicy":
            assert request.number == 7
            return published
        assert request.publish
        return trainer.RecordStepResponse(published=published if self.knows_publish else None)


@pytest.mark.parametrize(
    ("knows_publish", "calls"), [(True, ["RecordStep"]), (False, ["RecordStep", "PublishPolicy"])]
)
async def test_a_recorded_version_is_published_by_trainers_of_either_release(knows_publish, calls):
    port = OneTrainer(knows_publish=knows_publish)
    member = TrainerClient("r", InstanceState("t", "t", "trainer", "host", "", [], {}), port, 1)
    assert (await member.recorded(0, 1, 7)).version == VERSION
    assert port.calls == calls


class ColdRollout:
    """A port to a rollout whose engine takes as long to start, and to install, as it may by default."""

    COLD_S = 600.0 + 300.0

    async def call(self, method, request, timeout):
        slow = method == "InstallPolicy"
        assert timeout >= self.COLD_S or not slow, f"{method} was given up after {timeout} s"
        return rollout.InstallPolicyResponse(version=VERSION) if slow else None


async def test_an_engine_that_still_starts_is_waited_for():
    state = InstanceState("i", "rollout-0", "rollout", "host", "", [], {})
    member = RolloutClient("r", state, ColdRollout(), 1)
    await member.make_room()
    await member.install(Published(VERSION, common.WeightManifest(), common.WeightSource()))
    await member.go_on()
    assert member.awake and member.digest == VERSION.digest
