"""Two trainer processes with Gloo are one trainer: same losses and weights, resharding, a lost rank."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import time
from pathlib import Path

import grpc
import numpy as np
import pytest
from headrace.common.v1 import common_pb2
from headrace.trainer.v1 import trainer_pb2 as pb
from headrace_modelkit.broadcasting import Broadcasts
from headrace_servicekit.rpc.addresses import free_port
from headrace_servicekit.rpc.client import dial
from headrace_servicekit.rpc.errors import reason_of
from headrace_servicekit.weights.receiving import receive_weights, ways_of
from headrace_servicekit.weights.store import WeightStore
from headrace_servicekit.weights.ways import Links
from headrace_trainer.export import export_checkpoint
from rank_processes import RankProcess, end
from two_ranks_parts import address_of, form, train, until_lease, weights

pytestmark = pytest.mark.timeout(600)
SETTINGS = {
    "trainer": {"ranks": 2, "micro_batch_tokens": 48, "warmup": {"steps": 3, "lr": 1e-4, "batch": 6}},
    # Adam's first steps turn float noise of near-zero gradients into differences of the order of the rate.
    "optimizer": {"lr": 1e-4},
    "warmup_examples": [{"text": f"copy {n}: ", "answer": str(n)} for n in range(10, 20)],
}


@pytest.fixture(scope="module")
def spawn(tmp_path_factory):
    """Starts trainer processes; each is killed after the last test."""
    directory = tmp_path_factory.mktemp("ranks")
    children = []

    def start(name: str) -> tuple[RankProcess, Path]:
        port_file = directory / f"{name}.address"
        child = RankProcess("two_ranks.py", str(port_file), str(directory / "shm"))
        children.append(child)
        return child, port_file

    yield start
    end(children)


@pytest.fixture(scope="module")
def processes(spawn):
    """Two trainer processes that the tests of this file share; the last test kills one."""
    return [spawn("zero"), spawn("one")]


@pytest.fixture
async def pair(processes, tmp_path, make_config, trainer_client):
    """Leader and follower, not yet in a trainer group, with the follower's process."""
    addresses = [await address_of(port_file) for _, port_file in processes]
    async with dial(addresses[0], token=None) as first, dial(addresses[1], token=None) as second:
        leader = trainer_client(first, tmp_path / "run", make_config)
        follower = trainer_client(second, tmp_path / "run", make_config)
        yield leader, follower, processes[1][0]
        await leader.close_run()
        if processes[1][0].lives:
            await follower.close_run()


async def test_a_rank_alone_fails_at_its_deadline(client, make_config):
    await client.open_run(make_config(**SETTINGS))
    started = time.monotonic()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await client.join(1, 0, 2, f"127.0.0.1:{free_port()}", timeout_s=2)
    assert reason_of(caught.value) == "RENDEZVOUS_TIMEOUT"
    assert time.monotonic() - started < 20


PASSES = {"epochs": 2, "minibatches": 2}


KL = {"kl_loss_coef": 0.3, "kl_target": 1e-4, "entropy_coef": 0.1}
LORA = {"rank": 4, "alpha": 8}


@pytest.mark.parametrize(
    ("algorithm", "options", "trainer"),
    [
        ("grpo", {}, {}),
        pytest.param("grpo", PASSES, {}, marks=pytest.mark.nightly),
        pytest.param("ppo", {**PASSES, "critic_lr": 1e-3}, {}, marks=pytest.mark.nightly),
        ("ppo", {**PASSES, "critic": "model"}, {}),
        pytest.param("grpo", KL, {}, marks=pytest.mark.nightly),
        ("ppo", {**PASSES, "critic_lr": 1e-3}, {"lora": LORA}),
        ("grpo", KL, {"lora": {"rank": 1}}),
        ("grpo", {}, {"draft": {"lr": 1e-4, "unrolled": 2}}),
    ],
    ids=[
        "one pass",
        "passes",
        "value head",
        "critic",
        "reference",
        "adapters",
        "adapters' reference",
        "head that drafts",
    ],
)
async def test_two_ranks_equal_one(
    pair, client, make_config, make_settled, settled_digest, algorithm, options, trainer
):
    leader, follower, _ = pair
    settings = SETTINGS | {"trainer": SETTINGS["trainer"] | trainer}
    config = make_config(**settings, algorithm={"name": algorithm, "options": options})
    await form(leader, follower, config)
    restored, followed = await asyncio.gather(leader.restore("", 1), follower.restore("", 1))
    assert restored.warmup_steps == followed.warmup_steps == 3
    two = await train(leader, make_settled, settled_digest, restored.version, 3)

    alone = await client.open(config)
    one = await train(client, make_settled, settled_digest, alone.version, 3)
    for ours, reference in zip(two, one, strict=True):
        for name in ("loss", "grad_norm", "entropy", "log_prob_mismatch_mean", "log_prob_mismatch_max"):
            assert ours.figures[name] == pytest.approx(reference.figures[name], rel=1e-4, abs=1e-6), name
        assert ours.token_count == reference.token_count
        assert ours.figures.keys() == reference.figures.keys()
        for name in {"reference_kl", "kl_coefficient", "draft_loss", "draft_overlap"} & set(
            reference.figures
        ):
            assert ours.figures[name] == pytest.approx(reference.figures[name], rel=1e-2, abs=1e-7), name
        if algorithm == "ppo":
            for name in ("value_loss", "explained_variance", "critic_grad_norm"):
                assert ours.figures[name] == pytest.approx(reference.figures[name], rel=1e-3, abs=1e-5), name
    np.testing.assert_allclose(await weights(leader, 4), await weights(client, 4), atol=1e-5)

    trajectory = make_settled(0, version=restored.version).members[1].trajectory
    values = [[s.values for s in (await c.infer([trajectory] * 3)).sequences] for c in (leader, client)]
    np.testing.assert_allclose(values[0], values[1], atol=1e-5)

    call = follower.begin(3, 1, 4, 5)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    assert reason_of(caught.value) == "NOT_LEADER"


async def test_each_rank_publishes_its_part(
    pair, client, make_config, make_settled, settled_digest, tmp_path
):
    """No rank has the whole; two receivers assemble it, first of all bytes, then of changes."""
    leader, follower, _ = pair
    weights = {"publish": "ranks", "transports": ["collective", "delta", "grpc"]}
    config = make_config(
        model={"dtype": "bfloat16"}, optimizer={"lr": 1e-6}, trainer={"ranks": 2}, weights=weights
    )
    await form(leader, follower, config)
    version, wholes = (await leader.restore("", 1)).version, []
    alone = await client.open(config)
    assert version.digest == alone.version.digest
    stores = [WeightStore(tmp_path / f"host-{index}", f"rollout-{index}") for index in range(2)]
    ways = [ways_of(weights["transports"], Links(always=True), Broadcasts()) for _ in stores]

    async def receive(published, index):
        source = published.source
        source.receivers = len(stores)
        taken = published.version, published.manifest, [source]
        return await receive_weights(stores[index], leader.run, *taken, token=None, ways=ways[index])

    for number in (1, 2):
        published = await leader.publish(number)
        assert published.version.digest == version.digest and len(published.source.parts) == 2
        found = await asyncio.gather(*(receive(published, index) for index in range(2)))
        assert not any(each.fallbacks for each in found)
        assert {each.transport for each in found} == {common_pb2.WEIGHT_TRANSPORT_COLLECTIVE}
        moved, whole = [each.bytes_moved for each in found], published.manifest.size_bytes
        assert moved == [whole] * 2 if number == 1 else 0 < max(moved) < whole / 2
        with pytest.raises(grpc.aio.AioRpcError, match="not in this weight store"):
            await leader.body(number)
        wholes.append(bytes(found[0].body))
        if number == 1:
            [reply] = await train(leader, make_settled, settled_digest, version, 1)
            version = reply.version
    await client.publish(1)
    assert wholes[0] == await client.body(1) and wholes[1] != wholes[0]
    for store in stores:
        store.close()


async def test_two_ranks_train_adapters_beside_bf16_weights(
    pair, client, make_config, make_settled, settled_digest
):
    """Weights of two types are gathered at once."""
    leader, follower, _ = pair
    settings = {"model": {"dtype": "bfloat16"}, "optimizer": {"lr": 1e-2}}
    config = make_config(trainer={"ranks": 2, "micro_batch_tokens": 48, "lora": LORA}, **settings)
    await form(leader, follower, config)
    restored = await leader.restore("", 1)
    alone = await client.open(config)
    assert restored.version.digest == alone.version.digest
    two, one = [
        await train(trainer, make_settled, settled_digest, alone.version, 2) for trainer in (leader, client)
    ]
    for ours, reference in zip(two, one, strict=True):
        for name in ("loss", "grad_norm", "entropy"):
            assert ours.figures[name] == pytest.approx(reference.figures[name], rel=2e-2, abs=1e-3), name
    trajectory = make_settled(0, version=restored.version).members[1].trajectory
    values = [[s.values for s in (await c.infer([trajectory])).sequences] for c in (leader, client)]
    np.testing.assert_allclose(values[0], values[1], atol=3e-2)


async def test_two_ranks_use_the_weights_of_the_last_commit(
    pair, make_config, make_settled, settled_digest, plain_log_probs, sequences
):
    """Every order of an inference, a learning step, a step without a gradient and one that is not finite."""
    leader, follower, _ = pair
    # A step without a gradient moves the weights too: by its moments.
    await form(
        leader, follower, make_config(trainer={"ranks": 2}, algorithm={"options": {"normalize_std": False}})
    )
    version = (await leader.restore("", 1)).version
    step = 0

    async def infer() -> None:
        await leader.infer([make_settled(0, version=version).members[1].trajectory])

    async def attempt(rewards, *, commits: bool = True) -> None:
        nonlocal version, step
        group, number = make_settled(step, version=version, rewards=rewards), version.number + 1
        await leader.begin(step, 1, version.number, number)
        [response] = await leader.learn(step, 1, [group])
        accumulated = response.outcomes[0].disposition == pb.GROUP_DISPOSITION_ACCUMULATED
        assert accumulated is commits, response
        if commits:
            version = (await leader.commit(step, 1, version.number, number, settled_digest([group]))).version
            await leader.record(step, 1, number)
            await same(list(sequences(3)))
        else:
            await leader.abort(step, 1)
        step += 1

    async def same(scored) -> None:
        whole = await leader.weights(version.number)
        members = make_settled(3, version=version).members
        found = (await leader.infer([m.trajectory for m in members])).sequences
        for row, expected in zip(found, plain_log_probs(whole, scored), strict=True):
            np.testing.assert_allclose(list(row.values), expected, atol=1e-4, err_msg=f"{order}")

    kinds = {
        "infer": infer,
        "learn": lambda: attempt([1.0, 0.0, 0.5, 0.0]),
        "empty": lambda: attempt([1.0] * 4),
        "not finite": lambda: attempt([1e39, 0.0, 0.0, 0.0], commits=False),
    }
    order = ("learn",)
    await kinds["learn"]()
    for order in itertools.permutations(kinds):
        for name in order:
            await kinds[name]()


@pytest.mark.parametrize("lora", [None, LORA], ids=["whole weights", "adapters"])
async def test_a_checkpoint_of_two_ranks_restores_on_one_and_back(
    pair, client, make_config, make_settled, settled_digest, lora, tmp_path
):
    leader, follower, _ = pair
    config = make_config(**(SETTINGS | {"trainer": SETTINGS["trainer"] | {"lora": lora}}))
    await form(leader, follower, config)
    restored = await leader.restore("", 1)
    [reply] = await train(leader, make_settled, settled_digest, restored.version, 1)
    saved = await leader.save(reply.version.number)
    assert saved.durable
    straight = await train(leader, make_settled, settled_digest, reply.version, 1)

    alone = await client.open(config, checkpoint=saved.checkpoint.name, number=40)
    assert alone.version.digest == reply.version.digest
    exported = export_checkpoint(client.directory, lambda _: tmp_path / "exported").directory
    whole = Path((await client.export("whole")).path)
    assert (exported / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    again = await train(client, make_settled, settled_digest, alone.version, 1)
    for name in ("loss", "grad_norm"):
        assert again[0].figures[name] == pytest.approx(straight[0].figures[name], rel=1e-4)
    np.testing.assert_allclose(await weights(leader, 3), await weights(client, 41), atol=1e-5)
    single = await client.save(41)

    await asyncio.gather(leader.leave(1), follower.leave(1))
    await form(leader, follower, config, generation=2)
    back, _ = await asyncio.gather(
        leader.restore(single.checkpoint.name, 240), follower.restore(single.checkpoint.name, 240)
    )
    assert back.version.digest == again[0].version.digest


async def test_a_rank_whose_lease_lapsed_leaves_nobody_in_a_round(
    pair, make_config, make_settled, settled_digest
):
    leader, follower, process = pair
    await form(leader, follower, make_config(trainer={"ranks": 2}))
    version = (await leader.restore("", 1)).version
    groups = [make_settled(p, version=version) for p in range(2)]
    await leader.begin(0, 1, 1, 2)
    await leader.learn(0, 1, groups[:1])
    os.kill(process.pid, signal.SIGUSR1)
    await until_lease(follower, holds=False)
    for call in (
        leader.learn(0, 1, groups[1:]),
        leader.commit(0, 1, 1, 2, settled_digest(groups[:1])),
        leader.restore("", 7),
    ):
        with pytest.raises(grpc.aio.AioRpcError, match="rank 1") as caught:
            await asyncio.wait_for(call, 30)
        assert reason_of(caught.value) == "LEASE_QUIESCED"
    state = await leader.state()
    assert (state.phase, state.version.number, state.generation) == (pb.STEP_PHASE_ACCUMULATING, 1, 1)
    os.kill(process.pid, signal.SIGUSR2)
    await until_lease(follower, holds=True)
    await follower.suspend()
    with pytest.raises(grpc.aio.AioRpcError, match="rank 1") as caught:
        await asyncio.wait_for(leader.learn(0, 1, groups[1:]), 30)
    assert reason_of(caught.value) == "LEASE_QUIESCED"
    await follower.wake()
    await leader.learn(0, 1, groups[1:])
    reply = await leader.commit(0, 1, 1, 2, settled_digest(groups))
    assert reply.version.number == 2


async def test_a_lost_rank_is_told_and_a_new_trainer_group_goes_on(
    pair, spawn, make_config, make_settled, settled_digest, trainer_client, tmp_path
):
    leader, follower, process = pair
    config = make_config(**SETTINGS)
    await form(leader, follower, config)
    restored = await leader.restore("", 1)
    [reply] = await train(leader, make_settled, settled_digest, restored.version, 1)
    saved = await leader.save(reply.version.number)
    process.kill()
    process.wait()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await leader.begin(1, 1, 2, 3)
        await leader.learn(1, 1, [make_settled(5, version=reply.version)])
    assert reason_of(caught.value) == "TRAINER_GROUP_LOST"
    state = await leader.state()
    assert (state.phase, state.generation) == (pb.STEP_PHASE_UNSPECIFIED, 0)

    _, port_file = spawn("two")
    async with dial(await address_of(port_file), token=None) as channel:
        fresh = trainer_client(channel, tmp_path / "run", make_config)
        await form(leader, fresh, config, generation=2)
        back = await leader.restore(saved.checkpoint.name, 30)
        assert back.version.digest == reply.version.digest
        await train(leader, make_settled, settled_digest, back.version, 1)
