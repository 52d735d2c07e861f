"""The natural key of each RPC, with real services: a repetition changes nothing, and the same key with another
request is an error."""

from __future__ import annotations

import itertools
import json

import grpc
import numpy as np
import pytest
from harness.services.alone import CALL_S, Service, channel_to, refused
from harness.services.by_hand import Engine, Learner, digest_of, header, with_other_tokens
from harness.services.fake_fleet import RUN, FakeFleet
from headrace.common.v1 import common_pb2
from headrace.reward.v1 import reward_pb2, reward_pb2_grpc
from headrace.rollout.v1 import rollout_pb2
from headrace.simulator.v1 import simulator_pb2, simulator_pb2_grpc
from headrace.trainer.v1 import trainer_pb2
from headrace_servicekit.rpc.tensors import encode_tensor

LEARN, GENERATE = 11, 12
ACCUMULATED = trainer_pb2.GROUP_DISPOSITION_ACCUMULATED


@pytest.fixture(scope="module")
def fake_fleet():
    with FakeFleet() as fleet:
        yield fleet


@pytest.fixture(scope="module")
def pair(fake_fleet, tiny_model, tmp_path_factory):
    """A learner and an engine with leases, an open run, and the initial model installed as version 1."""
    folder = tmp_path_factory.mktemp("by-hand")
    flags = ("--coordinator", fake_fleet.address, "--devices", "cpu:0")
    made = [Service(kind, folder / kind, "--name", f"{kind}-0", *flags) for kind in ("trainer", "rollout")]
    with made[0] as trainer, made[1] as rollout:
        with channel_to(trainer.address) as to_trainer, channel_to(rollout.address) as to_rollout:
            fake_fleet.grant("trainer-0", LEARN)
            fake_fleet.grant("rollout-0", GENERATE)
            learner, engine = Learner(to_trainer, LEARN, folder / "run"), Engine(to_rollout, GENERATE)
            learner.open(tiny_model)
            learner.join(2)
            learner.restore(1)
            engine.open(tiny_model)
            engine.wake(rollout_pb2.WAKE_SCOPE_WEIGHTS)
            engine.install(learner.publish())
            engine.wake(rollout_pb2.WAKE_SCOPE_KV_CACHE)
            engine.stub.Resume(rollout_pb2.ResumeRequest(header=header()), timeout=CALL_S)
            yield learner, engine


@pytest.fixture
def step(pair):
    """A step attempt's groups, made by the version held; the attempt is dropped when the test ends."""
    learner, engine = pair
    yield learner.settle(engine.generate(learner.version.number, [0, 1]))
    state = learner.state()
    if state.phase == trainer_pb2.STEP_PHASE_ACCUMULATING:
        abort = trainer_pb2.AbortStepRequest(header=header(), step=state.step, attempt=state.attempt)
        learner.stub.AbortStep(abort, timeout=CALL_S)


_attempts = itertools.count(1)


@pytest.fixture
def attempt():
    """A number for a step attempt that nobody has used."""
    return next(_attempts)


def test_begin_step(pair, step, attempt):
    learner, _ = pair
    number = learner.begin(attempt)
    assert learner.learn(step[:1], attempt)[0].disposition == ACCUMULATED
    assert learner.begin(attempt) == number
    assert list(learner.state().accumulated_prompts) == [0], "a repetition empties nothing"
    with refused(grpc.StatusCode.ALREADY_EXISTS, "CONFLICT"):
        learner.begin(attempt, next_number=number + 1)
    with refused(grpc.StatusCode.FAILED_PRECONDITION, "POLICY_MISMATCH"):
        learner.begin(attempt + 1, base_number=number)


def test_learn_item(pair, step, attempt):
    learner, _ = pair
    learner.begin(attempt)
    first = learner.learn(step, attempt)
    assert [outcome.disposition for outcome in first] == [ACCUMULATED] * 2
    again = learner.learn([*step, step[0]], attempt)
    assert {o.prompt_ordinal: o.digest for o in again} == {o.prompt_ordinal: o.digest for o in first}
    with refused(grpc.StatusCode.ALREADY_EXISTS, "CONFLICT"):
        learner.learn([with_other_tokens(step[0])], attempt)
    committed = learner.commit(step, learner.highest + 1, attempt)
    assert (committed.group_count, committed.sequence_count) == (2, 8), "each group counts once"
    learner.record(committed, attempt)


def test_commit_step(pair, attempt):
    learner, engine = pair
    engine.install(learner.publish())
    base = learner.version.number
    groups = learner.settle(engine.generate(base, [2, 3]))
    number = learner.begin(attempt)
    learner.learn(groups, attempt)
    committed = learner.commit(groups, number, attempt)
    assert committed.result == trainer_pb2.COMMIT_RESULT_COMMITTED
    assert (committed.version.number, committed.version.parent) == (number, base)
    assert learner.commit(groups, number, attempt) == committed
    with refused(grpc.StatusCode.ALREADY_EXISTS, "CONFLICT"):
        learner.commit(groups, number, attempt, step_manifest=b"another")
    with refused(grpc.StatusCode.FAILED_PRECONDITION, "NOT_RECORDED"):
        learner.stub.PublishPolicy(
            trainer_pb2.PublishPolicyRequest(header=header(), number=number), timeout=CALL_S
        )
    learner.record(committed, attempt)
    assert learner.state().version == committed.version
    assert dict(committed.tokens_by_version) == {base: committed.token_count}


def test_a_commit_of_another_set_is_no_commit(pair, attempt):
    learner, engine = pair
    engine.install(learner.publish())
    groups = learner.settle(engine.generate(learner.version.number, [4, 5]))
    number = learner.begin(attempt)
    learner.learn(groups, attempt)
    refusal = learner.commit(groups, number, attempt, set_digest=digest_of(groups[:1]))
    assert refusal.result == trainer_pb2.COMMIT_RESULT_SET_MISMATCH
    state = learner.state()
    assert (state.phase, state.version) == (trainer_pb2.STEP_PHASE_IDLE, learner.version)


def test_install_policy(pair):
    learner, engine = pair
    published = learner.publish()
    engine.install(published)
    again = engine.install(published)
    assert (again.bytes_moved, again.version) == (0, published.version)
    with refused(grpc.StatusCode.FAILED_PRECONDITION, "POLICY_MISMATCH"):
        engine.install(published, digest="0" * 32)
    assert engine.install(published).bytes_moved == 0, "the refused one changed nothing"


def test_a_repeated_assignment_makes_the_same_answers(pair):
    learner, engine = pair
    published = learner.publish()
    engine.install(published)
    first, again = (engine.generate(published.version.number, [6], attempt) for attempt in (1, 2))
    tokens = [
        [list(t.branches[-1].segments[-1].tokens.token_ids) for t in made[6]] for made in (first, again)
    ]
    assert tokens[0] == tokens[1] and len({tuple(ids) for ids in tokens[0]}) > 1
    with refused(grpc.StatusCode.FAILED_PRECONDITION, "POLICY_MISMATCH"):
        engine.generate(published.version.number + 1, [6])


def test_join_trainer_group(pair):
    learner, _ = pair
    held = learner.state()
    assert learner.join(held.generation).generation == held.generation
    assert learner.state().version == held.version, "a repetition loses nothing"
    with refused(grpc.StatusCode.ALREADY_EXISTS, "CONFLICT"):
        learner.join(held.generation, rank=1, world_size=2)
    with refused(grpc.StatusCode.ALREADY_EXISTS, "CONFLICT"):
        learner.join(held.generation - 1)


def test_open_run(pair, tiny_model):
    learner, engine = pair
    held = learner.state()
    learner.open(tiny_model)
    engine.open(tiny_model)
    assert learner.state() == held
    other = rollout_pb2.OpenRunRequest(
        header=header(),
        config_json=json.dumps({"model": {"path": str(tiny_model)}, "rollout": {}, "seed": 4}),
    )
    with refused(grpc.StatusCode.ALREADY_EXISTS, "CONFLICT"):
        engine.stub.OpenRun(other, timeout=CALL_S)
    other.header.run = "runs/second"
    with refused(grpc.StatusCode.FAILED_PRECONDITION, "BUSY") as sentence:
        engine.stub.OpenRun(other, timeout=CALL_S)
    assert RUN in sentence[0]


def test_a_lease_that_was_released_is_no_authority(pair, fake_fleet):
    """Last in this file: the engine gets its device back under another epoch."""
    learner, engine = pair
    fake_fleet.revoke("rollout-0", GENERATE)
    with refused(grpc.StatusCode.FAILED_PRECONDITION, "EPOCH_STALE"):
        engine.generate(learner.version.number, [7])
    fake_fleet.grant("rollout-0", GENERATE + 1)
    with refused(grpc.StatusCode.FAILED_PRECONDITION, "EPOCH_STALE"):
        engine.wake()
    engine.lease = GENERATE + 1
    engine.wake(rollout_pb2.WAKE_SCOPE_WEIGHTS)
    with refused(grpc.StatusCode.FAILED_PRECONDITION, "POLICY_MISMATCH"):
        engine.generate(learner.version.number, [7])  # the memory was released, and the policy with it
    engine.install(learner.publish())
    engine.wake(rollout_pb2.WAKE_SCOPE_KV_CACHE)
    engine.stub.Resume(rollout_pb2.ResumeRequest(header=header()), timeout=CALL_S)
    assert len(engine.generate(learner.version.number, [7])[7]) == 4


# --- reward


@pytest.fixture(scope="module")
def reward(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reward")
    folder.chmod(0o777)  # what users write as root's other user
    (folder / "count.py").write_text(
        "import pathlib\n"
        "def score(prompt, completion, reference, metadata):\n"
        "    path = pathlib.Path(__file__).with_name('calls')\n"
        "    if completion: path.open('a').write('.')\n"
        "    return float(len(completion))\n"
    )
    with Service("reward", folder / "service") as service, channel_to(service.address) as channel:
        stub = reward_pb2_grpc.RewardServiceStub(channel)
        config = json.dumps({"scorers": [{"name": f"{folder / 'count.py'}:score"}]})
        opening = reward_pb2.OpenRunRequest(header=header(), config_json=config)
        digests = {stub.OpenRun(opening, timeout=CALL_S).scorer_digest for _ in range(2)}
        assert len(digests) == 1 and digests != {""}

        def score(*items):
            request = reward_pb2.ScoreRequest(header=header(), items=items)
            return [
                result
                for response in stub.Score(iter([request]), timeout=CALL_S)
                for result in response.results
            ]

        score.calls = lambda: len((folder / "calls").read_text())
        yield score


def item(completion, prompt=0, attempt=1):
    sample = common_pb2.SlotKey(prompt_ordinal=prompt)
    return reward_pb2.ScoreItem(sample=sample, attempt=attempt, completion=completion)


def test_reward(reward):
    (first,) = reward(item("four"))
    made = reward.calls()
    (again,) = reward(item("four"))
    assert (first.reward, again.reward, reward.calls()) == (4.0, 4.0, made), "the first result wins"
    with refused(grpc.StatusCode.ALREADY_EXISTS, "CONFLICT"):
        reward(item("another answer"))
    assert [result.reward for result in reward(item("another", attempt=2))] == [7.0]


# --- simulator


@pytest.fixture(scope="module")
def simulator(tmp_path_factory):
    folder = tmp_path_factory.mktemp("simulator")
    with Service("simulator", folder, HEADRACE_SIMULATOR_CHILDREN="1") as service:
        with channel_to(service.address) as channel:
            yield simulator_pb2_grpc.SimulatorServiceStub(channel)


def test_simulator_step(simulator):
    authority = header()
    opening = simulator_pb2.OpenPoolRequest(
        header=authority,
        environment=simulator_pb2.Environment(backend="gymnasium", name="CartPole-v1"),
        count=1,
        seed=3,
    )
    pool, same = (simulator.OpenPool(opening, timeout=CALL_S) for _ in range(2))
    assert (pool.pool, pool.pool_incarnation) == (same.pool, same.pool_incarnation)
    other = simulator_pb2.OpenPoolRequest()
    other.CopyFrom(opening)
    other.count = 2
    with refused(grpc.StatusCode.ALREADY_EXISTS, "CONFLICT"):
        simulator.OpenPool(other, timeout=CALL_S)

    def perform(incarnation=pool.pool_incarnation, **operation):
        request = simulator_pb2.StepRequest(
            header=header(),
            pool=pool.pool,
            pool_incarnation=incarnation,
            operations=[simulator_pb2.EnvironmentOperation(environment=0, **operation)],
        )
        (response,) = simulator.Step(iter([request]), timeout=CALL_S)
        (outcome,) = response.outcomes
        return outcome

    left, right = (encode_tensor(np.asarray(action, dtype=np.int64)) for action in (0, 1))
    reset = {"step_index": 0, "reset": simulator_pb2.ResetOperation(seed=3)}
    assert perform(**reset) == perform(**reset)
    done = perform(step_index=1, action=left)
    assert done.status == simulator_pb2.OUTCOME_STATUS_OK
    assert perform(step_index=1, action=left) == done, "the last reply is repeated, not the step"
    refusals = [perform(step_index=1, action=right), perform(step_index=3, action=left), perform(**reset)]
    assert {outcome.status for outcome in refusals} == {simulator_pb2.OUTCOME_STATUS_REFUSED}
    assert all(outcome.detail for outcome in refusals)
    assert perform(step_index=2, action=left).observation != done.observation
    with refused(grpc.StatusCode.FAILED_PRECONDITION, "INCARNATION_STALE"):
        perform(incarnation="another", step_index=3, action=left)
    simulator.ClosePool(simulator_pb2.ClosePoolRequest(header=header(), pool=pool.pool), timeout=CALL_S)
