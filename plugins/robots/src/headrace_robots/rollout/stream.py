"""One RunEpisodes stream: groups of start states for the runner, trajectories of episodes back."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import grpc
from headrace.common.v1 import common_pb2
from headrace.rollout.v1 import rollout_pb2
from headrace_rollout.engines.samples import SlotKey
from headrace_rollout.environments.pool import Pool
from headrace_rollout.environments.pools import SimulateStage
from headrace_rollout.streams.base import SampleStream, Serving
from headrace_rollout.wire import duration_of, fill_key, invalid, refusals, sample_message
from headrace_servicekit.rpc.client import MAX_MESSAGE_BYTES
from headrace_servicekit.rpc.digests import digest_bytes
from headrace_servicekit.rpc.episodes import INLINE_BYTES, Episode, encode_episode
from headrace_servicekit.rpc.errors import ServiceError
from headrace_servicekit.rpc.requests import check_number

from headrace_robots.rollout.runner import EndedEpisode, EpisodeSample, Plan
from headrace_robots.rollout.workload import RobotRun

MAX_TRAJECTORY_BYTES = MAX_MESSAGE_BYTES - (1 << 20)
"""A message holds one, and what is said beside it."""


class EpisodeStream(SampleStream[EndedEpisode | Pool, rollout_pb2.RunEpisodesResponse]):
    """The life of a RunEpisodes stream. A pool among its outputs was lost."""

    def __init__(self, run: RobotRun, opening: rollout_pb2.RunEpisodesOpen, serving: Serving) -> None:
        super().__init__(run, opening, serving)
        self._engine, self._policy_number = run.engine, opening.policy_number
        self._greedy, self._encode = opening.greedy, run.encode
        plan = Plan(
            policy_number=opening.policy_number,
            seed=opening.seed,
            environment=run.engine.environment,
            views=run.engine.views,
            sink=lambda output: self._inbox.put_nowait([output]),
            failed=self._inbox.put_nowait,
            pool_lost=lambda pool: self._inbox.put_nowait([pool]),
            holds=self._holds,
            until_success=opening.until_success,
            horizon=0 if opening.evaluation else run.engine.environment.horizon,
        )
        self._runner = run.engine.run_episodes(plan, opening.pools)
        self._simulate, self._acted_s = SimulateStage(run.engine.pools), run.engine.figures.policy_s

    async def _submit(self, request: rollout_pb2.AssignGroups) -> None:
        samples = list(samples_of(request.groups, greedy=self._greedy, encode=self._encode))
        self._serving.fence.check(self._header, lease=True)
        if self._revoking:  # What is not begun is assigned elsewhere.
            return
        with refusals():
            self._runner.check(samples)
            self._outstanding += len(samples)
            self._engine.submit(self._runner, self._policy_number, samples)

    async def _abort(self) -> None:
        self._runner.stop(None)

    async def _leave(self) -> None:
        await self._engine.leave(self._runner)

    def _size(self, output: EndedEpisode | Pool) -> int:
        if not isinstance(output, EndedEpisode) or output.episode is None:
            return 0
        return episode_bytes(output.episode) + len(output.video)

    def _respond(self, outputs: Sequence[EndedEpisode | Pool]) -> rollout_pb2.RunEpisodesResponse | None:
        response = rollout_pb2.RunEpisodesResponse(revoked=self._revoked)
        for output in outputs:
            if isinstance(output, Pool):
                response.lost_pools.append(output.name)
                self._reading = False
                continue
            self._outstanding -= 1
            self._add(response, output)
        said = response.chunks or response.partials or response.lost_pools or response.revoked
        if not said:
            return None
        acted_s = self._engine.figures.policy_s
        response.stages.add(stage="act", wall_time=duration_of(acted_s - self._acted_s))
        self._acted_s = acted_s
        self._simulate.tell(response.stages)
        return response

    def _add(self, response: rollout_pb2.RunEpisodesResponse, output: EndedEpisode) -> None:
        sample = output.sample
        trajectory = self._finished(output)
        if trajectory is None:
            response.partials.add(sample=sample_message(sample.key), attempt=sample.attempt)
            return
        self._retain(trajectory)
        self._engine.figures.episodes += 1
        self._engine.figures.environment_steps += output.episode.steps if output.episode else 0
        response.chunks.add(
            sample=trajectory.sample,
            attempt=sample.attempt,
            policy_number=self._policy_number,
            finished=trajectory,
        )
        if output.video:
            size = trajectory.ByteSize() + len(output.video)
            if size > MAX_TRAJECTORY_BYTES:
                raise _too_large(size, sample)
            response.videos.add(sample=trajectory.sample, content=output.video)

    def _finished(self, output: EndedEpisode | Pool) -> common_pb2.Trajectory | None:
        if isinstance(output, Pool) or (output.episode is None and not output.failure):
            return None
        if not self._evaluation:
            hold = self._serving.caches.blobs.hold
            return trajectory_of(output, self._policy_number, self._serving.producer, hold)
        # What an evaluation made is not retained: it has its bodies with it, as far as they travel.
        if output.episode is not None and episode_bytes(output.episode) > MAX_TRAJECTORY_BYTES:
            output = replace(output, episode=without_large(output.episode))
        return trajectory_of(output, self._policy_number, self._serving.producer)


def samples_of(
    groups: Iterable[rollout_pb2.GroupAssignment], *, greedy: bool, encode: Callable[[str], tuple[int, ...]]
) -> Iterable[EpisodeSample]:
    """The samples of an assignment, in order. Raises INVALID."""
    for group in groups:
        if group.prompt.WhichOneof("form") != "episode":
            raise invalid("prompt: give episode, where an episode begins; this run's policy is a robot's")
        check_number("prompt_ordinal", group.prompt_ordinal)
        check_number("prompt.episode.seed", group.prompt.episode.seed)
        prompt_ids = encode(group.prompt.episode.instruction)
        for sample in group.samples:
            check_number("samples.sample_index", sample.sample_index)
            key = SlotKey(group.prompt_ordinal, sample.sample_index)
            yield EpisodeSample(
                key, sample.attempt, group.prompt.episode, prompt_ids, greedy or sample.greedy
            )


def trajectory_of(
    output: EndedEpisode,
    policy_number: int,
    producer: str,
    hold: Callable[[memoryview], common_pb2.BlobRef] | None = None,
) -> common_pb2.Trajectory:
    """A finished output as a trajectory: the instruction's ids, if any, then the actions; `hold` as `encode_episode`.

    Raises ServiceError TRAJECTORY_TOO_LARGE.
    """
    trajectory = common_pb2.Trajectory(attempt=output.sample.attempt, producer=producer)
    fill_key(trajectory.sample, output.sample.key)
    branch = trajectory.branches.add()
    if output.sample.prompt_ids:
        branch.segments.add().tokens.token_ids.extend(output.sample.prompt_ids)
    text: dict[str, float | bool | int | str | None]
    if (episode := output.episode) is not None:
        segment = branch.segments.add(policy_number=policy_number)
        segment.actions.CopyFrom(encode_episode(episode, hold))
        ended = (
            common_pb2.FINISH_REASON_TERMINATED if episode.terminated else common_pb2.FINISH_REASON_TRUNCATED
        )
        trajectory.finish_reason = ended
        text = {
            "return": output.before + episode.total_reward,
            "success": output.success,
            "steps": episode.steps,
        }
        if episode.intervened_TC is not None:
            text |= {"interventions": int(episode.intervened_TC.sum()), "author": episode.author}
        if output.success_at_end is not None:
            text["success_at_end"] = output.success_at_end
    else:
        trajectory.finish_reason = common_pb2.FINISH_REASON_ERROR
        text = {"return": 0.0, "success": False, "steps": 0, "error": output.failure}
    body = trajectory.SerializeToString(deterministic=True)
    if len(body) > MAX_TRAJECTORY_BYTES:
        raise _too_large(len(body), output.sample)
    # Before completion_text, which no digest covers.
    trajectory.body_digest = digest_bytes(body)
    trajectory.completion_text = json.dumps(text)
    return trajectory


def episode_bytes(episode: Episode) -> int:
    """About its bytes on the wire."""
    arrays = [*episode.observation.values(), *episode.sampled.values(), episode.executed_TCA]
    return sum(array.nbytes for array in arrays)


def without_large(episode: Episode) -> Episode:
    """The episode without the observations that do not travel in a message; its video shows them."""
    small = {name for name, array in episode.observation.items() if array.nbytes <= INLINE_BYTES}
    seen, last = (
        {name: array for name, array in arrays.items() if name in small}
        for arrays in (episode.observation, episode.final_observation)
    )
    return replace(episode, observation=seen, final_observation=last)


def _too_large(size: int, sample: EpisodeSample) -> ServiceError:
    return ServiceError(
        grpc.StatusCode.INVALID_ARGUMENT,
        "TRAJECTORY_TOO_LARGE",
        f"an episode of {sample.start.task!r} has {size} bytes beside what was seen, with its video, and "
        f"{MAX_TRAJECTORY_BYTES} travel: lower environment.max_episode_steps",
    )
