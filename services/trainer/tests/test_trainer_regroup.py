"""A run's trainer group changes between steps, one rank to two and back: it computes what a static group computes."""

from __future__ import annotations

import grpc
import numpy as np
import pytest
from headrace.trainer.v1 import trainer_pb2 as pb
from headrace_servicekit.rpc.client import dial
from headrace_servicekit.rpc.errors import reason_of
from rank_processes import RankProcess, end
from two_ranks_parts import address_of, regroup, rendezvous

pytestmark = pytest.mark.timeout(600)
SETTINGS = {
    "trainer": {"ranks": 1, "micro_batch_tokens": 48, "warmup": {"steps": 3, "lr": 1e-4, "batch": 6}},
    # Adam's first steps turn float noise of near-zero gradients into differences of the order of the rate.
    "optimizer": {"lr": 1e-4},
    "warmup_examples": [{"text": f"copy {n}: ", "answer": str(n)} for n in range(10, 20)],
}
PASSES = {"epochs": 2, "minibatches": 2}


@pytest.fixture(scope="module")
def process(tmp_path_factory):
    """A second trainer process; the leader is the test's own."""
    directory = tmp_path_factory.mktemp("regroup")
    port_file = directory / "address"
    child = RankProcess("two_ranks.py", str(port_file), str(directory / "shm"))
    yield child, port_file
    end([child])


@pytest.fixture
async def other(process, tmp_path, make_config, trainer_client):
    """A client of the second trainer, in no trainer group."""
    _, port_file = process
    async with dial(await address_of(port_file), token=None) as channel:
        found = trainer_client(channel, tmp_path / "run", make_config)
        yield found
        await found.close_run()


async def step(client, make_settled, settled_digest, version):
    """One step whose groups need several rounds; the reply."""
    groups = [make_settled(100 * version.ordinal + p, version=version) for p in range(4)]
    number = version.number + 1
    await client.begin(version.ordinal, 1, version.number, number)
    await client.learn(version.ordinal, 1, groups)
    reply = await client.commit(version.ordinal, 1, version.number, number, settled_digest(groups))
    await client.record(version.ordinal, 1, number)
    return reply


async def weights(client, number) -> np.ndarray:
    await client.publish(number)
    return np.frombuffer(await client.body(number), dtype=np.float32).astype(np.float64)


@pytest.mark.parametrize(
    ("algorithm", "options", "lora"),
    [
        ("grpo", {}, None),
        pytest.param("ppo", {**PASSES, "critic": "model"}, None, marks=pytest.mark.nightly),
        pytest.param("grpo", {"kl_loss_coef": 0.3, "kl_target": 1e-4}, None, marks=pytest.mark.nightly),
        ("grpo", {"kl_loss_coef": 0.3, "kl_target": 1e-4}, {"rank": 4}),
    ],
    ids=["one pass", "critic", "reference", "adapters"],
)
async def test_a_group_of_one_then_two_then_one_equals_a_static_one(
    client, other, make_config, make_settled, settled_digest, algorithm, options, lora
):
    settings = SETTINGS | {"trainer": SETTINGS["trainer"] | {"lora": lora}}
    config = make_config(**settings, algorithm={"name": algorithm, "options": options})

    async def run(changes) -> tuple[list[pb.CommitStepResponse], np.ndarray, np.ndarray]:
        version = (await client.open(config)).version
        first, replies = await weights(client, 1), []
        for index in range(6):
            if (members := changes.get(index)) is not None:
                generation = 1 + sum(change <= index for change in changes)
                for each in members:
                    await each.open_run(config)
                assert (await regroup(client, members, generation, version.number)) == version
            reply = await step(client, make_settled, settled_digest, version)
            version = reply.version
            replies.append(reply)
        last = await weights(client, version.number)
        await client.close_run()
        return replies, first, last

    static, first, expected = await run({})
    changed, _, found = await run({2: [other], 4: []})
    assert np.linalg.norm(found - expected) / np.linalg.norm(expected) <= 1e-5
    # Of what was learned, too: the weights alone hardly move in six steps.
    moved = np.linalg.norm(expected - first)
    assert moved and np.linalg.norm(found - expected) / moved <= 1e-3
    for ours, reference in zip(changed, static, strict=True):
        assert ours.version.number == reference.version.number
        assert ours.figures.keys() == reference.figures.keys()
        for name in ("loss", "grad_norm"):
            assert ours.figures[name] == pytest.approx(reference.figures[name], rel=1e-4, abs=1e-6), name


async def test_a_version_survives_a_group_that_never_met(
    client, other, make_config, make_settled, settled_digest
):
    version = (await client.open(make_config(**SETTINGS))).version
    version = (await step(client, make_settled, settled_digest, version)).version
    before = await weights(client, version.number)
    await client.leave(1, carry=True)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await client.join(2, 0, 2, rendezvous(), timeout_s=1)
    assert reason_of(caught.value) == "RENDEZVOUS_TIMEOUT"
    assert (await client.state()).carried_number == version.number
    await client.join(3, 0, 1, "")
    assert (await client.take_up(version.number)).version == version
    np.testing.assert_array_equal(await weights(client, version.number), before)
    saved = await client.save(version.number)  # in the lineage that the run had
    assert saved.checkpoint.name.startswith("lineage-1/")


async def test_nothing_is_carried_out_of_a_step_and_only_what_is_carried_is_taken_up(
    client, make_config, make_settled, settled_digest
):
    version = (await client.open(make_config(**SETTINGS))).version

    async def refusal(call) -> str:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        return reason_of(caught.value)

    assert await refusal(client.take_up(version.number + 1)) == "NOT_CARRIED"
    group = make_settled(0, version=version)
    await client.begin(0, 1, 1, 2)
    await client.learn(0, 1, [group])
    assert await refusal(client.leave(1, carry=True)) == "CONFLICT"
    await client.commit(0, 1, 1, 2, settled_digest([group]))
    assert await refusal(client.leave(1, carry=True)) == "NOT_RECORDED"
    await client.record(0, 1, 2)
    await client.leave(1, carry=True)
    await client.join(2, 0, 1, "")
    assert await refusal(client.begin(1, 1, 2, 3)) == "NOT_OPEN"
    assert await refusal(client.take_up(1)) == "NOT_CARRIED"
    restored = await client.restore("", 7)  # what is loaded in its place drops it
    assert restored.version.number == 7
    assert (await client.state()).carried_number == 0
