"""What holds a robot policy: its versions and memory in one thread, and the pools that it acts in.

Implements `engines.base.PolicyHolder`. Knows no gRPC call of the rollout service and no trajectory.
"""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from headrace.rollout.v1 import rollout_pb2
from headrace_rollout.engines.base import Freed, Policy, Refused
from headrace_rollout.engines.holding import ThreadedHolder
from headrace_rollout.engines.policy_state import require_installed
from headrace_rollout.engines.samples import SlotKey
from headrace_rollout.engines.weight_memory import HOST
from headrace_rollout.environments.pools import Pools
from headrace_schema.sections.embodied import EnvironmentSection
from headrace_servicekit.memory.blobs import BlobReader
from typing_extensions import override

from headrace_robots.rollout.model import Decisions, RobotModel, Rows, Views
from headrace_robots.rollout.runner import EpisodeRunner, EpisodeSample, Plan

if TYPE_CHECKING:
    from headrace_robots.policies.policy import PolicyConfig

QUICK_S = 0.002
"""A policy whose last pass took less acts in the event loop: the way to its thread and back would take as long. On the
host it is the CPU time that counts: a pass that waits for a core that others use is no longer one.
"""


@dataclass
class RobotFigures:
    """What a robot engine has done since it was built."""

    policy_s: float = 0.0
    policy_calls: int = 0
    chunks: int = 0
    environment_steps: int = 0
    episodes: int = 0


class RobotEngine(ThreadedHolder):
    """One robot policy, built without weights; `token` is what it shows to simulators."""

    def __init__(
        self,
        policy: PolicyConfig,
        dtype: torch.dtype,
        environment: EnvironmentSection,
        devices: tuple[torch.device, ...],
        blobs: BlobReader,
        token: str | None,
    ) -> None:
        self.figures = RobotFigures()
        self.environment = environment
        self.views = Views(policy, environment)
        self._model = RobotModel(policy, dtype, devices[0] if devices else HOST)
        super().__init__(self._model, "policy")
        self.pools = Pools(blobs, token, environment.step_timeout_s)
        self._runners: set[EpisodeRunner] = set()
        self._pass_s = math.inf

    def run_episodes(self, plan: Plan, pools: Sequence[rollout_pb2.EnvironmentPool]) -> EpisodeRunner:
        """Begins to serve a stream; `leave` ends it. Pools are used from stream to stream."""
        runner = EpisodeRunner(
            plan,
            self.pools.of(pools),
            lambda rows: self._decide(rows, plan.policy_number),
        )
        self._runners.add(runner)
        return runner

    async def leave(self, runner: EpisodeRunner) -> None:
        """Stops what the runner still does."""
        self._runners.discard(runner)
        await runner.close()

    def submit(self, runner: EpisodeRunner, policy_number: int, samples: Sequence[EpisodeSample]) -> None:
        """Queues samples; while paused they come back at once. POLICY_MISMATCH when another version is installed."""
        require_installed(self.policy, policy_number)
        runner.submit(samples, accept=not self._paused)

    @override
    async def pause(self) -> int:
        await super().pause()
        return await self.abort(None)

    @override
    async def abort(self, keys: Sequence[SlotKey] | None) -> int:
        return sum(runner.stop(keys) for runner in self._runners)

    @override
    async def release(self) -> Freed:
        await self.abort(None)
        return await super().release()

    @override
    async def close(self) -> None:
        """Pools stay open at their simulators."""
        await self.pools.close()
        await super().close()

    def _go_on(self) -> None:
        raise Refused("INVALID", "in_flight: an episode is of one version")

    def _begin_with(self, policy: Policy) -> None:
        return

    def _living(self) -> int:
        return sum(runner.living for runner in list(self._runners))

    def _stop_all(self) -> int:
        return 0  # Episodes live in the event loop: `abort` stops them.

    def _forget_work(self) -> None:
        return

    def _decide(self, rows: Rows, policy_number: int) -> Decisions | Awaitable[Decisions]:
        act = partial(self._act, rows, policy_number)
        return self._at_once(act) if self._pass_s < QUICK_S else self._call(act)

    def _act(self, rows: Rows, policy_number: int) -> Decisions:
        policy = self.policy
        if policy is None or policy.number != policy_number:
            raise Refused("POLICY_MISMATCH", f"version {policy_number} is installed no more")
        begun, used = time.perf_counter(), time.thread_time()
        decisions = self._model.act(rows)
        passed_s = time.perf_counter() - begun
        self._pass_s = time.thread_time() - used if self._model.device == HOST else passed_s
        self.figures.policy_s += passed_s
        self.figures.policy_calls += 1
        self.figures.chunks += len(rows.seen)
        return decisions
