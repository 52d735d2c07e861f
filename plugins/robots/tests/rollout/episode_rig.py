"""A rollout instance with a robot run, and a stream that collects episodes."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from dataclasses import dataclass, field

import grpc
from headrace.common.v1 import common_pb2
from headrace.rollout.v1 import rollout_pb2
from headrace_robots.policies.directory import policy_config
from headrace_servicekit.rpc.episodes import Episode, decode_episode
from rollout_calls import HEADER
from simulator_rig import WAIT_S

PENDULUM = {"kind": "mlp", "bounds": {"low": [-2.0], "high": [2.0]}, "state_size": 3, "hidden": [16]}
WALKER = {"kind": "mlp", "bounds": {"low": [-1.0] * 2, "high": [1.0] * 2}, "state_size": 3, "hidden": [8]}


def new_policy(fields=PENDULUM, seed=7):
    return policy_config(fields).build(seed).eval()


async def open_robot(rollout, policy=PENDULUM, **environment):
    """Opens a run with a robot policy; no version is installed."""
    section = {"backend": "gymnasium", "tasks": ["Pendulum-v1"], "alternating": 2, **environment}
    config = {"model": {"policy": policy}, "environment": section, "seed": 7}
    return await rollout.stub.OpenRun(
        rollout_pb2.OpenRunRequest(header=HEADER, config_json=json.dumps(config))
    )


def starts(prompts, samples=1, *, task="Pendulum-v1", attempt=1, greedy=False):
    """Groups whose prompt number is the seed of their start state."""
    return [
        rollout_pb2.GroupAssignment(
            prompt_ordinal=ordinal,
            prompt=rollout_pb2.Prompt(episode=rollout_pb2.EpisodeStart(task=task, seed=ordinal)),
            samples=[
                rollout_pb2.SampleAssignment(sample_index=index, attempt=attempt, greedy=greedy)
                for index in range(samples)
            ],
        )
        for ordinal in prompts
    ]


@dataclass
class EpisodeCall:
    """A RunEpisodes stream."""

    call: grpc.aio.StreamStreamCall
    trajectories: dict[tuple[int, int], common_pb2.Trajectory] = field(default_factory=dict)
    partials: list[rollout_pb2.PartialSample] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    videos: dict[int, bytes] = field(default_factory=dict)
    revoked: bool = False
    figures: Counter[str] = field(default_factory=Counter)
    """Sums of the values of its stages."""

    async def assign(self, groups) -> None:
        await self.call.write(rollout_pb2.RunEpisodesRequest(assign=rollout_pb2.AssignGroups(groups=groups)))

    async def read_until(self, condition) -> None:
        async with asyncio.timeout(WAIT_S):
            while not condition(self):
                response = await self.call.read()
                if response is grpc.aio.EOF:
                    return
                assert not self.revoked, "a revoked stream has ended"
                for chunk in response.chunks:
                    key = (chunk.sample.prompt_ordinal, chunk.sample.sample_index)
                    assert key not in self.trajectories
                    self.trajectories[key] = chunk.finished
                self.partials += response.partials
                self.lost += response.lost_pools
                for stage in response.stages:
                    self.figures.update(stage.values)
                self.videos |= {video.sample.prompt_ordinal: video.content for video in response.videos}
                self.revoked = response.revoked

    async def read_all(self) -> dict[tuple[int, int], common_pb2.Trajectory]:
        await self.read_until(lambda _: False)
        return self.trajectories


async def run_episodes(rollout, pools, groups=(), *, half_close=True, **options) -> EpisodeCall:
    """A stream with groups assigned."""
    call = EpisodeCall(rollout.stub.RunEpisodes())
    opening = rollout_pb2.RunEpisodesOpen(
        header=HEADER, pools=pools, **{"policy_number": 1, "seed": 7, **options}
    )
    await call.call.write(rollout_pb2.RunEpisodesRequest(open=opening))
    if groups:
        await call.assign(groups)
    if half_close:
        await call.call.done_writing()
    return call


def episode_of(trajectory) -> Episode:
    (segment,) = trajectory.branches[0].segments
    assert segment.policy_number == 1
    return decode_episode(segment.actions)
