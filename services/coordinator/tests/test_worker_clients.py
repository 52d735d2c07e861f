"""What the clients of instances make of their answers."""

from __future__ import annotations

from headrace.common.v1 import common_pb2 as common
from headrace.rollout.v1 import rollout_pb2 as rollout
from headrace.trainer.v1 import trainer_pb2 as trainer
from headrace_coordinator.domain.state import InstanceState
from headrace_coordinator.run.workers.clients import Published
from headrace_coordinator.run.workers.rollout_client import RolloutClient
from headrace_coordinator.run.workers.trainer_client import TrainerClient

VERSION = common.PolicyVersion(number=7, digest="weights")


class Trainer:
    """A trainer instance that publishes the version that was recorded."""

    async def call(self, method, request, timeout):
        assert method == "RecordStep" and request.publish
        return trainer.RecordStepResponse(published=trainer.PublishPolicyResponse(version=VERSION))


async def test_a_recorded_version_is_published_at_once():
    client = TrainerClient("r", InstanceState("t", "t", "trainer", "host", "", [], {}), Trainer(), 1)
    assert (await client.recorded(0, 1, 7)).version == VERSION


class ColdRollout:
    """A rollout instance whose engine takes as long to start, and to install, as it may by default."""

    COLD_S = 600.0 + 300.0

    async def call(self, method, request, timeout):
        slow = method == "InstallPolicy"
        assert timeout >= self.COLD_S or not slow, f"{method} was ended after {timeout} s"
        return rollout.InstallPolicyResponse(version=VERSION) if slow else None


async def test_an_engine_that_still_starts_is_waited_for():
    state = InstanceState("i", "rollout-0", "rollout", "host", "", [], {})
    client = RolloutClient("r", state, ColdRollout(), 1)
    await client.wake_weights()
    await client.install(Published(VERSION, common.WeightManifest(), common.WeightSource()))
    await client.wake_cache()
    assert client.awake and client.digest == VERSION.digest
