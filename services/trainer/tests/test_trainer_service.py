"""The whole life of a run over real gRPC with one rank: restore, learn, commit, record, publish, save, resume."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import weakref
from pathlib import Path

import grpc
import numpy as np
import pytest
from headrace.common.v1 import common_pb2
from headrace.trainer.v1 import trainer_pb2 as pb
from headrace_servicekit import failpoints
from headrace_servicekit.rpc.errors import message_of, reason_of
from headrace_trainer.backends.fsdp.backend import FsdpBackend
from trainer_calls import refused

pytestmark = pytest.mark.timeout(90)


async def test_a_step_from_restore_to_publish(client, make_settled, settled_digest):
    restored = await client.open()
    assert (restored.version.number, restored.version.parent, restored.version.ordinal) == (1, 0, 0)
    assert restored.version.digest and restored.warmup_steps == 0
    first = await client.publish(1)
    assert first.manifest.digest == restored.version.digest

    groups = [make_settled(prompt, version=restored.version) for prompt in range(3)]
    groups[2] = make_settled(2, version=restored.version, rewards=[1.0] * 4)
    await client.begin(0, 1, 1, 2)
    responses = await client.learn(0, 1, groups)
    outcomes = [outcome for response in responses for outcome in response.outcomes]
    assert {o.prompt_ordinal for o in outcomes if o.disposition == pb.GROUP_DISPOSITION_ACCUMULATED} == {
        0,
        1,
        2,
    }
    assert outcomes[0].digest == settled_digest([groups[outcomes[0].prompt_ordinal]])

    state = await client.state()
    assert state.phase == pb.STEP_PHASE_ACCUMULATING and list(state.accumulated_prompts) == [0, 1, 2]
    reply = await client.commit(0, 1, 1, 2, settled_digest(groups))
    tokens = sum(
        len(m.trajectory.branches[0].segments[1].tokens.token_ids) for g in groups for m in g.members
    )
    assert reply.result == pb.COMMIT_RESULT_COMMITTED
    assert (reply.group_count, reply.sequence_count, reply.token_count) == (3, 12, tokens)
    assert dict(reply.tokens_by_version) == {1: tokens} and reply.max_staleness == 0
    assert (reply.version.number, reply.version.parent, reply.version.ordinal) == (2, 1, 1)
    assert reply.figures["groups_all_equal"] == 1 and reply.figures["grad_norm"] > 0
    assert reply.figures["learning_rate"] == pytest.approx(1e-3)
    assert 0 < reply.figures["log_prob_mismatch_mean"] <= reply.figures["log_prob_mismatch_max"]
    assert 0 < reply.figures["entropy"] <= np.log(32) + 1e-3
    assert await refused(client.publish(2)) == "NOT_RECORDED"
    assert await refused(client.begin(1, 1, 2, 3)) == "NOT_RECORDED"

    committed = await client.state()
    assert committed.phase == pb.STEP_PHASE_COMMITTED and committed.commit == reply
    assert not (await client.record(0, 1, 2)).HasField("published")
    second = await client.publish(2)
    # Asked to publish as well, the record's reply is the publication's.
    recorded = (await client.record(0, 1, 2, publish=True)).published
    recorded.publish_time.CopyFrom(second.publish_time)
    assert recorded == second
    assert second.version == reply.version and second.manifest.digest == reply.version.digest
    assert second.manifest.digest != first.manifest.digest
    assert await client.body(2) == await asyncio.to_thread(Path(second.source.shm_path).read_bytes)


async def test_retries_get_the_same_reply_and_other_bodies_are_conflicts(
    client, make_settled, settled_digest
):
    version = (await client.open()).version
    assert (await client.open()).version == version
    groups = [make_settled(prompt, version=version) for prompt in range(2)]
    await client.begin(0, 1, 1, 2)
    await client.begin(0, 1, 1, 2)
    assert await refused(client.begin(0, 1, 1, 5)) == "CONFLICT"
    once = await client.learn(0, 1, groups)
    again = await client.learn(0, 1, groups)
    assert [r.outcomes for r in again] == [r.outcomes for r in once]
    assert await refused(client.learn(0, 1, [make_settled(0, version=version, attempt=2)])) == "CONFLICT"
    digest = settled_digest(groups)
    reply = await client.commit(0, 1, 1, 2, digest)
    assert reply.token_count > 0
    assert await client.commit(0, 1, 1, 2, digest) == reply
    assert await refused(client.commit(0, 1, 1, 2, digest, manifest=b"other")) == "CONFLICT"
    await client.record(0, 1, 2)
    await client.record(0, 1, 2)
    assert await client.commit(0, 1, 1, 2, digest) == reply
    assert (await client.publish(2)) is not None
    assert (await client.publish(2)).version == reply.version
    assert await refused(client.learn(0, 1, groups)) == "NOT_OPEN"


async def test_a_set_mismatch_aborts_the_attempt_and_leaves_the_weights(
    client, make_config, make_settled, settled_digest
):
    config = make_config(deterministic=True)  # so that weights do not hang on what arrives together
    version = (await client.open(config)).version
    groups = [make_settled(prompt, version=version) for prompt in range(2)]
    await client.begin(0, 1, 1, 2)
    await client.learn(0, 1, groups)
    reply = await client.commit(0, 1, 1, 2, settled_digest(groups[:1]))
    assert reply.result == pb.COMMIT_RESULT_SET_MISMATCH and not reply.HasField("version")
    assert (await client.state()).phase == pb.STEP_PHASE_IDLE
    await client.begin(0, 2, 1, 3)
    await client.learn(0, 2, groups[:1])
    await client.abort(0, 2)
    await client.begin(0, 3, 1, 4)
    await client.learn(0, 3, groups)
    aborted = await client.commit(0, 3, 1, 4, settled_digest(groups))

    other = await client.reopen_with(config)
    await client.begin(0, 1, other.number, 20)
    fresh = [make_settled(prompt, version=other) for prompt in range(2)]
    await client.learn(0, 1, fresh)
    clean = await client.commit(0, 1, other.number, 20, settled_digest(fresh))
    assert clean.version.digest == aborted.version.digest


async def test_the_replay_of_a_non_finite_gradient_quarantines_its_culprits(
    client, make_config, make_settled, settled_digest
):
    """Finite losses whose gradients overflow: only the gradient shows it, and only group by group shows whose."""
    config = make_config(algorithm={"options": {"normalize_std": False}})
    version = (await client.open(config)).version
    healthy = [make_settled(prompt, version=version) for prompt in (0, 2)]
    culprits = [make_settled(prompt, version=version, rewards=[1e25, 0, 0, 0]) for prompt in (1, 3)]
    groups = sorted([*healthy, *culprits], key=lambda group: group.prompt_ordinal)
    await client.begin(0, 1, 1, 2)
    await client.learn(0, 1, groups)
    reply = await client.commit(0, 1, 1, 2, settled_digest(groups))
    assert reply.result == pb.COMMIT_RESULT_NONFINITE and not reply.HasField("version")

    await client.begin(0, 2, 1, 3)
    responses = await client.learn(0, 2, groups)
    outcomes = {o.prompt_ordinal: o for response in responses for o in response.outcomes}
    kept = {prompt for prompt, o in outcomes.items() if o.disposition == pb.GROUP_DISPOSITION_ACCUMULATED}
    assert kept == {0, 2} and "gradient" in outcomes[1].detail
    reply = await client.commit(0, 2, 1, 3, settled_digest(healthy))
    assert reply.result == pb.COMMIT_RESULT_NONFINITE, "what was accumulated before a culprit went with it"

    await client.begin(0, 3, 1, 4)
    await client.learn(0, 3, healthy)
    reply = await client.commit(0, 3, 1, 4, settled_digest(healthy))
    assert reply.result == pb.COMMIT_RESULT_COMMITTED and reply.group_count == 2
    assert np.isfinite(reply.figures["grad_norm"])


async def test_stale_damaged_and_foreign_groups_are_refused(client, make_settled):
    version = (await client.open()).version
    await client.begin(0, 1, 1, 2)
    stale = make_settled(0, version=version)
    for member in stale.members:
        member.trajectory.branches[0].segments[1].policy_number = 7
    assert await refused(client.learn(0, 1, [stale])) == "DIGEST_MISMATCH"
    foreign = make_settled(0, version=type(version)(number=7))
    [response] = await client.learn(0, 1, [foreign])
    assert response.outcomes[0].disposition == pb.GROUP_DISPOSITION_STALE
    broken = make_settled(1, version=version, rewards=[float("nan")] * 4)
    [response] = await client.learn(0, 1, [broken])
    assert response.outcomes[0].disposition == pb.GROUP_DISPOSITION_NONFINITE
    assert list((await client.state()).accumulated_prompts) == []


async def test_a_stale_lease_or_coordinator_changes_nothing(client, make_settled):
    version = (await client.open()).version
    await client.begin(0, 1, 1, 2)
    lease = client.lease
    client.lease = lease + 1
    assert await refused(client.learn(0, 1, [make_settled(0, version=version)])) == "EPOCH_STALE"
    assert await refused(client.commit(0, 1, 1, 2, "")) == "EPOCH_STALE"
    client.lease, client.epoch = lease, 0
    assert await refused(client.begin(0, 2, 1, 2)) == "EPOCH_STALE"
    client.epoch = 1
    assert list((await client.state()).accumulated_prompts) == []


async def test_bad_configs_name_the_key(client, make_config):
    bad = make_config(optimizer={"lrr": 1.0})
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await client.open_run(bad)
    assert "optimizer.lrr" in message_of(caught.value) and "'lr'" in message_of(caught.value)
    assert await refused(client.open_run(make_config(algorithm={"name": "grop"}))) == "INVALID"
    assert await refused(client.open_run(make_config(trainer={"backend": "fdsp"}))) == "INVALID"
    missing = make_config(model={"path": "/nowhere/model"})
    assert await refused(client.open_run(missing)) == "MODEL_NOT_READABLE"


async def test_order_of_calls_is_told(client, make_config):
    assert await refused(client.begin(0, 1, 1, 2)) == "NOT_OPEN"
    await client.open_run(make_config())
    assert await refused(client.restore("", 1)) == "NOT_OPEN"
    assert await refused(client.open_run(make_config(seed=9))) == "CONFLICT"
    assert await refused(client.open_run(make_config(), run="runs/other")) == "BUSY"


async def test_warm_up_learns_and_is_reported(client, make_config):
    examples = [{"text": f"copy {n}: ", "answer": str(n)} for n in range(100, 140)]
    config = make_config(trainer={"warmup": {"steps": 30, "lr": 5e-3, "batch": 16}}, warmup_examples=examples)
    restored = await client.open(config)
    assert restored.warmup_steps == 30
    trajectory = pb.InferRequest().trajectories.add()
    from headrace_modelkit.tokenizer import load_tokenizer
    from headrace_schema.sections.generating import ModelSection

    codec = load_tokenizer(ModelSection(path=config["model"]["path"], dtype="float32"))
    branch = trajectory.branches.add()
    branch.segments.add().tokens.token_ids.extend(codec.encode_prompt(text="copy 123: "))
    answer = branch.segments.add(policy_number=1)
    answer.tokens.token_ids.extend(codec.encode_answer("1"))
    [found] = (await client.infer([trajectory])).sequences
    assert len(found.values) == 2 and found.values[0] > np.log(0.5)


async def test_suspend_keeps_open_accumulators(client, make_settled, settled_digest):
    version = (await client.open()).version
    groups = [make_settled(prompt, version=version) for prompt in range(2)]
    digests = []
    for attempt, suspends in ((1, False), (2, True)):
        if suspends:
            version = (await client.reopen()).version
            groups = [make_settled(prompt, version=version) for prompt in range(2)]
        await client.begin(0, attempt, version.number, version.number + 1)
        await client.learn(0, attempt, groups[:1])
        if suspends:
            suspended = await client.suspend()
            assert suspended.free_memory_bytes > 0
            assert await refused(client.learn(0, attempt, groups[1:])) == "SUSPENDED"
            await client.wake()
        await client.learn(0, attempt, groups[1:])
        reply = await client.commit(0, attempt, version.number, version.number + 1, settled_digest(groups))
        digests.append(reply.version.digest)
    assert digests[0] == digests[1]


@pytest.mark.parametrize("place", ["before_optimizer", "after_optimizer"])
async def test_a_failure_inside_the_commit_needs_a_restore(client, make_settled, settled_digest, place):
    version = (await client.open()).version
    groups = [make_settled(prompt, version=version) for prompt in range(2)]
    await client.begin(0, 1, 1, 2)
    await client.learn(0, 1, groups)
    failpoints.arm(f"trainer.commit.{place}=error@1")
    try:
        assert await refused(client.commit(0, 1, 1, 2, settled_digest(groups))) == "FAILPOINT"
    finally:
        failpoints.arm("")
    assert (await client.state()).phase == pb.STEP_PHASE_UNSPECIFIED
    assert await refused(client.commit(0, 1, 1, 2, settled_digest(groups))) == "NOT_OPEN"
    assert await refused(client.restore("", 2)) == "INVALID"
    again = (await client.restore("", 3)).version
    assert again.digest == version.digest
    groups = [make_settled(prompt, version=again) for prompt in range(2)]
    await client.begin(0, 2, 3, 4)
    await client.learn(0, 2, groups)
    assert (await client.commit(0, 2, 3, 4, settled_digest(groups))).result == pb.COMMIT_RESULT_COMMITTED


async def test_a_revoke_suspends_and_the_next_grant_wakes(client, make_settled):
    version = (await client.open()).version
    await client.begin(0, 1, 1, 2)
    memory = await client.instance.on_revoke(11, 5.0)
    assert memory.free_bytes > 0 and memory.used_bytes > 0
    assert await refused(client.learn(0, 1, [make_settled(0, version=version)])) == "SUSPENDED"
    await client.instance.on_grant(common_pb2.Lease(epoch=11))
    assert await client.learn(0, 1, [make_settled(0, version=version)])
    await client.suspend()
    await client.instance.on_revoke(11, 5.0)
    await client.instance.on_grant(common_pb2.Lease(epoch=11))
    assert await refused(client.learn(0, 1, [make_settled(1, version=version)])) == "SUSPENDED"


async def test_a_revoke_that_keeps_memory_computes_nothing_and_gives_nothing_back(
    client, make_settled, monkeypatch
):
    given_back = []
    suspend = FsdpBackend.suspend
    monkeypatch.setattr(FsdpBackend, "suspend", lambda self: given_back.append(self) or suspend(self))
    version = (await client.open()).version
    await client.begin(0, 1, 1, 2)
    await client.instance.on_revoke(11, 5.0, True)
    assert await refused(client.learn(0, 1, [make_settled(0, version=version)])) == "SUSPENDED"
    assert not given_back
    await client.instance.on_grant(common_pb2.Lease(epoch=11))
    assert await client.learn(0, 1, [make_settled(0, version=version)])
    await client.instance.on_revoke(11, 5.0, True)
    await client.suspend()
    assert len(given_back) == 1, "what was kept can be released without a lease"


async def test_values_of_a_run_without_a_critic_are_refused(client, make_settled):
    version = (await client.open()).version
    trajectory = make_settled(0, version=version).members[0].trajectory
    with pytest.raises(grpc.aio.AioRpcError, match="the run has no critic") as caught:
        await client.infer([trajectory], pb.INFER_KIND_VALUES)
    assert reason_of(caught.value) == "INVALID"


def test_capabilities_and_help_need_no_torch():
    code = (
        "import sys; from headrace_trainer import __main__; "
        "from headrace_trainer.algorithms import ALGORITHMS; assert 'grpo' in ALGORITHMS.names();"
        "from headrace_trainer.backends import BACKENDS; assert 'fsdp' in BACKENDS.installed();"
        "assert len(ALGORITHMS.capabilities(exit)) == len(ALGORITHMS.names()) and BACKENDS.capabilities(print);"
        "assert 'torch' not in sys.modules, 'torch was imported'"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


async def test_close_ends_an_idle_learn_stream_and_waits_for_a_commit(client, make_settled, settled_digest):
    version = (await client.open()).version
    groups = [make_settled(prompt, version=version) for prompt in range(2)]
    await client.begin(0, 1, 1, 2)
    stream = client.stub.Learn()
    await stream.write(pb.LearnRequest(header=client.header(), step=0, attempt=1, groups=groups))
    assert len((await stream.read()).outcomes) == 2
    failpoints.arm("trainer.commit.after_optimizer=delay:1.0@1")
    try:
        committing = asyncio.ensure_future(client.commit(0, 1, 1, 2, settled_digest(groups)))
        while not client.instance.on_grant.__self__._committing:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await client.close_run()
        reply = await asyncio.wait_for(committing, 20)
    finally:
        failpoints.arm("")
    assert reply.result == pb.COMMIT_RESULT_COMMITTED and reply.version.number == 2
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stream.read()
    assert (caught.value.code(), reason_of(caught.value)) == (grpc.StatusCode.ABORTED, "RUN_CLOSED")
    assert (await client.state()).phase == pb.STEP_PHASE_UNSPECIFIED
    await client.open(number=5)


async def test_close_waits_for_the_checkpoint_that_is_being_written(client):
    version = await client.train((await client.open()).version, 1)
    failpoints.arm("trainer.checkpoint.before_rename=delay:1.0@1")
    try:
        assert not (await client.save(version.number, wait=False)).durable
        await client.close_run()
        assert [path.name for path in client.directory.glob("checkpoints/*/step-*")] == ["step-1"]
    finally:
        failpoints.arm("")


async def test_a_run_closed_while_suspended_leaves_the_next_one_awake(client):
    await client.open()
    await client.stub.Suspend(pb.SuspendRequest(header=client.header()))
    session = weakref.ref(client.instance.on_grant.__self__._trainer._session)
    await client.close_run()
    assert session() is None, "model and optimizer are gone with the session"
    assert (await client.open(number=5)).version.number == 5


async def test_a_batch_of_the_queue_has_two_micro_batches_for_each_rank(client, make_config, monkeypatch):
    await client.open(make_config())
    servicer = client.instance._services[0][1]
    assert servicer._new_queue(100)._batch_tokens() == 200
    monkeypatch.setattr(servicer._trainer._ranks, "world_size", 3)
    assert servicer._new_queue(100)._batch_tokens() == 600


async def test_a_supervised_example_beyond_the_model_s_positions_is_refused(client, make_config):
    examples = [{"text": "copy 10: ", "answer": "10"}, {"text": "1" * 600, "answer": "1"}]
    warmup = {"warmup": {"steps": 2, "lr": 5e-3, "batch": 2}}
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await client.open(make_config(trainer=warmup, warmup_examples=examples))
    assert reason_of(caught.value) == "INVALID"
    assert "example 2 of 2 has" in message_of(caught.value) and "512 positions" in message_of(caught.value)
