"""LeRobot's evaluation: `python lerobot_eval.py FOLDER`, in the environment of `ci/lerobot.sh`.

Without FOLDER/exported writes FOLDER/checkpoint, a policy with random weights, by FOLDER/asked.json. Else plays the
one by LeRobot's own loop in the environments of FOLDER/push.py, from the seeds of asked.json, into played.json.
"""

from __future__ import annotations

import json
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import gymnasium
import torch
from lerobot.envs.utils import FreezeAfterEpisodeEnd
from lerobot.policies.factory import get_policy_class, make_pre_post_processors
from lerobot.processor import PolicyProcessorPipeline
from lerobot.scripts.lerobot_eval import rollout
from lerobot_side import made


def environments(folder, count, steps):
    """So many of them, each of which keeps its last observation once its episode has ended."""
    told = spec_from_file_location("push", folder / "push.py")
    module = module_from_spec(told)
    told.loader.exec_module(module)

    def one():
        limited = gymnasium.wrappers.TimeLimit(module.Push(nested=True), steps)
        limited._max_episode_steps = steps
        return FreezeAfterEpisodeEnd(limited)

    return gymnasium.vector.SyncVectorEnv([one] * count)


def played(folder, asked):
    """Return and success of the episode of each seed."""
    policy = get_policy_class(asked["family"]).from_pretrained(folder / "exported").eval()
    before, after = make_pre_post_processors(policy.config, pretrained_path=str(folder / "exported"))
    nothing = PolicyProcessorPipeline(steps=[])
    envs = environments(folder, len(asked["seeds"]), asked["steps"])
    found = rollout(envs, policy, nothing, nothing, before, after, seeds=asked["seeds"])
    ended = found["done"].int().argmax(1)
    counted = torch.arange(found["done"].shape[1]) <= ended[:, None]
    return {
        "returns": (found["reward"] * counted).sum(1).tolist(),
        "successes": (found["success"] & counted).any(1).tolist(),
        "steps": (ended + 1).tolist(),
    }


def main(folder):
    asked = json.loads((folder / "asked.json").read_text())
    if (folder / "exported").is_dir():
        (folder / "played.json").write_text(json.dumps(played(folder, asked)))
        return
    policy, config = made(asked)
    statistics = {
        key: {name: torch.tensor(values) for name, values in each.items()}
        for key, each in asked["statistics"].items()
    }
    for each in (policy, *make_pre_post_processors(config, dataset_stats=statistics)):
        each.save_pretrained(folder / "checkpoint")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
