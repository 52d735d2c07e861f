"""Cloning before the first episode: what a policy learns of demonstrations, again after a loss, and what is refused."""

from __future__ import annotations

import io
import json
from collections import Counter
from functools import partial

import grpc
import numpy as np
import pandas as pd
import pytest
import torch
from headrace_modelkit.weights import load_weights
from headrace_robots.policies.directory import policy_config
from headrace_robots.policies.policy import imitation_loss
from headrace_robots.tiny import tiny_fields, write_tiny_robot
from headrace_robots.trainer.backend.cloning import check_demonstrations, read_demonstrations
from headrace_schema.openings import TrainerConfig
from headrace_trainer.backends._base import CommitReport
from headrace_trainer.workloads import run_kind
from PIL import Image

EPISODES = 24
SIZE = 28
"""Pixels of a picture's height and width."""


def scripted(state: np.ndarray) -> np.ndarray:
    """Toward the goal, with what the velocity does already taken off."""
    place, velocity, goal = np.split(state, 3)
    return np.clip((goal - place - 0.5 * velocity) / 0.15, -1, 1)


@pytest.fixture
def demonstrations(tmp_path, robots):
    """Episodes of the script; seeds that no test plays."""
    rows = []
    for episode in range(EPISODES):
        world = robots.Reach()
        state = world.reset(10**8 + episode)
        for frame in range(world.horizon):
            action = scripted(state)
            rows.append(row(episode, frame, state, action))
            state = world.step(action)[0]
    return write(tmp_path / "reach", rows, "reach")


def row(episode, frame, state, action, **images):
    """A step as LeRobot stores it; images are PNG files."""
    return {
        "observation.state": np.asarray(state, np.float32),
        "action": np.asarray(action, np.float32),
        "episode_index": episode,
        "frame_index": frame,
        "task_index": 0,
        **{f"observation.images.{name}": {"bytes": file, "path": None} for name, file in images.items()},
    }


def write(folder, rows, task):
    """A LeRobot data set of these steps."""
    lengths = Counter(each["episode_index"] for each in rows)
    place = {"data/chunk_index": 0, "data/file_index": 0}
    episodes = [{"episode_index": n, "length": length, **place} for n, length in lengths.items()]
    for part in ("data/chunk-000", "meta/episodes/chunk-000"):
        (folder / part).mkdir(parents=True)
    pd.DataFrame(rows).to_parquet(folder / "data/chunk-000/file-000.parquet")
    pd.DataFrame(episodes).to_parquet(folder / "meta/episodes/chunk-000/file-000.parquet")
    pd.DataFrame({"task_index": [0]}, index=[task]).to_parquet(folder / "meta/tasks.parquet")
    numbers = {name: rows[0][name] for name in ("action", "observation.state")}
    features = {name: {"dtype": "float32", "shape": list(value.shape)} for name, value in numbers.items()}
    images = [name for name in rows[0] if name.startswith("observation.images.")]
    info = {
        "codebase_version": "v3.0",
        "data_path": "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
        "features": features | {name: {"dtype": "image", "shape": [SIZE, SIZE, 3]} for name in images},
    }
    (folder / "meta/info.json").write_text(json.dumps(info))
    return folder


def cloning(directory, steps=200, **more):
    return {
        "warmup": {"demonstrations": str(directory), "steps": steps, "batch": 128, "lr": 3e-3, **more},
    }


def success_rate(policy, robots):
    """Of the greedy policy, with goals that no demonstration has."""
    worlds = [robots.Reach() for _ in range(32)]
    found = robots.play(policy, worlds, range(10**6, 10**6 + 32), 0, deterministic=True)
    return np.mean([episode.success for episode in found])


async def test_a_policy_begins_as_a_clone_and_learns_on(
    client, robot_config, robots, demonstrations, fetched_weights, settled_digest
):
    config = robot_config(trainer=cloning(demonstrations), checkpoint={"enabled": False})
    restored = await client.open(config)
    policy = policy_config(config["model"]["policy"]).build(config["seed"])
    before = success_rate(policy, robots)
    load_weights(policy, await fetched_weights(client, restored.version.number))
    assert before <= 0.2 and success_rate(policy, robots) >= 0.8
    assert restored.warmup_steps == 200
    assert restored.figures["warmup_moments"] == EPISODES * 24
    assert restored.figures["warmup_last_loss"] < 0.2 * restored.figures["warmup_first_loss"]
    assert int(policy.normalizer.count) == EPISODES * 24, "fitted to the demonstrations' states"
    fitted = policy.normalizer.mean.clone()
    version = restored.version
    episodes = robots.play(policy, [robots.Reach() for _ in range(4)], range(4), 0)
    groups = [robots.settled(place, [episode], version) for place, episode in enumerate(episodes)]
    await client.begin(0, 1, version.number, version.number + 1)
    await client.learn(0, 1, groups)
    reply = await client.commit(0, 1, version.number, version.number + 1, settled_digest(groups))
    await client.record(0, 1, version.number + 1)
    assert reply.version.ordinal == 1
    assert reply.figures["log_prob_mismatch_max"] < 1e-4
    after = await fetched_weights(client, reply.version.number)
    assert torch.equal(after["normalizer.mean"], fitted), "other statistics would undo the clone"


async def test_cloning_that_is_made_again_gives_the_same_policy(client, robot_config, demonstrations):
    """A trainer that was lost in the warm-up, or before the first checkpoint, begins with the initial model again."""
    config = robot_config(trainer=cloning(demonstrations, steps=20), checkpoint={"keep": 2})
    first = (await client.open(config)).version
    again = (await client.restore("", first.number + 1)).version
    assert again.digest == first.digest
    other = await client.reopen_with(robot_config(trainer=cloning(demonstrations, steps=21)))
    assert other.digest != first.digest


async def test_a_checkpoint_is_not_cloned_again(client, robot_config, demonstrations):
    config = robot_config(trainer=cloning(demonstrations, steps=20))
    first = (await client.open(config)).version
    name = (await client.save(first.number)).checkpoint.name
    restored = await client.restore(name, first.number + 1)
    assert restored.warmup_steps == 0 and restored.version.digest == first.digest


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"demonstrations": "/nowhere"}, "there is no '/nowhere' where the trainer runs"),
        ({"policy": {"state_size": 5}}, "has 6 numbers of a state, and the policy 5"),
        (
            {"policy": {"bounds": {"low": [-1.0], "high": [1.0]}}},
            "has 2 numbers of an action, and the policy 1",
        ),
    ],
)
async def test_demonstrations_of_another_robot_are_refused_at_the_opening(
    change, reason, client, robot_config, demonstrations
):
    warmup = cloning(change.pop("demonstrations", demonstrations), steps=1)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await client.open_run(robot_config(trainer=warmup, **change))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert reason in caught.value.details() and "trainer.warmup.demonstrations" in caught.value.details()


def test_only_as_many_demonstrations_as_are_wanted(robot_config, demonstrations):
    config = TrainerConfig.model_validate(robot_config(trainer=cloning(demonstrations, episodes=3)))
    policy = policy_config(config.model.policy).build(0)
    assert len(read_demonstrations(config, policy).valid_NC) == 3 * 24


def picture(brightness):
    file = io.BytesIO()
    Image.fromarray(np.full((SIZE, SIZE, 3), brightness, np.uint8)).save(file, format="PNG")
    return file.getvalue()


@pytest.mark.parametrize("kind", ["openvla_oft", "pi0"])
def test_a_policy_with_eyes_and_words_imitates_by_its_own_loss(kind, robot_config, trainer_group, tmp_path):
    """The same setting for every kind: token loss, flow matching. The words are those of the demonstrations."""
    write_tiny_robot(tmp_path / "policy", tiny_fields(kind, 2, state=3, chunk_length=2))
    random = np.random.default_rng(0)
    rows = [
        row(episode, frame, random.uniform(-1, 1, 3), (0.5, -0.5), image=picture(40 * frame))
        for episode in range(2)
        for frame in range(6)
    ]
    write(tmp_path / "shown", rows, "push the cube")
    warmup = cloning(tmp_path / "shown", steps=30, batch=12)
    model = {"path": str(tmp_path / "policy"), "dtype": "float32"}
    fields = robot_config(trainer=warmup, instruction="In: {question}?\nOut:") | {"model": model}
    config = TrainerConfig.model_validate(fields)
    check_demonstrations(config)
    backend = backend_of(config, trainer_group)
    backend.load_initial()
    seen = read_demonstrations(config, backend._policy)
    prompts = seen.observation.prompts
    assert len(prompts) == 12 and len(set(prompts)) == 1 and len(prompts[0]) > 4
    before = loss_of(backend, seen)
    assert backend.warm_up().figures["warmup_moments"] == 12
    assert loss_of(backend, seen) < 0.95 * before


def backend_of(config, ranks):
    kind = run_kind(config)
    return kind.backend(kind.algorithm(), ranks)


@torch.no_grad()
def loss_of(backend, seen):
    """The loss of every moment, with the same noise each time."""
    every = seen.take(torch.arange(len(seen.valid_NC)), torch.device("cpu"))
    losses = backend._imitation_losses(every, range(len(every.valid_NC)))
    return float(imitation_loss(losses, every.valid_NC))


class Half:
    """One of two ranks in one process: what is summed over ranks is the other's too."""

    world_size, device, leads = 2, torch.device("cpu"), True

    def __init__(self, rank, other):
        self.rank, self.other = rank, other

    def share(self, tensor):
        return None

    def sum(self, values):
        return {name: value + self.other.get(name, 0.0) for name, value in values.items()}

    maximum = sum


def test_the_ranks_of_a_group_take_shares_of_a_supervised_step(
    robot_config, demonstrations, trainer_group, monkeypatch
):
    """The gradients of two ranks add up to that of one, so that a group clones as one trainer does."""
    config = TrainerConfig.model_validate(robot_config(trainer=cloning(demonstrations, steps=1)))
    gradients = []
    for places in ([trainer_group], [Half(0, {}), Half(1, {})]):
        summed = {}
        for place in places:
            backend = backend_of(config, place)
            backend.load_initial()
            monkeypatch.setattr(backend, "commit", partial(taken, backend, summed))
            backend.warm_up()
        gradients.append(summed)
    one, both = gradients
    assert all(torch.allclose(one[name], both[name], atol=1e-7) for name in one)


def taken(backend, summed, count, rate):
    """Adds a rank's own gradient, divided, in place of an optimizer step."""
    for name, parameter in backend._policy.named_parameters():
        if parameter.grad is not None:
            summed[name] = summed.get(name, 0.0) + parameter.grad / count
    return CommitReport(True, 0.0)
