"""SAC of stable-baselines3 on Pendulum-v1, as one JSON line: `python sb3_sac.py SEED ACTIONS [episode]`.

With `episode` its updates follow each episode, as ours do; without, each action. Needs stable-baselines3.
"""

from __future__ import annotations

import json
import sys
import time

import gymnasium as gym
import torch
from stable_baselines3 import SAC
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.monitor import Monitor

LENGTH, HELDOUT = 200, 16


def main(seed: int, actions: int, every: str) -> None:
    """As many updates as actions, from the hundredth on."""
    torch.set_num_threads(1)
    environment = Monitor(gym.make("Pendulum-v1"))
    schedule = {"train_freq": (1, "episode"), "gradient_steps": -1} if every == "episode" else {}
    model = SAC("MlpPolicy", environment, learning_rate=1e-3, learning_starts=100, seed=seed, **schedule)
    began = time.perf_counter()
    model.learn(actions)
    seconds = time.perf_counter() - began
    judge = Monitor(gym.make("Pendulum-v1"))
    judge.reset(seed=seed + 10_000)
    heldout, _ = evaluate_policy(model, judge, n_eval_episodes=HELDOUT, deterministic=True)
    found = {"returns": environment.get_episode_rewards(), "heldout": heldout, "seconds": seconds}
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), "".join(sys.argv[3:]))
