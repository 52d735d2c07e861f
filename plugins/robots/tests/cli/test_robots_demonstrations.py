"""`headrace demonstrations collect` with the real simulator service and an environment that has a scripted policy."""

from __future__ import annotations

import io
import json
import subprocess
import sys

import numpy as np
import pandas as pd
import psutil
import pytest
import torch
import yaml
from headrace_coordinator.projections.demonstrations import DemonstrationSet, NotReadable
from headrace_robots.cli.collecting import _png
from headrace_robots.cli.lerobot import EpisodeData, write_data_set
from headrace_robots.demonstrations import Demonstrations, DemonstrationsNotReadable
from headrace_robots.policies.directory import policy_config, save_policy
from headrace_robots.policies.policy import Observation
from PIL import Image

ENVIRONMENT = '''
import gymnasium
import numpy as np
from gymnasium import spaces


class Walk(gymnasium.Env):
    """Walk from 0 to the seed's goal; some goals are too far for the script."""

    action_space = spaces.Box(-2.0, 2.0, (1,), np.float32)

    def __init__(self, expert=False):
        boxes = {"goal": spaces.Box(-9.0, 9.0, (1,)), "place": spaces.Box(-9.0, 9.0, (1,))}
        boxes["front"] = spaces.Box(0, 255, (4, 6, 3), np.uint8)
        if expert:
            boxes["expert_action"] = self.action_space
        self.observation_space = spaces.Dict(boxes)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place, self.goal = 0.0, 9.0 if seed % 3 == 0 else float(self.np_random.uniform(0.8, 1))
        return self.seen(), {}

    def step(self, action):
        self.place += 0.3 * float(action[0])
        return self.seen(), 0.0, False, False, {"success": abs(self.place - self.goal) < 0.15}

    def seen(self):
        act = np.clip((np.array([self.goal - self.place])) / 0.3, -2, 2)
        found = {"goal": [self.goal], "place": [self.place], "expert_action": act}
        found = {name: np.asarray(value, np.float32) for name, value in found.items()}
        return {**found, "front": np.full((4, 6, 3), int(100 + 10 * self.place), np.uint8)}


class Steps(gymnasium.Env):
    """Back, stay or forth, until the goal's place."""

    action_space = spaces.Discrete(3)

    def __init__(self, expert=False):
        boxes = {"goal": spaces.Box(-9, 9, (1,), np.float32), "place": spaces.Box(-9, 9, (1,), np.float32)}
        self.observation_space = spaces.Dict(boxes | ({"expert_action": spaces.Discrete(3)} if expert else {}))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place, self.goal = 0, int(self.np_random.integers(-3, 4))
        return self.seen(), {}

    def step(self, action):
        self.place += action - 1
        return self.seen(), 0.0, False, False, {"success": self.place == self.goal}

    def seen(self):
        found = {"goal": np.float32([self.goal]), "place": np.float32([self.place])}
        return {**found, "expert_action": np.sign(self.goal - self.place) + 1}


def make_steps(expert=False):
    return Steps(expert)


def make_env(expert=False):
    return Walk(expert)


def without_script():
    return Walk()


class Severed(Walk):
    def step(self, action):
        raise ConnectionError("gripper 7 lost its CAN bus")


def severed(expert=False):
    return Severed(expert)


def never_there(expert=False):
    raise ConnectionError("gripper 7 lost its CAN bus")
'''


@pytest.fixture
def spec(tmp_path):
    """A run spec of the environment, with some of its keys set."""
    (tmp_path / "walk.py").write_text(ENVIRONMENT)

    def write(function="make_env", policy="cnn", **environment):
        section = {"tasks": [f"{tmp_path / 'walk.py'}:{function}"], "count": 3, "max_episode_steps": 12}
        document = {
            "workflow": "embodied",
            "model": {"policy": {"kind": policy}},
            "environment": section | environment,
        }
        path = tmp_path / "walk.yaml"
        path.write_text(yaml.safe_dump(document))
        return path

    return write


def test_successful_episodes_become_a_data_set_that_the_trainer_and_pandas_read(headrace, spec, tmp_path):
    target = tmp_path / "made" / "walk"
    done = headrace(
        "demonstrations", "collect", str(spec()), "--to", str(target), "--episodes", "4", "--json"
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert (told["episodes"], told["steps"], told["directory"]) == (4, 48, str(target))
    assert told["played_episodes"] == 6 and told["played_steps"] == 72, "episodes of a far goal do not count"
    found = list(Demonstrations(target, ["front"]))
    assert len(found) == 4 and all(len(each.action_TA) == 12 for each in found)
    assert len({each.state_TS[0, 0].item() for each in found}) == 4, "each has a goal of its own"
    for each in found:
        goal_T, place_T = each.state_TS.numpy().T
        script_T = np.clip((goal_T - place_T) / 0.3, -2, 2)
        np.testing.assert_allclose(each.action_TA[:, 0], script_T, atol=1e-5)
        assert np.abs(np.diff(place_T) - 0.3 * script_T[:-1]).max() > 1e-3, "noise moved it off the path"
        assert each.images["front"].shape == (12, 4, 6, 3)
        assert each.images["front"][:, 0, 0, 0].tolist() == [int(100 + 10 * place) for place in place_T]
    tasks = pd.read_parquet(target / "meta" / "tasks.parquet")
    assert tasks.index[0] == found[0].task and tasks["task_index"].tolist() == [0]
    episodes = pd.read_parquet(target / "meta" / "episodes")
    assert episodes["dataset_to_index"].tolist() == [12, 24, 36, 48]
    assert not list(target.parent.glob(".*")), "nothing is left aside"
    shown = headrace("demonstrations", "show", str(target), "--json")
    assert [each["steps"] for each in json.loads(shown.stdout)["episodes"]] == ["12"] * 4
    shown = headrace("demonstrations", "show", str(target), "2")
    assert shown.returncode == 0 and len(shown.stdout.split("\n")) > 12, shown.stderr
    shown = headrace("demonstrations", "show", str(target), "4")
    assert shown.returncode == 2 and "give 0 to 3" in shown.stderr


@pytest.mark.parametrize("videos", [False, True])
def test_the_coordinator_shows_what_the_trainer_reads(tmp_path, videos):
    shades = [[60, 120, 180], [20, 200]]
    episodes = [
        EpisodeData(
            f"walk {number}",
            states=[np.ones(2, np.float32)] * len(steps),
            actions=[np.array([number, step], np.float32) for step in range(len(steps))],
            images={"front": [_png(np.full((16, 16, 3), shade, np.uint8)) for shade in steps]},
            rewards=[float(step) for step in range(len(steps))] if not videos else [],
            successes=[step > 0 for step in range(len(steps))] if not videos else [],
            ends=[False] * len(steps) if not videos else [],
        )
        for number, steps in enumerate(shades)
    ]
    write_data_set(tmp_path / "walk", episodes, {"front": (16, 16, 3)}, videos=videos)
    trained, shown = Demonstrations(tmp_path / "walk", ["front"]), DemonstrationSet(tmp_path / "walk")
    assert shown.page(0, 9).total == 2 and shown.fps == trained.fps
    for place, one in enumerate(trained):
        view, steps = shown.view(place), shown.steps(place)
        assert (view.task, view.steps) == (one.task, len(one.action_TA))
        assert steps.actions == one.action_TA.tolist()
        assert steps.rewards == ([] if videos else one.reward_T.tolist())
        (camera,) = view.cameras
        assert (camera.name, camera.film) == ("front", videos)
        if videos:
            assert shown.film(place, "front").read_bytes()[4:8] == b"ftyp"
            assert camera.from_s == pytest.approx(3 * place / shown.fps)
            continue
        for step, shade in enumerate(shades[place]):
            seen = Image.open(io.BytesIO(shown.picture(place, "front", step)))
            assert np.asarray(seen)[0, 0].tolist() == [shade] * 3
    for wrong in (
        lambda: shown.view(2),
        lambda: shown.picture(0, "back", 0),
        lambda: shown.picture(0, "front", 9),
    ):
        with pytest.raises(NotReadable):
            wrong()


def test_a_data_set_leads_nowhere_else(tmp_path):
    write_data_set(tmp_path / "walk", [EpisodeData("walk", [], [np.ones(1)], {}, [], [], [])], {})
    (tmp_path / "walk2").mkdir()
    secret = tmp_path / "secret.parquet"
    (tmp_path / "walk/data/chunk-000/file-000.parquet").rename(secret)
    info = tmp_path / "walk/meta/info.json"
    for path in ("../secret.parquet", str(secret)):
        info.write_text(json.dumps(json.loads(info.read_text()) | {"data_path": path}))
        with pytest.raises(NotReadable, match="not below"):
            DemonstrationSet(tmp_path / "walk").steps(0)
    with pytest.raises(NotReadable, match="no LeRobot v3 data set on the coordinator's host"):
        DemonstrationSet(tmp_path / "walk2")


def test_demonstrations_of_categories_have_some_that_the_script_did_not_choose(headrace, spec, tmp_path):
    command = ("demonstrations", "collect", str(spec("make_steps", policy="mlp")), "--episodes", "6", "--to")
    for name, noise in (("exact", "0"), ("noisy", "0.5")):
        done = headrace(*command, str(tmp_path / name), "--noise", noise)
        assert done.returncode == 0, done.stderr
        found = list(Demonstrations(tmp_path / name, []))
        assert len(found) == 6 and all(each.action_TA.shape == (12, 1) for each in found)
        gone = 0
        for each in found:
            goal_T, place_T = each.state_TS.numpy().T
            script_T = np.sign(goal_T - place_T) + 1
            assert each.action_TA[:, 0].tolist() == script_T.tolist(), "what is learned is the script's"
            gone += int((np.diff(place_T) != script_T[:-1] - 1).sum())
        assert (gone > 0) == (noise != "0"), "what is played leaves its path"


def test_cameras_may_be_videos(headrace, spec, tmp_path):
    """As most published data sets have them: one file with all episodes, of which each is a stretch."""
    command = ("demonstrations", "collect", str(spec()), "--episodes", "3", "--to")
    for name, more in (("images", ()), ("videos", ("--videos",))):
        done = headrace(*command, str(tmp_path / name), *more)
        assert done.returncode == 0, done.stderr
    exact, filmed = (Demonstrations(tmp_path / name, ["front"]) for name in ("images", "videos"))
    assert "observation.images.front" not in pd.read_parquet(tmp_path / "videos" / "data").columns
    for place in (2, 0, 1):
        assert filmed[place].action_TA.equal(exact[place].action_TA)
        seen, wanted = (each[place].images["front"].float() for each in (filmed, exact))
        assert seen.shape == wanted.shape and (seen - wanted).abs().max() <= 3
    film = tmp_path / "videos/videos/observation.images.front/chunk-000/file-000.mp4"
    film.write_bytes(film.read_bytes()[:200])
    with pytest.raises(DemonstrationsNotReadable, match=r"file-000\.mp4 cannot be read"):
        filmed[0]


def test_a_policy_may_play_in_place_of_the_script(headrace, spec, tmp_path):
    """Greedily, in chunks; the episodes of an evaluation, whether or not they succeed, with what they earned."""
    fields = {"kind": "mlp", "state_size": 2, "chunk_length": 3, "bounds": {"low": [-2.0], "high": [2.0]}}
    policy = policy_config(fields).build(3)
    save_policy(policy, tmp_path / "policy")
    command = ("demonstrations", "collect", str(spec(policy="cnn")), "--policy", str(tmp_path / "policy"))
    done = headrace(*command, "--to", str(tmp_path / "played"), "--episodes", "3", "--videos")
    assert done.returncode == 0, done.stderr
    found = list(Demonstrations(tmp_path / "played", ["front"]))
    assert len(found) == 3 and all(each.reward_T is not None and len(each.action_TA) == 12 for each in found)
    for each in found:
        chunks = policy.act(Observation(each.state_TS[::3]), range(4), deterministic=True).executed_BCA
        torch.testing.assert_close(each.action_TA, chunks.flatten(0, 1), atol=1e-5, rtol=1e-5)
    done = headrace(*command[:3], "--policy", str(tmp_path), "--to", str(tmp_path / "other"))
    assert done.returncode == 2 and "give a policy directory" in done.stderr


def test_cameras_are_left_out_for_a_policy_that_reads_none(headrace, spec, tmp_path):
    path = spec(policy="mlp", state=["place"], stop_on_success=True)
    done = headrace(
        "demonstrations", "collect", str(path), "--to", str(tmp_path / "demos"), "--episodes", "1"
    )
    assert done.returncode == 0, done.stderr
    (found,) = Demonstrations(tmp_path / "demos")
    assert found.state_TS.shape[1] == 1 and len(found.action_TA) < 12, "it ends with the success"
    assert "images" not in (tmp_path / "demos/meta/info.json").read_text()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"function": "without_script"}, "expert"),
        ({"max_episode_steps": 1}, "lower --noise, or raise environment.max_episode_steps"),
    ],
)
def test_what_gives_no_demonstrations_is_named_and_nothing_is_written(
    headrace, spec, tmp_path, arguments, words
):
    target = tmp_path / "demos"
    done = headrace(
        "demonstrations", "collect", str(spec(**arguments)), "--to", str(target), "--episodes", "3"
    )
    assert done.returncode == 2 and words in done.stderr
    assert not target.exists()


@pytest.mark.parametrize(
    ("function", "key"), [("severed", "(--episodes)"), ("never_there", "(environment.tasks)")]
)
def test_what_an_environment_raised_stands_before_the_key(headrace, spec, tmp_path, function, key):
    command = ("demonstrations", "collect", str(spec(function)), "--to", str(tmp_path / "demos"))
    done = headrace(*command, "--episodes", "3")
    assert done.returncode == 2 and "gripper 7 lost its CAN bus" in done.stderr, done.stderr
    said = " ".join(done.stderr.split())
    assert said.index("ConnectionError: gripper 7 lost its CAN bus (walk.py:") < said.index(key)


def test_a_directory_is_never_overwritten(headrace, spec, tmp_path):
    done = headrace("demonstrations", "collect", str(spec()), "--to", str(tmp_path))
    assert done.returncode == 2 and "remove it, or give another directory" in done.stderr
    done = headrace("demonstrations", "collect", str(spec()))
    assert done.returncode == 2 and "trainer.warmup.demonstrations" in done.stderr


HOLDS = """
import asyncio
from headrace_robots.cli.collecting import simulator

async def main():
    async with simulator(""):
        print("ready", flush=True)
        await asyncio.sleep(600)

asyncio.run(main())
"""


def test_a_simulator_does_not_outlive_a_command_that_is_killed():
    with subprocess.Popen([sys.executable, "-c", HOLDS], stdout=subprocess.PIPE, text=True) as command:
        assert command.stdout and command.stdout.readline() == "ready\n"
        started = psutil.Process(command.pid).children(recursive=True)
        command.kill()
    assert started
    _, living = psutil.wait_procs(started, timeout=30)
    for process in living:
        process.kill()
    assert not living
