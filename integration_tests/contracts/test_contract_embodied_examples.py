"""Every example of an embodied run is a spec that a fleet takes."""

from __future__ import annotations

import runpy
from pathlib import Path

import numpy as np
import pytest
from headrace.client.specs import load_spec, load_specs
from headrace.common.v1 import common_pb2 as common
from headrace.simulator.v1 import simulator_pb2 as simulator
from headrace_coordinator.api.submission.fleet_view import FleetView
from headrace_coordinator.api.submission.rules import problems_of
from headrace_coordinator.api.submission.submission import Submission
from headrace_coordinator.data import Dataset
from headrace_coordinator.run.simulators.policy_fit import fit, read_policy_file
from headrace_robots.cli.lerobot import EpisodeData, write_data_set
from headrace_robots.policies.directory import policy_config
from headrace_robots.policies.language import read_tokenizer
from headrace_robots.simulator.libero import seen
from headrace_robots.tiny import tiny_fields, write_tiny_robot
from headrace_robots.trainer.algorithms import EPISODE_ALGORITHMS
from headrace_schema.problems import Impossible
from headrace_schema.resources.views import KeyProblemView
from headrace_schema.spec import RunSpec

FLOAT, PIXEL = common.DATA_TYPE_FLOAT64, common.DATA_TYPE_UINT8
FOLDER = Path(__file__).resolve().parents[2] / "examples" / "embodied"
EXAMPLES = [
    pytest.param(path, at, id=f"{path.stem}-{at}" if at else path.stem)
    for path in sorted(FOLDER.glob("*.yaml"))
    for at in range(len(load_specs(path)))
]
RECIPES = sorted(path for path in FOLDER.parent.glob("reproduce/*.yaml") if not path.name.startswith("qwen"))


def fleet(**simulators: frozenset[str]) -> FleetView:
    return FleetView(
        capabilities={
            "trainer": {
                "backends": frozenset({"fsdp"}),
                "episode_algorithms": frozenset(EPISODE_ALGORITHMS.names()),
                "episode_algorithm_options": frozenset(EPISODE_ALGORITHMS.capabilities(pytest.fail)),
            },
            "rollout": {"engines": frozenset({"transformers"})},
            "reward": {"scorers": frozenset({"episode", "success_classifier"})},
            "simulator": simulators,
        },
        instances={"trainer": 1, "rollout": 1, "reward": 1, **({"simulator": 1} if simulators else {})},
        devices=["host/cpu:0"],
    )


def check(spec: RunSpec, fleet: FleetView) -> list[KeyProblemView]:
    return problems_of(Submission(spec, fleet, Dataset.open(spec.data, spec.seed)))


def read(path: Path, policies: Path, at: int = 0, **more: object) -> RunSpec:
    """A run of an example; a policy directory and a data set that it names are there."""
    runs = load_specs(path)
    given = load_spec(runs[at], more)
    if given.pop("after", None):  # a fleet gives it the policy of the run before
        given["model"] = runs[at - 1]["model"]
    if directory := given["model"].get("path"):
        made = policies / Path(directory).name
        made.mkdir()
        for name in ("policy.json", "model.safetensors"):
            (made / name).touch()
        given["model"]["path"] = str(made)
    if given["data"].get("source") == "lerobot":
        shown = np.zeros(39, np.float32), np.zeros(4, np.float32)
        episodes = [EpisodeData("push", *([each] * 3 for each in shown)) for _ in range(8)]
        write_data_set(policies / "shown", episodes, {})
        given["data"]["options"]["path"] = str(policies / "shown")
    return RunSpec.model_validate(given)


@pytest.mark.parametrize(("path", "at"), EXAMPLES)
def test_a_fleet_takes_the_example(path: Path, at: int, tmp_path: Path):
    spec = read(path, tmp_path, at)
    backends = frozenset({"gymnasium", "metaworld", "maniskill", "libero", "world"})
    assert check(spec, fleet(backends=backends)) == []


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_lacks_devices_and_instances_alone(path: Path, tmp_path: Path):
    found = check(read(path, tmp_path), fleet(backends=frozenset({"maniskill", "libero"})))
    assert {each.key for each in found} <= {"rollout.instances", "trainer.ranks", "placement.mode"}


LIBERO = {"pi0": "pi0-libero", "pi05": "pi05-libero", "openvla_oft": "openvla-oft-libero-130"}
"""Kinds of the published policies that the recipes for LIBERO begin with, and the directories that they name."""


@pytest.mark.parametrize("kind", LIBERO)
def test_a_tiny_policy_of_the_published_layout_fits_what_its_recipe_shows(kind: str, tmp_path: Path):
    """Cameras, state and actions are the published one's; LIBERO's own observation is as robosuite gives it."""
    (path,) = (each for each in RECIPES if load_spec(each)["model"]["path"].endswith(LIBERO[kind]))
    spec = read(path, tmp_path)
    assert spec.environment is not None
    sight = np.zeros((spec.environment.options["image_size"],) * 2 + (3,), np.uint8)
    names = [f"{camera}_image" for camera in spec.environment.options["cameras"]]
    observed = {
        "robot0_eef_pos": np.zeros(3),
        "robot0_eef_quat": np.eye(4)[3],
        "robot0_gripper_qpos": np.zeros(2),
    }
    shown = seen({**observed, **dict.fromkeys(names, sight)}, names, spec.environment.options["convention"])
    spaces = [
        simulator.Space(name=name, data_type=PIXEL if value.dtype == np.uint8 else FLOAT, shape=value.shape)
        for name, value in shown.items()
    ]
    pool = simulator.OpenPoolResponse(
        observation_spaces=spaces, action_space=simulator.Space(data_type=FLOAT, shape=[7])
    )
    cameras = ["image"] if kind == "openvla_oft" else ["image", "wrist"]
    fields = tiny_fields(kind, 7, cameras=cameras, state=8, chunk_length=5)
    write_tiny_robot(tmp_path / "policy", fields)
    file = read_policy_file(str(tmp_path / "policy"))
    assert file and fit(None, spec.environment, {"libero": pool}, file).cameras == spec.environment.cameras
    assert policy_config(file).prompt_ids(read_tokenizer(tmp_path / "policy"), "put the bowl on the plate")
    own = spec.environment.model_copy(update={"options": {}})
    states = simulator.Space(name="robot0_eef_quat", data_type=FLOAT, shape=[78])  # LIBERO's own state has 86
    pool.observation_spaces.append(states)
    with pytest.raises(Impossible, match="86 numbers"):
        fit(None, own, {"libero": pool}, file)


@pytest.mark.parametrize(("path", "at"), EXAMPLES)
def test_what_it_lacks_is_named(path: Path, at: int, tmp_path: Path):
    spec = read(path, tmp_path, at, **{"algorithm.options.kl_loss_coef": 0.1})
    without = {found.key for found in check(spec, fleet())}
    acts = spec.environment is not None
    assert without == {"algorithm.options.kl_loss_coef"} | ({"environment"} if acts else set())
    other = check(spec, fleet(backends=frozenset({"corridor"})))
    assert ("environment.backend" in {found.key for found in other}) == acts


def test_the_ball_can_be_brought_to_the_mark_within_an_episode():
    """By who sees what the picture shows: the way's length alone is rewarded, and the end."""
    steps = load_spec(FOLDER / "bring.yaml")["environment"]["max_episode_steps"]
    bring = runpy.run_path(str(FOLDER / "bring.py"))
    for seed in range(20):
        environment = bring["make_env"]()
        seen, _ = environment.reset(seed=seed)
        way, earned, done = environment.way, 0.0, False
        for _ in range(steps):
            assert environment.observation_space.contains(seen)
            aim = environment.mark if environment.held else environment.ball
            action = np.clip((aim - environment.hand) / bring["REACH"], -1, 1).astype(np.float32)
            seen, reward, done, _, info = environment.step(action)
            earned += reward
            if done:
                break
        assert done and info["success"]
        assert earned == pytest.approx(1 + bring["REWARD"] * (way - environment.way))
