"""Figures of episodes from what their rollouts say, and what a score is where an environment never says success."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

BEGINS = '{"return"'
"""How a rollout's words of an episode begin: no other answer is parsed."""
OUTCOME = "outcome"
"""The figure that is the success where the environment says it, and the return where it never does."""
NO_SUCCESS = "the environment never says success (info['success']): its episodes are judged by their return"


@dataclass(frozen=True)
class Told:
    """What a rollout says of an episode; None for a success that the environment never said."""

    total_reward: float
    steps: int
    success: bool | None
    success_at_end: bool | None


def told_of(completion: str) -> Told | None:
    """What a trajectory's text says of an episode; None where it is no episode, or one that failed."""
    if not completion.startswith(BEGINS):
        return None
    try:
        found: Any = json.loads(completion)
        if "error" in found:
            return None
        return Told(found["return"], found["steps"], found["success"], found.get("success_at_end"))
    except (ValueError, KeyError):
        return None


def settle_successes(completions: Sequence[str]) -> list[str]:
    """The same texts; where some episode says its success, those that do not have failed."""
    told = [told_of(each) for each in completions]
    if not says_success([each for each in told if each is not None]):
        return list(completions)
    return [
        text
        if each is None or each.success is not None
        else json.dumps({**json.loads(text), "success": False})
        for text, each in zip(completions, told, strict=True)
    ]


def figures_of(episodes: Sequence[Told]) -> dict[str, float]:
    """Means over episodes; a success that was not said in an episode, and was in another, is none."""
    if not episodes:
        return {}
    found = {
        "return": fmean(each.total_reward for each in episodes),
        "steps": fmean(each.steps for each in episodes),
    }
    if says_success(episodes):
        found["success"] = fmean(bool(each.success) for each in episodes)
    if any(each.success_at_end is not None for each in episodes):
        found["success_at_end"] = fmean(bool(each.success_at_end) for each in episodes)
    return found


def says_success(episodes: Sequence[Told]) -> bool:
    """Whether the environment ever says whether it succeeded."""
    return any(each.success is not None for each in episodes)


def measured(measure: str, episodes: Sequence[Told]) -> tuple[str, str]:
    """What a score is of that asks for the figure `measure`, and what a reader has to know of that."""
    if measure != OUTCOME or not episodes:
        return measure, ""
    if says_success(episodes):
        return "success", ""
    return "return", NO_SUCCESS
