"""Real episodes that a world model learns from: of replay stores, and of LeRobot data sets. Knows no network.

Shapes: T actions of an episode, S numbers of a state, A numbers of an action in the environment's units.
"""

from __future__ import annotations

import json
import math
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from headrace_robots.trainer.replay.records import FORMAT, Spaces
from headrace_robots.world.model import Space


class DataProblem(Exception):
    """A store or a data set that teaches nothing of this environment; the message says why, and what to do."""


@dataclass(frozen=True)
class RealEpisode:
    """What was done and what came of it. `states_TS` has a row more than there are actions, but where the episode
    terminated: what came behind its last action is not known then.
    """

    states_TS: np.ndarray
    actions_TA: np.ndarray
    rewards_T: np.ndarray
    terminated: bool


def read_episodes(source: Path, action: Space, state_size: int, reward_scale: float) -> list[RealEpisode]:
    """The episodes of a replay store's file, or of a data set's directory. Raises DataProblem.

    `reward_scale` is what a store's rewards were multiplied by.
    """
    if source.is_dir() and (source / "meta").is_dir():
        found = [*_of_data_set(source, action.size, state_size)]
    elif source.is_dir():
        files = sorted(source.glob("*.sqlite"))
        if not files:
            raise DataProblem(f"{source} is no LeRobot data set and has no *.sqlite of a run's replay store")
        found = [each for file in files for each in read_episodes(file, action, state_size, reward_scale)]
    else:
        found = [*_of_store(source, action, state_size, reward_scale)]
    if not found:
        raise DataProblem(f"{source} has no episode; give one that a run has learned from")
    return found


def _of_store(path: Path, action: Space, state_size: int, reward_scale: float) -> Iterator[RealEpisode]:
    """All that is still there, also what the store no longer draws from, while a trainer uses it or not."""
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as file:
            about = dict(file.execute("SELECT name, value FROM meta"))
            rows = file.execute(
                "SELECT chunks, terminated, body FROM episodes WHERE body != x'' ORDER BY id"
            ).fetchall()
        spaces = json.loads(about["spaces"])
        wanted = json.loads(Spaces(state_size, action.size).text())
    except (sqlite3.Error, KeyError, ValueError) as error:
        raise DataProblem(f"{path} is no replay store that can be read: {error}") from error
    if about.get("format") != str(FORMAT):
        raise DataProblem(f"{path} has the format {about.get('format')}, and {FORMAT} is read")
    if spaces["state"] != state_size or spaces["action"] != action.size:
        raise DataProblem(
            f"{path} holds episodes of {about['spaces']}, and the environment has {json.dumps(wanted)}: give the "
            "environment that it was made with, and chunks of one action"
        )
    for chunks, terminated, body in rows:
        numbers = np.frombuffer(body, np.float32)
        ends = np.cumsum([(chunks + 1) * state_size, chunks * action.size, chunks])
        if len(numbers) != ends[-1]:
            raise DataProblem(f"{path} is cut: an episode has {len(numbers)} numbers, not {ends[-1]}")
        states, actions, rewards = np.split(numbers, ends[:-1])
        yield RealEpisode(
            states.reshape(chunks + 1, state_size)[: chunks + (not terminated)],
            executed(action, actions.reshape(chunks, action.size)),
            rewards / reward_scale,
            bool(terminated),
        )


def executed(space: Space, drawn_TA: np.ndarray) -> np.ndarray:
    """What a policy's head gave the environment for what it drew: -1 to 1 between bounds, a category by its index.

    As `ActionHead.executed` and `SquashedHead.executed`, whichever drew.
    """
    low_A, high_A = space.bounds()
    bounded_A = np.isfinite(low_A) & np.isfinite(high_A)
    least_A, most_A = np.where(bounded_A, low_A, -1.0), np.where(bounded_A, high_A, 1.0)
    scaled_TA = least_A + (np.clip(drawn_TA, -1, 1) + 1) / 2 * (most_A - least_A)
    found_TA = np.where(bounded_A, scaled_TA, drawn_TA)
    if space.categories:
        first_A = np.where(np.isfinite(low_A), low_A, 0.0)
        found_TA = np.where(np.array(space.categories) > 0, first_A + drawn_TA, found_TA)
    result: np.ndarray = found_TA.astype(np.float32)
    return result


def _of_data_set(directory: Path, action_size: int, state_size: int) -> Iterator[RealEpisode]:
    try:
        from headrace_robots.demonstrations import Demonstrations, DemonstrationsNotReadable
    except ImportError as error:
        raise DataProblem(
            f"data sets need pip install 'headrace-robots[demonstrations]' ({error})"
        ) from error
    try:
        data = Demonstrations(directory)
        if (data.state_size, data.action_size) != (state_size, action_size):
            raise DataProblem(
                f"{directory} has {data.state_size} numbers of a state and {data.action_size} of an action, and the "
                f"environment {state_size} and {action_size}"
            )
        if not data.rewarded:
            raise DataProblem(
                f"{directory} states no reward of each step (next.reward); headrace demonstrations collect writes it "
                "with --noise 0"
            )
        for shown in data:
            assert shown.state_TS is not None and shown.reward_T is not None
            steps = len(shown.action_TA) if shown.terminated else len(shown.action_TA) - 1
            if steps:  # what the last action of one that was cut led to is not in the data set
                yield RealEpisode(
                    shown.state_TS.numpy()[: steps + (not shown.terminated)],
                    shown.action_TA.numpy()[:steps],
                    shown.reward_T.numpy()[:steps],
                    shown.terminated,
                )
    except DemonstrationsNotReadable as error:
        raise DataProblem(str(error)) from error


def check_finite(episodes: list[RealEpisode]) -> None:
    """Raises DataProblem for a number that is none."""
    for place, each in enumerate(episodes):
        for name in ("states_TS", "actions_TA", "rewards_T"):
            if not np.isfinite(getattr(each, name)).all():
                raise DataProblem(f"{name.partition('_')[0]} of episode {place} are not all finite")


def longest(episodes: list[RealEpisode]) -> int:
    """Actions of the longest."""
    return max(len(each.actions_TA) for each in episodes)


def mean_interval(values: list[float]) -> tuple[float, ...]:
    """The mean, and the ends of its 95% interval by the normal distribution where there are several values."""
    mean, count = float(np.mean(values)), len(values)
    if count < 2:
        return (mean,)
    half = 1.96 * float(np.std(values, ddof=1)) / math.sqrt(count)
    return mean, mean - half, mean + half
