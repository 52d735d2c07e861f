"""World models: learned from real episodes, judged on held-out ones, and stepped over the real simulator service."""

from __future__ import annotations

import json

import grpc
import numpy as np
import pytest
import torch
from headrace.simulator.v1 import simulator_pb2
from headrace_robots.policies.action_head import ActionHead
from headrace_robots.policies.scaling import ActionBounds
from headrace_robots.policies.squashed import SquashedHead
from headrace_robots.trainer.replay.records import Sampling, Spaces, Stored
from headrace_robots.trainer.replay.store import ReplayStore
from headrace_robots.world.data import DataProblem, RealEpisode, executed, read_episodes
from headrace_robots.world.model import CONFIG, WEIGHTS, Space, WorldNotReadable, load_world
from headrace_robots.world.training import Real, Training, train
from headrace_servicekit.rpc.errors import message_of

PLACE = Space(dtype="float32", shape=(2,), low=(-5.0, None), high=(5.0, None))
PUSH = Space(dtype="float32", shape=(1,), low=(-1.0,), high=(1.0,))
REAL = Real("gymnasium", "Cart", (PLACE,), PUSH)
QUICK = Training(members=3, hidden=32, steps=400, batch=64)


def cart(seed, steps=40, *, terminated=False, most=1.0):
    """A cart that is pushed, on a track that ends at 5: place and speed."""
    random = np.random.default_rng(seed)
    states, actions = [random.uniform(-most, most, 2)], random.uniform(-1, 1, (steps, 1))
    for action in actions:
        place, speed = states[-1]
        states.append(np.array([np.clip(place + 0.1 * speed, -5, 5), 0.95 * speed + 0.2 * action[0]]))
    rewards = np.array([-abs(place) for place, _ in states[1:]])
    kept = np.array(states[: steps + (not terminated)], np.float32)
    return RealEpisode(kept, actions.astype(np.float32), rewards.astype(np.float32), terminated)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    directory = tmp_path_factory.mktemp("worlds") / "cart"
    train(REAL, [cart(seed) for seed in range(30)], directory, QUICK, {"carts": 30})
    return directory


def test_held_out_episodes_tell_the_error_of_a_model_and_where_it_knows_nothing(world):
    model = load_world(world)
    config = model.config
    assert (config.number, config.longest, config.data["heldout_episodes"]) == (1, 40, 6)
    for name in ("change", "reward", "state after 10 actions"):
        mean, low, high = config.errors[name]
        assert 0 < low < mean < high < 0.3, name
    real = cart(77)
    found = model.predict(real.states_TS[:-1].astype(np.float64), real.actions_TA, np.zeros(40, np.int64))
    assert np.abs(found.states_NS - real.states_TS[1:]).max() < 0.1
    assert (found.disagreement_N < config.threshold).mean() > 0.9
    far = real.states_TS[:-1].astype(np.float64) + np.array([0.0, 20.0])
    lost = model.predict(far, real.actions_TA, np.zeros(40, np.int64))
    assert (lost.disagreement_N > config.threshold).all(), "no episode was ever so fast"


def test_a_goal_stays_and_no_number_grows_without_end(tmp_path):
    space = Space(dtype="float32", shape=(4,))

    def with_goal(seed):
        real = cart(seed)
        goal = np.full((41, 1), np.random.default_rng(seed).uniform(-1, 1))
        creeping = 1e-7 * np.arange(41)[:, None] + 1e-5 * goal
        states_TS = np.concatenate([real.states_TS, goal, creeping], 1).astype(np.float32)
        return RealEpisode(states_TS, real.actions_TA, real.rewards_T, False)

    real = Real("gymnasium", "Cart", (space,), PUSH)
    model = train(real, [with_goal(seed) for seed in range(12)], tmp_path / "cart", QUICK, {})
    assert model.config.errors["state after 10 actions"][0] < 0.3
    states_NS = begun = model.starts_NS[::40]
    pushes, members = np.full((len(begun), 1), 1.0), np.zeros(len(begun), np.int64)
    for _ in range(40):
        states_NS = model.predict(states_NS, pushes, members).states_NS
    assert np.abs(states_NS - begun)[:, 2:].max() < 0.01, "a goal never moved"
    least, most = model.starts_NS.min(0), model.starts_NS.max(0)
    for _ in range(400):
        states_NS = model.predict(states_NS, 50 * pushes, members).states_NS
    assert (states_NS <= most + (most - least)).all(), "far beyond the data"


def test_a_model_trained_again_is_the_next_version(tmp_path):
    directory = tmp_path / "cart"
    episodes = [cart(seed, 12, terminated=seed % 2 == 0) for seed in range(6)]
    quick = Training(members=2, hidden=8, steps=20, batch=16)
    first, second = (train(REAL, episodes[:count], directory, quick, {}) for count in (4, 6))
    assert (first.config.number, second.config.number) == (1, 2)
    assert first.digest != second.digest == load_world(directory).digest
    assert second.config.terminates and "ends told wrongly" in second.config.errors
    other = tmp_path / "notes"
    other.mkdir()
    with pytest.raises(DataProblem, match="no world model that a new version could follow"):
        train(REAL, episodes, other, quick, {})
    with pytest.raises(DataProblem, match="collect more"):
        train(REAL, episodes[:1], tmp_path / "new", quick, {})
    episodes[0].rewards_T[3] = np.nan
    with pytest.raises(DataProblem, match="rewards of episode 0 are not all finite"):
        train(REAL, episodes, tmp_path / "new", quick, {})


def test_what_a_head_drew_is_read_as_what_the_environment_got():
    bounds = ActionBounds(low=(-2.0, 0.0, None), high=(2.0, 1.0, None))
    space = Space(dtype="float32", shape=(3,), low=(-2.0, 0.0, None), high=(2.0, 1.0, None))
    drawn = torch.randn(50, 1, 3, generator=torch.Generator().manual_seed(0))
    wanted = ActionHead(bounds, (), 1, 0.0).executed(drawn)[:, 0]
    np.testing.assert_allclose(executed(space, drawn[:, 0].numpy()), wanted, atol=1e-6)
    tight = Space(dtype="float32", shape=(1,), low=(-2.0,), high=(2.0,))
    squashed = SquashedHead(ActionBounds(low=(-2.0,), high=(2.0,)), 1).executed(drawn[..., :1].tanh())
    np.testing.assert_allclose(executed(tight, drawn[:, 0, :1].tanh().numpy()), squashed[:, 0], atol=1e-6)
    chosen = Space(dtype="int64", shape=(1,), low=(3.0,), high=(6.0,), categories=(4,))
    index = torch.tensor([[[0.0]], [[3.0]]])
    head = ActionHead(ActionBounds(low=(3.0,), high=(6.0,)), (4,), 1, 0.0)
    assert executed(chosen, index[:, 0].numpy()).tolist() == head.executed(index)[:, 0].tolist() == [[3], [6]]


def test_a_replay_store_is_read_while_its_run_goes_on(tmp_path):
    path = tmp_path / "replay" / "000-of-001.sqlite"
    store = ReplayStore(path, 100, Spaces(2, 1), Sampling())
    for number, terminated in enumerate((False, True)):
        states = np.arange(10, dtype=np.float32).reshape(5, 2) + number
        actions, rewards = np.full((4, 1), 0.5, np.float32), np.arange(4, dtype=np.float32)
        store.insert(Stored((number, 0), 1, states, actions, rewards, terminated, False))
    store.commit()
    wide = Space(dtype="float32", shape=(1,), low=(-2.0,), high=(2.0,))
    first, second = read_episodes(path.parent, wide, 2, reward_scale=0.5)
    assert (first.states_TS.shape, second.states_TS.shape) == ((5, 2), (4, 2)), (
        "behind an end nothing is known"
    )
    assert (first.actions_TA[0, 0], first.rewards_T[3], second.terminated) == (1.0, 6.0, True)
    with pytest.raises(DataProblem, match="chunks of one action"):
        read_episodes(path, PUSH, 3, 1.0)
    store.close()
    path.write_bytes(path.read_bytes()[:700])
    for each in path.parent.glob("*-*"):
        if each != path:
            each.unlink()
    with pytest.raises(DataProblem, match="no replay store that can be read"):
        read_episodes(path, PUSH, 2, 1.0)
    with pytest.raises(DataProblem, match="no LeRobot data set"):
        read_episodes(tmp_path, PUSH, 2, 1.0)


async def test_an_episode_ends_where_the_members_disagree(simulator, world, arrays):
    name = str(world)
    pool = await simulator.open(name, backend="world", max_episode_steps=30)
    model = load_world(world)
    assert pool.opened.versions["world cart"] == model.version
    await pool.reset(seed=1)
    for _ in range(30):
        outcome = await pool.act(np.zeros(1, np.float32))
        assert outcome.status == simulator_pb2.OUTCOME_STATUS_OK, outcome.detail
        info = json.loads(outcome.info_json)
        assert outcome.truncated == (info["beyond_model"] or _ == 29)
        if outcome.truncated:
            break
    strict = await simulator.open(name, backend="world", options={"threshold": 1e-9})
    begun = arrays(await strict.reset(seed=1))[""]
    outcome = await strict.act(np.zeros(1, np.float32))
    assert outcome.truncated and not outcome.terminated
    assert (arrays(outcome)[""] == begun).all() and outcome.reward < model.reward_mean - 2 * model.reward_std
    assert json.loads(outcome.info_json)["beyond_model"]


async def test_episodes_begin_at_states_of_real_ones(simulator, world, arrays):
    model = load_world(world)
    pool = await simulator.open(str(world), backend="world", options={"starts": "first"})
    seen = [arrays(await pool.reset(seed=seed))[""] for seed in range(20)]
    firsts = model.starts_NS[model.first_N]
    assert len(firsts) == 30 and all(np.isclose(firsts, each).all(1).any() for each in seen)
    assert len({each.tobytes() for each in seen}) > 5


async def test_an_action_loses_reward_by_the_penalty_where_the_members_disagree(simulator, world):
    outcomes = []
    for penalty in (0.0, 2.0):
        pool = await simulator.open(str(world), backend="world", options={"penalty": penalty})
        await pool.reset(seed=1)
        outcomes.append(await pool.act(np.ones(1, np.float32)))
    free, charged = outcomes
    disagreement = json.loads(free.info_json)["disagreement"]
    wanted = 2.0 * disagreement * load_world(world).reward_std
    assert wanted > 0 and free.reward - charged.reward == pytest.approx(wanted, rel=1e-3)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"threshold": 0}, "options_json.threshold: "),
        ({"start": "first"}, "did you mean 'starts'?"),
        ({"version": "ffff"}, "options_json.version: "),
    ],
)
async def test_wrong_options_are_refused_by_key(simulator, world, options, words):
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await simulator.open(str(world), backend="world", options=options)
    assert words in message_of(refused.value)


@pytest.mark.parametrize(
    ("file", "cut", "words"),
    [
        (WEIGHTS, lambda body: body[:-200], "is no whole file of a world model"),
        (WEIGHTS, None, "is no whole file of a world model"),
        (CONFIG, lambda body: body[:-200], "is no whole file of a world model"),
        (
            CONFIG,
            lambda body: body.replace(b'"hidden": 32', b'"hidden": 33'),
            "weight.0 has shape [3, 3, 32]",
        ),
        (CONFIG, lambda body: body.replace(b'"format": 1', b'"format": 9'), "its format is 9, and 1 is read"),
        (CONFIG, None, "`headrace world train` writes one"),
    ],
)
async def test_a_damaged_model_is_refused_by_its_file(simulator, world, tmp_path, file, cut, words):
    other = tmp_path / "cart"
    other.mkdir()
    for each in world.iterdir():
        body = each.read_bytes() if each.name != file else cut and cut(each.read_bytes())
        if body is not None:
            (other / each.name).write_bytes(body)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await simulator.open(str(other), backend="world")
    text = message_of(refused.value)
    assert text.startswith("environment.name: ") and words in text
    with pytest.raises(WorldNotReadable):
        load_world(other)
