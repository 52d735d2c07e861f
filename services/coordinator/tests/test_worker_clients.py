"""What the clients of instances make of their answers."""

from __future__ import annotations

from types import SimpleNamespace

from headrace.common.v1 import common_pb2 as common
from headrace.reward.v1 import reward_pb2 as reward
from headrace.rollout.v1 import rollout_pb2 as rollout
from headrace.trainer.v1 import trainer_pb2 as trainer
from headrace_coordinator.domain.state import InstanceState
from headrace_coordinator.fleet.instance_client import CallRefused
from headrace_coordinator.run.devices.leasing import WorkerLeases
from headrace_coordinator.run.workers.clients import Published, RewardClient
from headrace_coordinator.run.workers.rollout_client import RolloutClient, weight_figures
from headrace_coordinator.run.workers.trainer_client import TrainerClient
from headrace_servicekit.rpc.client import MAX_MESSAGE_BYTES

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


class Receiving:
    """A rollout instance that takes versions as `responses` say."""

    def __init__(self, *responses):
        self.responses, self.requests = list(responses), []

    async def call(self, method, request, timeout):
        self.requests.append(request)
        found = rollout.InstallPolicyResponse(version=VERSION)
        found.MergeFrom(self.responses.pop(0))
        return found


async def test_a_way_that_fails_is_told_once_and_every_version_is_counted():
    def came(moved, *fallbacks, transfer_ms=0, pause_ms=0):
        found = rollout.InstallPolicyResponse(
            transport=common.WEIGHT_TRANSPORT_GRPC, bytes_moved=moved, fallbacks=fallbacks
        )
        found.transfer_time.FromMilliseconds(transfer_ms)
        found.pause_time.FromMilliseconds(pause_ms)
        return found

    swapped = rollout.InstallPolicyResponse()
    swapped.pause_time.FromMilliseconds(9)
    instance = Receiving(
        came(100, "shm from t: no file", transfer_ms=50, pause_ms=3),
        came(100, "shm from t: not the same host", "delta from t: lost", transfer_ms=20),
        swapped,
        came(100, "shm from t: no file"),
    )
    state = InstanceState("i", "rollout-0", "rollout", "host", "", [], {})
    client, published = (
        RolloutClient("r", state, instance, 1),
        Published(VERSION, common.WeightManifest(), common.WeightSource(incarnation="t")),
    )
    assert await client.install(published) == ["shm from t: no file"]
    assert await client.prefetch(published) == ["delta from t: lost"] and instance.requests[1].prefetch
    assert await client.install(published) == []
    assert [request.sources[0].incarnation for request in instance.requests] == ["t"] * 3
    assert weight_figures([client]) == {
        "weights_bytes": 200.0,
        "weights_fallbacks": 3.0,
        "weights_seconds": 0.05,
        "weights_pause_seconds": 0.009,
    }
    assert weight_figures([client]) == {}
    assert await client.install(published) == []


async def test_a_version_is_brought_to_those_that_work_and_a_refusal_is_noted():
    class Refusing(Receiving):
        async def call(self, method, request, timeout):
            raise CallRefused("i", "NO_SPACE", "the tmpfs is full")

    def rollout_of(name, instance, **fields):
        state = InstanceState(name, name, "rollout", "host", "", [], {})
        return RolloutClient("r", state, instance, 1, **fields)

    came = rollout.InstallPolicyResponse(transport=common.WEIGHT_TRANSPORT_SHM)
    works, full, asleep, ready = Receiving(came), Refusing(), Receiving(), Receiving()
    rollouts = [
        rollout_of("works", works, awake=True, installed=6),
        rollout_of("full", full, awake=True, installed=6),
        rollout_of("asleep", asleep, installed=6),
        rollout_of("ready", ready, awake=True, installed=7),
    ]
    notes: list[str] = []
    log = SimpleNamespace(state=SimpleNamespace(instances={}))
    leases = object.__new__(WorkerLeases)
    leases.workers = SimpleNamespace(fleet=SimpleNamespace(event_log=log), note=notes.append)
    await leases.prefetch(rollouts, Published(VERSION, common.WeightManifest(), common.WeightSource()))
    assert [request.prefetch for request in works.requests] == [True]
    assert not asleep.requests and not ready.requests
    assert len(notes) == 1 and "full did not take version 7 beforehand" in notes[0] and "NO_SPACE" in notes[0]
    assert rollouts[0].installed == 6


class Reading:
    """An instance that keeps the requests of a stream."""

    def __init__(self):
        self.requests = []

    async def stream(self, method, sent, timeout):
        async for request in sent:
            self.requests.append(request)
        return
        yield


async def once(message):
    yield message


LONG = "x" * 950_000


async def test_long_prompts_travel_in_messages_of_bounded_size():
    state, reading = InstanceState("i", "rollout-0", "rollout", "host", "", [], {}), Reading()
    client = RolloutClient("r", state, reading, 1)
    groups = [
        rollout.GroupAssignment(prompt_ordinal=ordinal, prompt=rollout.Prompt(text=LONG))
        for ordinal in range(80)
    ]
    work = rollout.AssignGroups(groups=groups)
    assert work.ByteSize() > MAX_MESSAGE_BYTES
    async for _ in client.generate(rollout.GenerateOpen(), once(work), 1.0):
        raise AssertionError
    opening, *assigned = reading.requests
    assert opening.HasField("open")
    assert max(request.ByteSize() for request in assigned) < MAX_MESSAGE_BYTES / 4
    assert [each.prompt_ordinal for request in assigned for each in request.assign.groups] == [*range(80)]


async def test_long_answers_are_scored_in_messages_of_bounded_size():
    state, reading = InstanceState("i", "reward-0", "reward", "host", "", [], {}), Reading()
    client = RewardClient("r", state, reading, 1)
    items = [
        reward.ScoreItem(sample=common.SlotKey(prompt_ordinal=ordinal), prompt=LONG) for ordinal in range(80)
    ]
    items.insert(3, reward.ScoreItem(sample=common.SlotKey(prompt_ordinal=99), completion=LONG * 20))
    async for _ in client.score(once(items), 1.0):
        raise AssertionError
    sizes = [request.ByteSize() for request in reading.requests]
    assert max(sizes) < MAX_MESSAGE_BYTES / 3 and len(sizes) < 20
    asked = [each.sample.prompt_ordinal for request in reading.requests for each in request.items]
    assert asked == [item.sample.prompt_ordinal for item in items]
