"""Episodes that are judged by their pictures, with real services: the reward service fetches them from the rollout."""

from __future__ import annotations

import json
import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness.environments import pictures
from harness.fleet import Fleet
from harness.gate import Gate
from harness.ledger import audit
from headrace_robots.reward.network import Labelled, train
from headrace_servicekit.rpc.episodes import INLINE_BYTES

pytestmark = pytest.mark.usefixtures("one_simulator")
TASK = f"{pictures.__file__}:make_env"
STEPS, BATCH, LONGEST, MIDDLE = 2, 4, 48, -0.5
TOLD = """
def score(prompt, completion, reference, metadata):
    if '"return"' in completion and metadata.get("instruction") != "push it":
        raise ValueError(f"the task is not told: {metadata}")
    return 0.0
"""


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of pictures whose square is right of MIDDLE."""
    directory = tmp_path_factory.mktemp("success") / "square"
    environment, random, episodes = pictures.make_env(), np.random.default_rng(0), []
    for seed in range(40):
        environment.reset(seed=seed)
        places_N = random.uniform(-1.0, 0.5, 8)
        frames = []
        for place in places_N:
            environment._place = float(place)
            frames.append(environment.render())
        episodes.append(Labelled(np.stack(frames), places_N > MIDDLE))
    config = train("image", episodes, directory, steps=150, heldout=0.2, seed=0, pixels=48)
    assert config.errors["right"][0] > 0.85
    return directory


def spec(classifier: Path, *more: dict[str, Any], **algorithm: Any) -> dict[str, Any]:
    """A short run from pictures that learns from the classifier's verdicts; `more` scorers do not count."""
    judged = {"name": "success_classifier", "options": {"path": str(classifier)}}
    return {
        "name": "judged-by-pictures",
        "workflow": "embodied",
        "steps": STEPS,
        "model": {"policy": {"kind": "cnn", "hidden": [16], "features": 16, "log_std": -2.0}},
        "environment": {
            "tasks": [TASK],
            "count": 4,
            "max_episode_steps": LONGEST,
            "cameras": {"image": "front"},
            "instructions": {TASK: "push it"},
        },
        "data": {"heldout": 2, "options": {"starts": 64}},
        "algorithm": {"name": "ppo", "group_size": 1, "prompts_per_step": BATCH} | algorithm,
        "reward": {
            "pictures": 1,
            "timeout_s": 900.0,
            "failed_reward": -1.0,
            "scorers": [judged, *({**each, "weight": 0.0} for each in more)],
            "evaluation": [{"name": "episode"}],
        },
        "optimizer": {"lr": 1e-3},
        "evaluation": {"every": STEPS},
        "checkpoint": {"interval_steps": STEPS},
        "export": True,
    }


def trajectories(run: Any) -> list[dict[str, Any]]:
    """The run's own file of them."""
    lines = (Path(run.run_directory) / "trajectories.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def told_rightly(run: Any) -> Iterator[bool]:
    """Of episodes whose pictures stay with the rollout, and whose square is well off the middle: whether the reward is
    what its last picture shows.
    """
    environment = pictures.make_env()
    for found in trajectories(run):
        episode = json.loads(found["completion"])
        if (episode["steps"] * pictures.SIZE**2 * 3) <= INLINE_BYTES or episode["success"]:
            continue
        environment.reset(seed=int(re.findall(r"seed (\d+)", json.dumps(found))[0]))
        place = environment._place + episode["return"]
        if place > -0.9 and abs(place - MIDDLE) > 0.1:
            yield found["reward"] == float(place > MIDDLE)


def test_large_pictures_reach_the_scorer_and_their_verdicts_are_learned_from(
    fleet: Fleet, classifier: Path, tmp_path_factory: pytest.TempPathFactory
):
    told = tmp_path_factory.mktemp("told") / "told.py"
    told.write_text(TOLD)
    given = spec(classifier, {"name": f"{told}:score"}, options={"score": "replace"})
    run = fleet.succeed(fleet.submit(given))
    assert len(audit(fleet, run).trained) == STEPS * BATCH
    assert (Path(run.export_path) / "policy.json").is_file()
    right = [*told_rightly(run)]
    assert len(right) >= 2 and all(right), right


@pytest.mark.nightly  # quick: the run above; test_fault_kills kills a reward service of texts
def test_a_killed_reward_service_costs_no_verdict_and_the_store_has_each_once(
    fleet: Fleet, classifier: Path, gate: Gate
):
    (held,) = gate.reward["scorers"]
    options = {"score": "replace", "batch_size": 16, "critic_hidden": [16], "updates_per_action": 0.02}
    given = spec(classifier, held, name="sac", options=options)
    given["model"]["policy"] = {"kind": "cnn", "hidden": [16], "features": 16, "head": "squashed"}
    gate.hold_after(BATCH + 2)
    run = fleet.submit(given)
    gate.wait_until_held()
    killed = fleet.kill("reward-0")
    fleet.replaced("reward-0", killed)
    gate.open()
    run = fleet.succeed(run)
    found = audit(fleet, run)
    assert len(found.trained) == STEPS * BATCH and not found.abandoned
    rewards = [each["reward"] for each in trajectories(run)]
    assert {*rewards} <= {0.0, 1.0}, "no verdict failed, which would be worth -1"
    (path,) = (fleet.data_dir / "runs" / run.id / "replay").glob("*.sqlite")
    with closing(sqlite3.connect(path)) as file:
        earned = [total for (total,) in file.execute("SELECT total FROM episodes ORDER BY prompt, sample")]
    assert sorted(earned) == sorted(rewards), "what an episode earned is its score alone"
