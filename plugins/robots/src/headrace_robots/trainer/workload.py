"""What a trainer is told of robots: the algorithms of episodes, and which runs learn from them. Loads no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace_servicekit.registry import Options, plugin
from headrace_trainer.workloads import Workload
from typing_extensions import override

from headrace_robots import LOG
from headrace_robots.trainer.algorithms import EPISODE_ALGORITHMS

if TYPE_CHECKING:
    from headrace_schema.openings import TrainerConfig
    from headrace_trainer.kinds._base import RunKind


@plugin()
class Robots(Workload):
    """Runs that learn from episodes of robot policies."""

    def __init__(self, options: Options) -> None:
        """Takes no options."""

    @override
    def facets(self) -> dict[str, list[str]]:
        known = EPISODE_ALGORITHMS
        return {
            "episode_algorithms": known.names(),
            "episode_algorithm_options": known.capabilities(LOG.warning),
            "episode_algorithm_features": known.features(known.names()),
        }

    @override
    def run_kind(self, config: TrainerConfig) -> RunKind | None:
        from headrace_robots.policies.directory import policy_of

        policy = policy_of(config.model)
        if policy is None:
            return None
        from headrace_robots.trainer.kind import EpisodesRun

        return EpisodesRun(config, policy)
