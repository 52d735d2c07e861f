"""Algorithms that learn from episodes of robot policies, and the registry that finds them by name.

Importing this loads no torch; building one does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace_servicekit.registry import Registry
from headrace_trainer.algorithms import ALGORITHMS, built
from headrace_trainer.errors import Refusal

if TYPE_CHECKING:
    from headrace_schema.sections.learning import AlgorithmSection

    from headrace_robots.trainer.algorithms._base import EpisodeAlgorithm

OFF_POLICY = ("sac", "rlpd", "crossq", "td3_bc", "iql", "dagger", "success_cloning", "recap")
"""Those that learn from the replay store."""

EPISODE_ALGORITHMS: Registry[EpisodeAlgorithm] = Registry(
    "headrace.episode_algorithms",
    "algorithm of episodes",
    "algorithm.name",
    "algorithm.options",
    {name: f"headrace_robots.trainer.algorithms.plugins:{name.upper()}" for name in ("grpo", "ppo", "sft")}
    | {name: f"headrace_robots.trainer.off_policy.plugins:{name.upper()}" for name in OFF_POLICY},
)


def build_episode_algorithm(section: AlgorithmSection) -> EpisodeAlgorithm:
    """The algorithm that the section names, with its options. Raises Refusal INVALID, naming the key."""
    known = EPISODE_ALGORITHMS.names()
    if section.name not in known and section.name in ALGORITHMS.names():
        raise _unfit("name", f"{section.name} learns from answers, not from episodes; use {', '.join(known)}")
    algorithm = built(EPISODE_ALGORITHMS, section)
    if section.group_size < algorithm.least_group:
        raise _unfit(
            "group_size",
            f"{section.name} compares the episodes of a start state, and {section.group_size} is too few; use at "
            f"least {algorithm.least_group}",
        )
    return algorithm


def _unfit(key: str, problem: str) -> Refusal:
    return Refusal("INVALID", f"algorithm.{key}: {problem}", "invalid", key=f"algorithm.{key}")
