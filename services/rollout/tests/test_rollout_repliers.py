"""Instances that reply to another one's policy: real servers, real engines, and one of them is lost."""

from __future__ import annotations

import asyncio
import json

import pytest
from headrace.common.v1 import common_pb2
from headrace.rollout.v1 import rollout_pb2
from headrace_modelkit.presets.tiny import write_tiny
from rollout_calls import HEADER, refused

REPLY = {"before": " 0", "after": "=", "max_new_tokens": 5, "turns": 2}


@pytest.fixture(scope="module")
def frozen_directory(tmp_path_factory):
    """Another model with the same tokenizer."""
    directory = tmp_path_factory.mktemp("frozen") / "tiny"
    write_tiny(directory, seed=5)
    return directory


def config_of(path, reply=None, **more):
    model = {"path": str(path), "dtype": "float32", "max_context": 128}
    return json.dumps({"model": model, "rollout": {"max_concurrency": 16}, "reply": reply, "seed": 7, **more})


async def opened(rollout, config):
    await rollout.stub.OpenRun(rollout_pb2.OpenRunRequest(header=HEADER, config_json=config))
    return rollout


@pytest.fixture
def speaker(new_rollout, tiny_directory, publish, reference):
    """Opens a run whose replies are made here, or elsewhere, with version 3 installed."""

    third = publish(reference, 3)

    async def start(path, *, elsewhere, name="rollout-0"):
        reply = {**REPLY, "path": str(path) if path else ""}
        config = config_of(tiny_directory, reply, replies_elsewhere=elsewhere)
        rollout = await opened(await new_rollout(name), config)
        await rollout.install(third)
        return rollout

    return start


@pytest.fixture
def replier(new_rollout, frozen_directory):
    """Opens the frozen model at an instance, which reads its weights from the disk, and names it for a stream."""

    async def start(name):
        rollout = await opened(await new_rollout(name), config_of(frozen_directory))
        await rollout.stub.InstallPolicy(
            rollout_pb2.InstallPolicyRequest(
                header=HEADER,
                version=common_pb2.PolicyVersion(number=1),
                files=rollout_pb2.PolicyFiles(),
            )
        )
        named = rollout_pb2.Replier(address=rollout.instance.address, header=HEADER, policy_number=1)
        named.timeout.FromSeconds(60)
        return rollout, named

    return start


def parts(trajectories):
    return {
        key: [(segment.policy_number, list(segment.tokens.token_ids)) for segment in trajectory.segments]
        for key, trajectory in trajectories.items()
    }


async def answered(rollout, assignments, **options):
    call = rollout.generate(assignments, policy_number=3, max_new_tokens=6, **options)
    found = await (await call.start()).read_all()
    assert len(found) == 12 and not call.partials
    return parts(found), call


async def test_replies_of_other_instances_are_those_that_it_would_make_itself(
    speaker, replier, frozen_directory, assignments
):
    expected, told = await answered(await speaker(frozen_directory, elsewhere=False), assignments)
    assert not any(told.stages)
    apart = await speaker(frozen_directory, elsewhere=True, name="rollout-1")
    assert apart.engine._replier is None, "the second model is not loaded where nobody replies with it"
    (first, one), (second, two) = [await replier(name) for name in ("rollout-2", "rollout-3")]
    found, call = await answered(apart, assignments, repliers=[one, two])
    assert found == expected
    assert first.engine.figures.samples and second.engine.figures.samples, "both had turns"
    assert first.engine.figures.samples + second.engine.figures.samples == 12 * REPLY["turns"]
    assert not first.servicer._run.retention
    async with asyncio.timeout(30):  # Its streams end when it hears that they were.
        while first.servicer._run.streams:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    seconds = {stage: sum(each.get(stage, 0) for each in call.stages) for stage in ("answer", "reply")}
    assert all(seconds.values()), seconds


async def test_a_policy_that_replies_to_itself_elsewhere(speaker, new_rollout, tiny_directory, assignments):
    here = await speaker(None, elsewhere=False)
    expected, _ = await answered(here, assignments)
    apart = await speaker(None, elsewhere=True, name="rollout-1")
    other = await opened(await new_rollout("rollout-2"), config_of(tiny_directory))
    await other.install(apart.last)
    named = rollout_pb2.Replier(address=other.instance.address, header=HEADER, policy_number=3)
    found, _ = await answered(apart, assignments, repliers=[named])
    assert found == expected


@pytest.mark.parametrize("how", ["revoked", "drained"])
async def test_a_lost_replier_is_named_and_its_exchanges_begin_anew(
    speaker, replier, frozen_directory, assignments, how
):
    apart = await speaker(frozen_directory, elsewhere=True)
    (first, one), (_, two) = [await replier(name) for name in ("rollout-2", "rollout-3")]
    call = apart.generate(
        assignments, half_close=False, policy_number=3, max_new_tokens=30, repliers=[one, two]
    )
    await call.start()
    async with asyncio.timeout(30):
        while not first.servicer._run.streams:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    # One that drains sends its partial outputs, and its streams stay open.
    await (first.instance.on_revoke(1, 5.0) if how == "revoked" else first.instance.on_drain(5.0))
    found = await call.read_all()  # The stream ends in order, though its caller has not closed it.
    assert [lost.address for lost in call.lost] == [one.address] and call.lost[0].reason
    assert len(found) + len(call.partials) == 12 and call.partials
    assert all(not partial.state.token_ids for partial in call.partials)
    again, _ = await answered(apart, assignments, repliers=[two])
    assert len(again) == 12


async def test_without_any_replier_left_all_comes_back(speaker, replier, frozen_directory, assignments):
    apart = await speaker(frozen_directory, elsewhere=True)
    first, named = await replier("rollout-2")
    first.instance.fence.release(1)
    call = apart.generate(assignments, policy_number=3, max_new_tokens=6, repliers=[named])
    assert not await (await call.start()).read_all()
    assert len(call.partials) == 12
    assert [(lost.address, "lease" in lost.reason) for lost in call.lost] == [(named.address, True)]


async def test_an_exchange_ends_with_what_the_replier_has_room_for(
    speaker, replier, frozen_directory, assignments
):
    apart = await speaker(frozen_directory, elsewhere=True)
    _, named = await replier("rollout-2")
    named.max_context_tokens = 30
    call = apart.generate(assignments, policy_number=3, max_new_tokens=6, repliers=[named])
    found = await (await call.start()).read_all()
    whole = 2 + 3 * REPLY["turns"]  # prompt and answer; before, reply with after, answer
    cut = [each for each in found.values() if len(each.segments) < whole]
    assert cut and len(found) == 12 and not call.partials
    assert {each.finish_reason for each in cut} == {common_pb2.FINISH_REASON_LENGTH}


async def test_openings_that_do_not_fit_the_run_are_refused(speaker, replier, frozen_directory, assignments):
    here = await speaker(frozen_directory, elsewhere=False)
    apart = await speaker(frozen_directory, elsewhere=True, name="rollout-1")
    _, named = await replier("rollout-2")
    for rollout, repliers in (
        (here, [named]),
        (apart, []),
        (apart, [named, named]),
        (apart, [rollout_pb2.Replier()]),
    ):
        call = await rollout.generate(assignments, policy_number=3, repliers=repliers).start()
        await refused(call.read_all(), "INVALID", "repliers")
