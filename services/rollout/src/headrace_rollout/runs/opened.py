"""An open run: what holds its policy, the trajectories that it keeps, and what its engine has done.

Knows no gRPC call and no torch.
"""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import grpc
from headrace.common.v1 import common_pb2
from headrace.rollout.v1 import rollout_pb2
from headrace_schema.openings import RolloutConfig
from headrace_servicekit.memory.blobs import BlobStore
from headrace_servicekit.rpc.episodes import bodies_of
from headrace_servicekit.rpc.errors import ServiceError
from headrace_servicekit.weights.receiving import ways_of
from headrace_servicekit.weights.ways import Links, Way
from typing_extensions import override

from headrace_rollout.engines.base import Engine, PolicyHolder, TellsLikeliest, device_of
from headrace_rollout.wire import duration_of, invalid

if TYPE_CHECKING:
    import torch
    from headrace_modelkit.tokenizer import TextCodec

    from headrace_rollout.engines.samples import Stream
    from headrace_rollout.environments.pools import Pools
    from headrace_rollout.sessions.drivers.base import Driver, Put
    from headrace_rollout.sessions.drivers.online import Desk
    from headrace_rollout.sessions.turns import Player
    from headrace_rollout.streams.base import AnyStream, SampleStream, Serving

RETENTION_BYTES = 1 << 30
"""Trajectories that an instance keeps for one run, in bytes, before it takes no more work."""
STREAM_END_S = 10.0
"""How long a stream may take to hand out its partial outputs when its run is closed."""


class Retention:
    """Finished trajectories of one run, kept by their producer until the ledger says TRAINED or DROPPED.

    One a slot, that of the latest attempt; in host memory, counted against a budget of bytes with what they refer to.
    """

    def __init__(self, budget_bytes: int, blobs: BlobStore | None = None) -> None:
        self.budget_bytes = budget_bytes
        self.size_bytes = 0
        self.blobs = blobs
        """Where the bodies are that trajectories refer to."""
        # With their sizes: a message that is asked for its size is serialised.
        self._kept: dict[tuple[int, int], tuple[common_pb2.Trajectory, int]] = {}

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def full(self) -> bool:
        """True when no more work should be taken."""
        return self.size_bytes >= self.budget_bytes

    def add(self, trajectory: common_pb2.Trajectory) -> None:
        """Keeps a trajectory; an earlier attempt at the slot goes, a later one stays."""
        slot = _slot(trajectory.sample)
        before = self._kept.get(slot)
        if before is not None and before[0].attempt > trajectory.attempt:
            self._drop(trajectory)
            return
        self.release([trajectory.sample])
        size = trajectory.ByteSize() + sum(body.size_bytes for body in bodies_of(trajectory))
        self._kept[slot] = (trajectory, size)
        self.size_bytes += size

    def has(self, prompt_ordinal: int, sample_index: int) -> bool:
        """Whether a trajectory of the slot is kept."""
        return (prompt_ordinal, sample_index) in self._kept

    def items(self) -> list[rollout_pb2.InventoryItem]:
        """The inventory, by slot."""
        return [
            rollout_pb2.InventoryItem(
                sample=kept.sample, attempt=kept.attempt, body_digest=kept.body_digest, size_bytes=size
            )
            for _, (kept, size) in sorted(self._kept.items())
        ]

    def fetch(
        self, samples: Iterable[common_pb2.SlotKey], most_bytes: int
    ) -> Iterator[rollout_pb2.FetchTrajectoriesResponse]:
        """The trajectories of the given slots that are kept now, in responses of `most_bytes` or one trajectory."""
        found = [self._kept[slot] for slot in map(_slot, samples) if slot in self._kept]
        response, size = rollout_pb2.FetchTrajectoriesResponse(), 0
        for trajectory, own_size in found:
            if size and size + own_size > most_bytes:
                yield response
                response, size = rollout_pb2.FetchTrajectoriesResponse(), 0
            response.trajectories.append(trajectory)
            size += own_size
        if size:
            yield response

    def release(self, samples: Iterable[common_pb2.SlotKey]) -> None:
        """Ends retention of the given slots."""
        for sample in samples:
            trajectory, size = self._kept.pop(_slot(sample), (None, 0))
            self.size_bytes -= size
            if trajectory is not None:
                self._drop(trajectory)

    def clear(self) -> None:
        """Ends retention of all."""
        self.release([trajectory.sample for trajectory, _ in [*self._kept.values()]])

    def _drop(self, trajectory: common_pb2.Trajectory) -> None:
        for body in bodies_of(trajectory):
            assert self.blobs is not None
            self.blobs.release(body)


@dataclass(frozen=True, eq=False)
class OpenedRun:
    """What an instance holds for its run: a TextRun, ConversationRun or a workload's, as `opening.open_run` decides."""

    name: str
    config: RolloutConfig
    engine: PolicyHolder
    retention: Retention = field(default_factory=lambda: Retention(RETENTION_BYTES), kw_only=True)
    streams: set[AnyStream] = field(default_factory=set, kw_only=True)
    _reported: dict[str, float] = field(default_factory=dict, kw_only=True)
    _told: dict[str, float] = field(default_factory=dict, kw_only=True)

    @cached_property
    def ways(self) -> list[Way]:
        """The ways in which versions come, which remember what they took."""
        chosen = self.config.weights
        links = Links(chosen.whole_every, always=chosen.delta == "always")
        if not {"collective", "cuda_ipc"} & set(chosen.transports):
            return ways_of(chosen.transports, links)
        from headrace_modelkit.broadcasting import Broadcasts
        from headrace_modelkit.device_memory import DeviceMaps

        def device() -> torch.device | None:
            return device_of(self.engine)

        maps = DeviceMaps(lambda: device_of(self.engine, maps=True), opens=lambda: device() is not None)
        relays = getattr(self.engine, "relays", None)
        groups = Broadcasts(device)
        if relays is not None:
            from headrace_rollout.engines.hosted.relaying import Relayed

            groups = Relayed(relays)
        return ways_of(chosen.transports, links, groups, maps)

    @property
    def max_context_tokens(self) -> int:
        """Tokens of prompt and answer; 0 for a policy that has no context."""
        return 0

    @property
    def text(self) -> TextRun:
        """This run, if its policy is a language model; else raises ServiceError WRONG_POLICY."""
        raise _wrong_policy(
            "the run's policy acts in environments: call RunEpisodes; it generates and scores no text"
        )

    def run_episodes(
        self, opening: rollout_pb2.RunEpisodesOpen, serving: Serving
    ) -> SampleStream[Any, rollout_pb2.RunEpisodesResponse]:
        """A RunEpisodes stream, if the run's policy acts in environments; else raises ServiceError WRONG_POLICY."""
        raise _wrong_policy("the run's policy is a language model: call Generate; episodes need model.policy")

    def stop_waiting(self) -> None:
        """Samples that wait for somebody outside come back as stopped."""

    async def close(self) -> None:
        """Ends the engine and what it speaks to, and frees its memory."""
        await self.engine.close()

    def metrics(self) -> common_pb2.StageMetrics | None:
        """The metrics of the generate stage since the last call; None when nothing was sampled."""
        now = self._figures()
        metrics = self._metrics_of({name: value - self._reported.get(name, 0) for name, value in now.items()})
        if not metrics.items and not metrics.tokens:
            return None
        self._reported.update(now)
        metrics.stage = "generate"
        metrics.peak_memory_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        metrics.values["retained_trajectories"] = len(self.retention)
        metrics.values["retained_bytes"] = self.retention.size_bytes
        return metrics

    def _figures(self) -> dict[str, float]:
        """What the engine has done since it was built."""
        raise NotImplementedError

    def _metrics_of(self, figures: Mapping[str, float]) -> common_pb2.StageMetrics:
        """Differences of `_figures` as metrics."""
        raise NotImplementedError

    async def end_streams(self) -> None:
        """Ends all streams; one whose caller does not read is not waited for after STREAM_END_S."""
        streams = list(self.streams)
        for stream in streams:
            stream.end()
        await _until_ended(streams, STREAM_END_S)

    async def revoke_streams(self, epoch: int, notice_s: float) -> None:
        """Ends the streams under a lease; one whose caller does not read is not waited for after the notice."""
        streams = [stream for stream in self.streams if stream.lease_epoch == epoch]
        for stream in streams:
            await stream.revoke()
        await _until_ended(streams, min(max(notice_s, 1.0), STREAM_END_S))


@dataclass(frozen=True, eq=False)
class TextRun(OpenedRun):
    """A run whose policy is a language model."""

    engine: Engine
    codec: TextCodec
    teacher: TellsLikeliest | None = field(default=None, kw_only=True)
    """Reads what has ended: trajectories carry what it finds likeliest."""

    @property
    @override
    def max_context_tokens(self) -> int:
        return self.engine.max_context_tokens

    @property
    @override
    def text(self) -> TextRun:
        return self

    def driver(self, opening: rollout_pb2.GenerateOpen, stream: Stream, put: Put, serving: Serving) -> Driver:
        """What makes the trajectories of a stream. Raises INVALID."""
        from headrace_rollout.sessions.drivers.base import PromptDriver

        if opening.pools:
            raise invalid("pools: the run's config names no environment; name none")
        return PromptDriver(self, opening, stream, put, serving.caches)

    def tell_engine(self, response: rollout_pb2.GenerateResponse) -> None:
        """Adds what the engine's own processes went through since the run's last message, and what it drafted."""
        figures = self.engine.figures
        now = {
            "engine_restarts": figures.restarts,
            "engine_asleep_bytes": figures.asleep_bytes,
            "drafted_tokens": figures.drafted_tokens,
            "accepted_tokens": figures.accepted_tokens,
        }
        news = {name: value - self._told.get(name, 0) for name, value in now.items()}
        if any(news.values()):
            self._told.update(now)
            told = {name: value for name, value in news.items() if value}
            response.stages.add(stage="generate", values=told)

    @override
    def _figures(self) -> dict[str, float]:
        return asdict(self.engine.figures)

    @override
    def _metrics_of(self, figures: Mapping[str, float]) -> common_pb2.StageMetrics:
        busy_s = figures["busy_s"]
        values = {
            "prefill_tokens": figures["prefill_tokens"],
            "shared_prompt_tokens": figures["shared_prompt_tokens"],
            "moved_tokens": figures["moved_tokens"],
            "decode_steps": figures["decode_steps"],
            "drafted_tokens": figures["drafted_tokens"],
            "accepted_tokens": figures["accepted_tokens"],
            **ratio_of("mean_batch_rows", figures["decode_rows"], figures["decode_steps"]),
            **ratio_of("tokens_per_second", figures["sampled_tokens"], busy_s),
        }
        samples, tokens = int(figures["samples"]), int(figures["sampled_tokens"])
        return common_pb2.StageMetrics(
            wall_time=duration_of(busy_s), items=samples, tokens=tokens, values=values
        )


@dataclass(frozen=True, eq=False)
class ConversationRun(TextRun):
    """A run whose policy is a language model that speaks with environments."""

    policy: Player
    pools: Pools
    others: Mapping[str, Player] = field(default_factory=dict)
    """Who plays the roles that the config names."""

    @override
    def driver(self, opening: rollout_pb2.GenerateOpen, stream: Stream, put: Put, serving: Serving) -> Driver:
        if self.config.agent is not None:
            from headrace_rollout.sessions.drivers.agent import AgentDriver

            return AgentDriver(self, opening, stream, put, serving.endpoint)
        from headrace_rollout.sessions.drivers.environment import ConversationDriver

        return ConversationDriver(self, opening, stream, put)

    @override
    async def close(self) -> None:
        await self.pools.close()
        await super().close()


@dataclass(frozen=True, eq=False)
class OnlineRun(TextRun):
    """A run whose policy is a language model that clients from outside speak with."""

    desk: Desk

    @override
    def driver(self, opening: rollout_pb2.GenerateOpen, stream: Stream, put: Put, serving: Serving) -> Driver:
        from headrace_rollout.sessions.drivers.online import OnlineDriver

        return OnlineDriver(self, stream, put)

    @override
    def stop_waiting(self) -> None:
        self.desk.stop()

    @override
    async def close(self) -> None:
        self.desk.close()
        await super().close()


def ratio_of(name: str, sum_of: float, count: float) -> dict[str, float]:
    """A mean by its name; nothing where nothing was counted."""
    return {name: sum_of / count} if count else {}


def _slot(sample: common_pb2.SlotKey) -> tuple[int, int]:
    return sample.prompt_ordinal, sample.sample_index


async def _until_ended(streams: Sequence[AnyStream], timeout_s: float) -> None:
    waits = [asyncio.ensure_future(stream.ended.wait()) for stream in streams]
    if waits:
        _, late = await asyncio.wait(waits, timeout=timeout_s)
        for wait in late:
            wait.cancel()


def _wrong_policy(message: str) -> ServiceError:
    return ServiceError(grpc.StatusCode.FAILED_PRECONDITION, "WRONG_POLICY", message)
