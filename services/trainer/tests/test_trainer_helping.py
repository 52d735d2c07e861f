"""A helper's contribution: the same gradient as on the owners alone, added whole or not at all."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from pathlib import Path

import grpc
import pytest
import torch
from google.protobuf.message import Message
from headrace.common.v1 import common_pb2
from headrace.trainer.v1 import trainer_pb2 as pb
from headrace_schema.openings import TrainerConfig
from headrace_servicekit.rpc.digests import set_digest
from headrace_servicekit.rpc.errors import reason_of
from headrace_servicekit.weights.store import WeightStore
from headrace_trainer.backends._base import PrivateGradient
from headrace_trainer.checkpoints.reader import StateReader
from headrace_trainer.errors import Refusal
from headrace_trainer.learning import step as steps
from headrace_trainer.learning.samples import LearnItem
from headrace_trainer.ranks.rank import Rank
from headrace_trainer.ranks.rounds import Rounds
from headrace_trainer.session.session import Session
from headrace_trainer.versions.publishing import published_tensors
from headrace_trainer.wire.outputs import contribution_message, read_contribution

pytestmark = pytest.mark.timeout(90)
BEGUN = steps.Begin(0, 1, 1, 2)
PROMPTS = (0, 1, 2, 3)


@pytest.fixture
def make_session(trainer_group, make_config, tmp_path):
    """A leader's session on a trainer group of one, with a weight store of its own."""

    def make(name: str, **sections) -> Session:
        config = TrainerConfig.model_validate(make_config(**sections))
        rank = Rank(config, trainer_group)
        rounds = Rounds(rank, holds_lease=lambda: True)
        return Session("runs/test", tmp_path / name, rounds, WeightStore(tmp_path / "shm", name))

    return make


def published(owner: Session, number: int) -> dict[str, torch.Tensor]:
    """Publishes a version; its tensors, as a helper reads them."""
    manifest = owner.publish(number).manifest
    return published_tensors(manifest, owner._store.get(owner._run, number).body)


@pytest.fixture
def pair(make_session):
    """An owner that has begun step 0 on version 1, and a helper that holds that version."""

    def make(**sections) -> tuple[Session, Session]:
        owner, helper = make_session("owner", **sections), make_session("helper", **sections)
        owner.restore("", 1, "store")
        tensors = published(owner, 1)
        owner.begin(BEGUN)
        helper.help(owner.state.version, StateReader.of_version(tensors))
        helper.begin(BEGUN)
        return owner, helper

    return make


def learn(session: Session, groups) -> None:
    [outcome] = session.learn([LearnItem(0, 1, list(groups))])
    assert not isinstance(outcome, Refusal), outcome


def offered(helper: Session):
    """A contribution as it arrives: through its message, and its gradient out of the published body."""
    offer = helper.contribute(0, 1)
    message = contribution_message(offer, common_pb2.WeightSource())
    message = pb.Contribution.FromString(message.SerializeToString())
    tensors = published_tensors(offer.gradient.manifest, offer.gradient.body)
    gradient = PrivateGradient(tensors, dict(message.token_sums), dict(message.token_maxima))
    return read_contribution(message, "helper-0"), gradient


def commit(session: Session) -> steps.CommitReply:
    records = session.state.accumulated
    keys = [key for record in records for key in record.keys]
    return session.commit(steps.Commit(0, 1, 1, 2, set_digest(keys), "manifest"), b"")


@pytest.mark.parametrize("taken", [(1,), (0, 2), PROMPTS])
@pytest.mark.parametrize(("reshard", "beside"), [(True, False), (False, False), (True, True)])
def test_the_gradient_is_that_of_the_owners_alone(
    pair, make_session, make_group, relative_l2, taken, reshard, beside
):
    """`beside`: the owners learn while the helper does, on devices of their own, and add its gradient last."""
    sections = {"trainer": {"backend_options": {"shard": "weights" if reshard else "state"}}}
    owner, helper = pair(**sections)
    alone = make_session("alone", **sections)
    alone.restore("", 1, "store")
    alone.begin(BEGUN)
    groups = {prompt: make_group(prompt) for prompt in PROMPTS}
    learn(alone, groups.values())
    expected = alone.rounds.rank.backend.reduced_gradient(10.0)

    rest = [group for prompt, group in groups.items() if prompt not in taken]
    if rest and beside:
        learn(owner, rest)
    learn(helper, [groups[prompt] for prompt in taken])
    owner.add(*offered(helper))
    if rest and not beside:
        learn(owner, rest)
    assert {r.prompt_ordinal for r in owner.state.accumulated if r.helper} == set(taken)
    found = owner.rounds.rank.backend.reduced_gradient(10.0)
    assert found.keys() == expected.keys()
    assert relative_l2(found, expected) <= 1e-5


def test_a_helped_step_commits_with_the_figures_of_the_whole(pair, make_session, make_group):
    owner, helper = pair()
    alone = make_session("alone")
    alone.restore("", 1, "store")
    alone.begin(BEGUN)
    learn(alone, map(make_group, PROMPTS))
    learn(helper, map(make_group, PROMPTS[:2]))
    owner.add(*offered(helper))
    learn(owner, map(make_group, PROMPTS[2:]))
    expected, found = commit(alone), commit(owner)
    assert (found.result, found.groups, found.sequences, found.tokens) == (
        steps.Result.COMMITTED,
        4,
        16,
        expected.tokens,
    )
    assert found.tokens_by_version == {1: expected.tokens}
    timed = {"learn_seconds"}
    assert found.figures.keys() == expected.figures.keys()
    for name in found.figures.keys() - timed:
        assert found.figures[name] == pytest.approx(expected.figures[name], rel=1e-4), name


def test_a_contribution_is_added_once(pair, make_group, relative_l2):
    owner, helper = pair()
    learn(helper, map(make_group, PROMPTS))
    what, gradient = offered(helper)
    assert (
        helper.contribute(0, 1).gradient.manifest.digest == helper.contribute(0, 1).gradient.manifest.digest
    )
    expected = {name: tensor.clone() for name, tensor in gradient.tensors.items()}
    owner.add(what, gradient)
    owner.add(what, gradient)
    assert relative_l2(owner.rounds.rank.backend.reduced_gradient(1.0), expected) == 0


def refusal(act) -> str:
    with pytest.raises(Refusal) as caught:
        act()
    return caught.value.reason


def test_what_does_not_fit_the_open_step_adds_nothing(pair, make_group):
    owner, helper = pair()
    learn(helper, map(make_group, PROMPTS))
    what, gradient = offered(helper)
    learn(owner, [make_group(0)])
    assert refusal(lambda: owner.add(what, gradient)) == "CONFLICT", (
        "prompt 0 is learned: it would count twice"
    )
    owner.abort(0, 1)
    assert refusal(lambda: owner.add(what, gradient)) == "NOT_OPEN"
    owner.begin(steps.Begin(0, 2, 1, 3))
    assert refusal(lambda: owner.add(what, gradient)) == "NOT_OPEN", "of an earlier attempt"

    later = replace(what, attempt=2)
    other = replace(later, base=replace(what.base, digest="other"))
    assert refusal(lambda: owner.add(other, gradient)) == "POLICY_MISMATCH"
    spoilt = {name: torch.full_like(tensor, math.nan) for name, tensor in gradient.tensors.items()}
    assert refusal(lambda: owner.add(later, PrivateGradient(spoilt))) == "NONFINITE"
    fewer = dict(list(gradient.tensors.items())[1:])
    assert refusal(lambda: owner.add(later, PrivateGradient(fewer))) == "INVALID"
    assert not owner.state.accumulated
    assert all(not grad.any() for grad in owner.rounds.rank.backend.reduced_gradient(1.0).values())


def test_a_helper_leads_nothing_and_follows_newer_versions_only(pair, make_group, make_session):
    owner, helper = pair()
    assert refusal(lambda: helper.save(1, b"")) == "NOT_LEADER"
    learn(helper, [make_group(0)])
    assert refusal(lambda: commit(helper)) == "NOT_LEADER"
    assert refusal(lambda: owner.help(owner.state.version, StateReader.of_version({}))) == "CONFLICT"
    assert refusal(lambda: owner.contribute(0, 1)) in ("NOT_OPEN", "EMPTY_STEP")
    learn(owner, map(make_group, PROMPTS))
    reply = commit(owner)
    owner.record(0, 1, 2)
    tensors = published(owner, 2)
    reader = StateReader.of_version(tensors)
    first = steps.Version(1, 0, 0, "x")
    helper.help(reply.version, reader)
    assert helper.state.version == reply.version and helper.state.phase is steps.Phase.IDLE
    assert refusal(lambda: helper.help(first, reader)) == "INVALID"
    # What it computes now is computed under the new version.
    named = dict(helper.rounds.rank.backend.weights())
    assert all(torch.equal(named[name], tensor.float()) for name, tensor in tensors.items())
    wrong = StateReader.of_version({**tensors, "more": torch.zeros(1)})
    later = steps.Version(9, 2, 2, "y")
    assert refusal(lambda: make_session("third").help(later, wrong)) == "WEIGHTS_MISMATCH"


async def refused(call) -> str:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return str(reason_of(caught.value))


async def test_over_the_wire_one_process_helps_and_then_owns(
    client, make_settled, settled_digest, tmp_path: Path
):
    """The same process in both roles, one after the other: a process is in one group at a time."""
    base = (await client.open()).version
    published = await client.publish(1)
    host = WeightStore(tmp_path / "host", "host")
    keep(host, client.run, base, published.manifest, await client.body(1))
    groups = [make_settled(prompt, version=base) for prompt in range(3)]
    await client.begin(0, 1, 1, 2)
    await client.learn(0, 1, groups)
    expected = await client.commit(0, 1, 1, 2, settled_digest(groups))
    await client.close_run()

    call = partial(call_with_header, client)
    await client.open_run(client._make_config())
    await client.join(5)
    sources = [host.source(client.run, 1)]
    help_ = pb.HelpRequest(version=base, manifest=published.manifest, sources=sources)
    await call("Help", help_)
    await call("Help", help_)
    await client.begin(0, 1, 1, 2)
    take = pb.TakeContributionRequest(step=0, attempt=1)
    assert await refused(call("TakeContribution", take)) == "EMPTY_STEP"
    await client.learn(0, 1, groups[:2])
    taken = (await call("TakeContribution", take)).contribution
    assert (await call("TakeContribution", take)).contribution == taken
    body = client.instance.weights.get(taken.name, 2).body.tobytes()
    assert await refused(client.commit(0, 1, 1, 2, settled_digest(groups[:2]))) == "NOT_LEADER"
    await client.close_run()
    assert client.instance.weights.find(taken.name, 2) is None

    await client.open_run(client._make_config())
    await client.join(6)
    assert (await client.restore("", 1)).version == base
    await client.begin(0, 1, 1, 2)
    number = common_pb2.PolicyVersion(number=2, digest=taken.gradient.digest)
    add = pb.AddContributionRequest(step=0, attempt=1, contribution=taken, helper="helper-0")
    assert await refused(call("AddContribution", add)) == "WEIGHTS_UNAVAILABLE", "the helper is gone"
    keep(host, taken.name, number, taken.gradient, body)
    taken.source.CopyFrom(host.source(taken.name, 2))
    add.contribution.source.CopyFrom(taken.source)
    lying = pb.AddContributionRequest.FromString(add.SerializeToString())
    lying.contribution.groups[0].token_count += 1
    assert await refused(call("AddContribution", lying)) == "INVALID"
    await call("AddContribution", add)
    await call("AddContribution", add)
    assert list((await client.state()).accumulated_prompts) == [0, 1]
    await client.learn(0, 1, groups[2:])
    reply = await client.commit(0, 1, 1, 2, settled_digest(groups))
    assert reply.result == pb.COMMIT_RESULT_COMMITTED
    assert (reply.token_count, reply.sequence_count) == (expected.token_count, expected.sequence_count)
    assert reply.figures["grad_norm"] == pytest.approx(expected.figures["grad_norm"], rel=1e-5)
    assert client.instance.weights.find(taken.name, 2) is None
    host.close()


async def call_with_header(client, name: str, request: Message) -> Message:
    request.header.CopyFrom(client.header())
    return await getattr(client.stub, name)(request)


def keep(store: WeightStore, run: str, version, manifest, body: bytes) -> None:
    """Holds a published body, as another process of the host would."""
    layout = [(entry.name, entry.data_type, tuple(entry.shape)) for entry in manifest.entries]
    pending = store.begin(run, version.number, layout)
    with pending.whole() as whole:
        whole[:] = body
    pending.publish(version, manifest)
