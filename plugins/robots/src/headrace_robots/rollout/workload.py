"""What a rollout is told of robots: which runs have a robot policy, and how they are opened. Loads no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from headrace.common.v1 import common_pb2
from headrace.rollout.v1 import rollout_pb2
from headrace_modelkit.errors import ModelNotReadable
from headrace_rollout.runs.opened import RETENTION_BYTES, OpenedRun, Retention, ratio_of
from headrace_rollout.wire import duration_of
from headrace_rollout.workloads import ActingPolicy, Workload
from headrace_servicekit.instance import host_memory
from headrace_servicekit.registry import Options, plugin
from typing_extensions import override

if TYPE_CHECKING:
    import torch
    from headrace_rollout.streams.base import SampleStream, Serving
    from headrace_schema.openings import RolloutConfig
    from headrace_schema.sections.generating import ModelSection
    from headrace_servicekit.memory.blobs import BlobReader

    from headrace_robots.policies.policy import PolicyConfig, RobotPolicy
    from headrace_robots.rollout.engine import RobotEngine

EPISODES_SHARE = 0.125
"""Share of the host's free memory that an instance's episodes may have before it takes no more work: they have images.
"""


@plugin()
class Robots(Workload):
    """Runs whose policy is a robot's."""

    def __init__(self, options: Options) -> None:
        """Takes no options."""

    @override
    def policy_of(self, section: ModelSection) -> NamedPolicy | None:
        from headrace_robots.policies.directory import policy_of

        config = policy_of(section)
        return None if config is None else NamedPolicy(section, config)


@dataclass(frozen=True)
class NamedPolicy(ActingPolicy):
    """A robot policy as a run's `model` names it."""

    section: ModelSection
    config: PolicyConfig

    @override
    def initial(self, seed: int) -> tuple[RobotPolicy, torch.dtype]:
        from headrace_robots.policies.directory import initial_policy, policy_type

        return initial_policy(self.section, seed), policy_type(self.config, self.section)

    @override
    def open_run(
        self,
        name: str,
        config: RolloutConfig,
        devices: tuple[torch.device, ...],
        blobs: BlobReader,
        token: str | None,
    ) -> RobotRun:
        from headrace_robots.policies.directory import policy_type
        from headrace_robots.policies.language import instruction_encoder
        from headrace_robots.rollout.engine import RobotEngine

        if config.environment is None:
            raise ModelNotReadable("environment: a robot policy acts in environments; name them")
        encode = instruction_encoder(self.config, self.section.path)
        dtype = policy_type(self.config, self.section)
        room = int(EPISODES_SHARE * host_memory().free_bytes)
        engine = RobotEngine(self.config, dtype, config.environment, devices, blobs, token)
        return RobotRun(name, config, engine, encode, retention=Retention(max(RETENTION_BYTES, room)))


@dataclass(frozen=True, eq=False)
class RobotRun(OpenedRun):
    """A run whose policy is a robot's."""

    engine: RobotEngine
    encode: Callable[[str], tuple[int, ...]]
    """Ids of an instruction; none for a policy that reads no language."""

    @override
    def run_episodes(
        self, opening: rollout_pb2.RunEpisodesOpen, serving: Serving
    ) -> SampleStream[Any, rollout_pb2.RunEpisodesResponse]:
        from headrace_robots.rollout.stream import EpisodeStream

        return EpisodeStream(self, opening, serving)

    @override
    def _figures(self) -> dict[str, float]:
        return asdict(self.engine.figures)

    @override
    def _metrics_of(self, figures: Mapping[str, float]) -> common_pb2.StageMetrics:
        values = {
            "environment_steps": figures["environment_steps"],
            "policy_calls": figures["policy_calls"],
            **ratio_of("mean_batch_rows", figures["chunks"], figures["policy_calls"]),
        }
        policy_s, episodes = figures["policy_s"], int(figures["episodes"])
        return common_pb2.StageMetrics(wall_time=duration_of(policy_s), items=episodes, values=values)
