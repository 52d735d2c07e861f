"""Settled groups on their way to the trainer: whole, in order, in messages of a bounded size."""

from types import SimpleNamespace

import pytest
from headrace.common.v1 import common_pb2
from headrace.trainer.v1 import trainer_pb2
from headrace_coordinator.domain.ledger.slots import Slot
from headrace_coordinator.domain.ledger.versions import Version
from headrace_coordinator.run.step.learning import MESSAGE_BYTES, Learning
from headrace_coordinator.run.step.trajectories import Relay
from headrace_coordinator.run.workers.trainer_client import TrainerClient

GROUP = 2
TRUNCATED = common_pb2.FINISH_REASON_LENGTH


@pytest.fixture
def learning():
    groups = {
        prompt: [Slot(prompt, sample, reward=prompt + sample / 2) for sample in range(GROUP)]
        for prompt in range(9)
    }
    ledger = SimpleNamespace(group=groups.__getitem__)
    lineage = SimpleNamespace(versions={4: Version(4, 3, 1, "digest")})
    context = SimpleNamespace(
        state=SimpleNamespace(ledger=ledger, lineage=lineage),
        spec=SimpleNamespace(algorithm=SimpleNamespace(truncated="mask")),
        workers=SimpleNamespace(leader=TrainerClient("run", None, None, 1)),
    )
    scored = {(prompt, sample): SimpleNamespace(oldest=4) for prompt in groups for sample in range(GROUP)}
    return Learning(context, Relay(1), None, SimpleNamespace(scored=scored))


def bodies(size, finish_reason=common_pb2.FINISH_REASON_EOS):
    def body(prompt, sample):
        found = common_pb2.Trajectory(
            sample=common_pb2.SlotKey(prompt_ordinal=prompt, sample_index=sample),
            completion_text="x" * size,
            finish_reason=finish_reason,
        )
        return found, found.ByteSize()

    return {(prompt, sample): body(prompt, sample) for prompt in range(9) for sample in range(GROUP)}


@pytest.mark.parametrize(
    ("size", "groups_of_messages"),
    [(100, [9]), (MESSAGE_BYTES // 4, [2, 2, 2, 2, 1]), (MESSAGE_BYTES, [1] * 9)],
)
def test_messages_hold_whole_groups_in_order_up_to_a_size(learning, size, groups_of_messages):
    messages = list(learning.filled(list(range(9)), bodies(size)))
    assert [len(message.groups) for message in messages] == groups_of_messages
    groups = [group for message in messages for group in message.groups]
    assert [group.prompt_ordinal for group in groups] == list(range(9))
    assert all(len(group.members) == GROUP for group in groups)


def test_beside_helpers_the_trainer_group_has_little_in_hand(learning):
    """A piece that it works on and the next one: when decoding ends, the rest is there to be shared."""
    for prompt in range(9):
        for slot in learning._ledger.group(prompt):
            slot.tokens = 5
    learning._context.workers.ranks = 1
    learning._context.spec.trainer = SimpleNamespace(micro_batch_tokens=40)
    learning.shares, learning.waiting = True, list(range(9))
    pieces = []
    while learning._has_room():
        pieces.append(learning._next())
    assert pieces == [[0, 1], [2, 3]] and learning.waiting == list(range(4, 9))


def test_a_member_carries_body_reward_and_oldest_version(learning):
    found = bodies(10, TRUNCATED)
    (message,) = learning.filled([7], found)
    member = message.groups[0].members[1]
    assert member.trajectory == found[7, 1][0]
    assert (member.reward, member.masked) == (7.5, True)
    assert member.oldest_version == common_pb2.PolicyVersion(number=4, parent=3, ordinal=1, digest="digest")


@pytest.mark.parametrize(("limit", "waited"), [(7200.0, 7200.0), (60.0, 900.0)])
async def test_a_commit_may_take_as_long_as_a_step(limit, waited):
    """An algorithm of several passes learns within it."""
    asked = []

    class Port:
        async def call(self, method, request, timeout):
            asked.append((method, timeout))
            return trainer_pb2.CommitStepResponse()

    client = TrainerClient("run", SimpleNamespace(incarnation="one", kind="trainer"), Port(), 1)
    await client.commit(0, 1, 1, 2, "digest", b"", limit)
    assert asked == [("CommitStep", waited)]
