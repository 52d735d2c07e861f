"""Settled groups on their way to the trainer: queued, lent to helpers, whole, in messages of a bounded size."""

from types import SimpleNamespace

import pytest
from headrace.common.v1 import common_pb2
from headrace.trainer.v1 import trainer_pb2
from headrace_coordinator.domain.devices.placement import placement_of
from headrace_coordinator.domain.ledger.slots import Slot
from headrace_coordinator.domain.ledger.versions import Version
from headrace_coordinator.fleet.instance_client import CallRefused
from headrace_coordinator.run.step import learning
from headrace_coordinator.run.step.learning import MESSAGE_BYTES, learn_requests
from headrace_coordinator.run.step.state import AttemptState, Takes
from headrace_coordinator.run.step.trajectories import Trajectories, Trajectory
from headrace_coordinator.run.workers.trainer_client import TrainerClient
from headrace_schema.sections.running import PlacementSection

GROUP = 2
TRUNCATED = common_pb2.FINISH_REASON_LENGTH


class Ledger(SimpleNamespace):
    """As much of a ledger as the queue of settled groups asks."""

    @property
    def settled(self):
        return sorted(self.index.settled)


@pytest.fixture
def attempt():
    groups = {
        prompt: [Slot(prompt, sample, reward=prompt + sample / 2) for sample in range(GROUP)]
        for prompt in range(9)
    }
    ledger = Ledger(group=groups.__getitem__, index=SimpleNamespace(settled=set(groups)), prompts=range(9))
    lineage = SimpleNamespace(versions={4: Version(4, 3, 1, "digest")})
    context = SimpleNamespace(
        state=SimpleNamespace(ledger=ledger, lineage=lineage),
        spec=SimpleNamespace(
            algorithm=SimpleNamespace(truncated="mask", max_staleness=0),
            deterministic=False,
            tracking=SimpleNamespace(ratios=False),
            graph=SimpleNamespace(whole_batch=False),
        ),
        workers=SimpleNamespace(
            leader=TrainerClient("run", None, None, 1), producers=[], placement=placed("disaggregated")
        ),
        images=lambda ordinal: (),
    )
    return AttemptState(context, None, None, Trajectories(1 << 40))


def placed(mode):
    return placement_of(PlacementSection(mode=mode))


def finish(attempt, size, finish_reason=common_pb2.FINISH_REASON_EOS):
    """Puts a trajectory of each slot into the attempt."""
    for slot in [slot for prompt in range(9) for slot in attempt.ledger.group(prompt)]:
        message = common_pb2.Trajectory(
            sample=common_pb2.SlotKey(prompt_ordinal=slot.prompt, sample_index=slot.sample),
            completion_text="x" * size,
            finish_reason=finish_reason,
        )
        attempt.trajectories.put(Trajectory(slot, message, message.ByteSize(), size, (), oldest=4))


@pytest.mark.parametrize(
    ("size", "groups_of_messages"),
    [(100, [9]), (MESSAGE_BYTES // 4, [2, 2, 2, 2, 1]), (MESSAGE_BYTES, [1] * 9)],
)
async def test_messages_hold_whole_groups_in_order_up_to_a_size(attempt, size, groups_of_messages):
    finish(attempt, size)
    requests = [request async for request in learn_requests(attempt, list(range(9)))]
    assert [len(request.groups) for request in requests] == groups_of_messages
    groups = [group for request in requests for group in request.groups]
    assert [group.prompt_ordinal for group in groups] == list(range(9))
    assert all(len(group.members) == GROUP for group in groups)


def test_beside_helpers_the_trainer_group_has_little_in_hand(attempt):
    """A piece that it works on and the next one: when decoding ends, the rest is there to be shared."""
    for prompt in range(9):
        for slot in attempt.ledger.group(prompt):
            slot.tokens = 5
    attempt.context.workers.ranks = 1
    attempt.context.spec.trainer = SimpleNamespace(micro_batch_tokens=40)
    groups = attempt.groups
    groups.takes, groups.waiting = Takes.SHARED, list(range(9))
    pieces = []
    while piece := groups.take():
        pieces.append(piece)
    assert pieces == [[0, 1], [2, 3]] and groups.waiting == list(range(4, 9))


def test_what_helpers_give_back_waits_again_where_it_is_still_settled(attempt):
    groups = attempt.groups
    groups.put([3, 1, 2])
    groups.lend([1, 2])
    assert groups.take() == [3] and groups.sent == {3} and not groups.exhausted
    attempt.ledger.index.settled -= {2}
    groups.give_back([1, 2, 7])
    assert groups.waiting == [1] and not groups.lent
    attempt.ledger.index.settled = {1, 3}
    groups.close()
    assert groups.collect() == [1, 3] and not groups.sent
    assert groups.take() == [1, 3] and groups.exhausted


def test_a_closed_queue_holds_the_rest_where_the_trainer_group_is_about_to_have_more_devices(attempt):
    attempt.context.workers.placement = placed("hybrid")
    groups = AttemptState(attempt.context, None, None, Trajectories(1)).groups
    groups.put([4])
    groups.close()
    assert groups.take() == [] and not groups.exhausted
    groups.go_on()
    assert groups.take() == [4] and groups.exhausted


async def test_a_settled_trajectory_carries_message_reward_and_oldest_version(attempt):
    finish(attempt, 10, TRUNCATED)
    [request] = [request async for request in learn_requests(attempt, [7])]
    settled = request.groups[0].members[1]
    assert settled.trajectory == attempt.trajectories[7, 1].received
    assert (settled.reward, settled.masked) == (7.5, True)
    assert settled.oldest_version == common_pb2.PolicyVersion(number=4, parent=3, ordinal=1, digest="digest")


def test_images_of_a_group_that_do_not_travel_are_named(attempt, monkeypatch):
    attempt.context.workers.leader = SimpleNamespace(incarnation="trainer-0")
    group = trainer_pb2.SettledGroup(prompt_ordinal=3)
    for digest in "ab":
        group.images.add(digest=digest, data=bytes(10))
    monkeypatch.setattr(learning, "MOST_GROUP_IMAGE_BYTES", 20)
    assert learning._image_bytes(attempt, group) == 20
    monkeypatch.setattr(learning, "MOST_GROUP_IMAGE_BYTES", 19)
    with pytest.raises(
        CallRefused, match=r"environment\.tasks: the images of 2 messages of group 3 have 20 bytes"
    ):
        learning._image_bytes(attempt, group)


async def test_messages_are_kept_up_to_a_budget_and_until_they_are_released(attempt):
    finish(attempt, 100)
    found = list(attempt.trajectories.values())[:4]
    size = found[0].size
    kept = Trajectories(sum(trajectory.size for trajectory in found[:3]))
    for trajectory in found:
        kept.put(trajectory)
    assert [trajectory.message is not None for trajectory in kept.values()] == [True, True, True, False]
    assert [(await kept.messages([each.slot], [])).keys() for each in found] == [
        {(0, 0)},
        {(0, 1)},
        {(1, 0)},
        set(),
    ]
    kept.release([(0, 0), (0, 0), (8, 0)])
    assert kept[0, 0].message is None and kept[0, 0].size == size


async def test_a_message_is_lost_with_the_producer_of_what_it_refers_to(attempt):
    finish(attempt, 10)
    kept, [first, second, *_] = Trajectories(1 << 20), list(attempt.trajectories.values())
    for trajectory, owner in ((first, "living"), (second, "dead")):
        seen = (
            trajectory.received.branches.add().segments.add(policy_number=1).actions.observation["image/eye"]
        )
        seen.blob.incarnation = owner
        kept.put(trajectory)

    async def fetch(keys):
        return []

    living = SimpleNamespace(incarnation="living", fetch=fetch)
    assert [*await kept.messages([first.slot, second.slot], [living])] == [first.slot.key]


@pytest.mark.parametrize(("limit", "waited"), [(7200.0, 7200.0), (60.0, 900.0)])
async def test_a_commit_may_take_as_long_as_a_step(limit, waited):
    """An algorithm of several passes learns within it."""
    asked = []

    class Answering:
        async def call(self, method, request, timeout):
            asked.append((method, timeout))
            return trainer_pb2.CommitStepResponse()

    client = TrainerClient("run", SimpleNamespace(incarnation="one", kind="trainer"), Answering(), 1)
    await client.commit(0, 1, 1, 2, "digest", b"", limit)
    assert asked == [("CommitStep", waited)]
