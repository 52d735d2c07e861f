"""An open run: what holds its policy, and what it keeps, built from the run's config. Knows no gRPC calls."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import grpc
from headrace_modelkit.errors import ModelNotReadable
from headrace_schema.openings import RolloutConfig
from headrace_servicekit.instance import host_memory
from headrace_servicekit.lease.devices import gpu_uuids
from headrace_servicekit.lease.leases import Memory
from headrace_servicekit.registry import PluginError
from headrace_servicekit.rpc.blobs import BlobReader
from headrace_servicekit.rpc.errors import ServiceError

from headrace_rollout.config import RETENTION_BYTES
from headrace_rollout.engines import ENGINES
from headrace_rollout.engines.base import Engine, EngineConfig, PolicyHolder
from headrace_rollout.engines.contract import require_engine
from headrace_rollout.runs.retention import Retention

if TYPE_CHECKING:
    import torch
    from headrace_modelkit.robot.directory import AnyConfig
    from headrace_modelkit.tokenizer import TextCodec

    from headrace_rollout.robot.engine import RobotEngine

STREAM_END_S = 10.0
"""How long a stream may take to hand out its partial outputs when its run is closed."""


class LiveStream(Protocol):
    """A stream of samples that serves the run."""

    ended: asyncio.Event

    @property
    def lease_epoch(self) -> int:
        """The lease that it serves under."""

    def end(self) -> None:
        """Sends what has come back and ends."""

    async def revoke(self) -> None:
        """Stops its samples; the last message has their partial outputs and says that the lease was revoked."""


@dataclass(frozen=True, eq=False)
class OpenedRun:
    """What an instance holds for its run."""

    name: str
    config: RolloutConfig
    engine: PolicyHolder
    retention: Retention = field(default_factory=lambda: Retention(RETENTION_BYTES), kw_only=True)
    streams: set[LiveStream] = field(default_factory=set, kw_only=True)

    async def end_streams(self) -> None:
        """Ends all streams; one whose caller does not read is left behind after STREAM_END_S."""
        streams = list(self.streams)
        for stream in streams:
            stream.end()
        await _until_ended(streams, STREAM_END_S)

    async def revoke_streams(self, epoch: int, notice_s: float) -> None:
        """Ends the streams under a lease in order; one whose caller does not read within the notice is left behind."""
        streams = [stream for stream in self.streams if stream.lease_epoch == epoch]
        for stream in streams:
            await stream.revoke()
        await _until_ended(streams, min(max(notice_s, 1.0), STREAM_END_S))


@dataclass(frozen=True, eq=False)
class TextRun(OpenedRun):
    """A run whose policy is a language model."""

    engine: Engine
    codec: TextCodec


@dataclass(frozen=True, eq=False)
class RobotRun(OpenedRun):
    """A run whose policy acts in environments."""

    engine: RobotEngine
    encode: Callable[[str], tuple[int, ...]]
    """Ids of an instruction; none for a policy that reads no language."""


async def _until_ended(streams: Sequence[LiveStream], timeout_s: float) -> None:
    waits = [asyncio.ensure_future(stream.ended.wait()) for stream in streams]
    if waits:
        _, late = await asyncio.wait(waits, timeout=timeout_s)
        for wait in late:
            wait.cancel()


def open_run(
    name: str, config: RolloutConfig, leased: Sequence[str], shm_dir: Path, token: str | None
) -> OpenedRun:
    """Builds everything but the weights, on leased devices if there are any already.

    It takes seconds the first time, as it imports torch. Simulators on this host put observations below `shm_dir`, and
    are shown `token`.

    Raises ServiceError INVALID for an unknown engine or wrong options, and MODEL_NOT_READABLE.
    """
    from headrace_modelkit.robot.directory import policy_of

    try:
        policy = policy_of(config.model)
        if policy is None:
            return _text_run(name, config, leased)
        return _robot_run(name, config, policy, devices_of(leased), BlobReader(shm_dir, token), token)
    except PluginError as error:
        code = grpc.StatusCode.INVALID_ARGUMENT
        raise ServiceError(code, "INVALID", str(error), **error.metadata) from error
    except ModelNotReadable as error:
        raise ServiceError(grpc.StatusCode.INVALID_ARGUMENT, "MODEL_NOT_READABLE", str(error)) from error


def _text_run(name: str, config: RolloutConfig, leased: Sequence[str]) -> TextRun:
    from headrace_modelkit.tokenizer import load_tokenizer

    if config.environment is not None:
        raise ModelNotReadable(
            f"model.path: {config.model.path!r} holds no robot policy, and environment needs one; give a directory "
            "with policy.json, or model.policy"
        )
    chosen = ENGINES.choose(config.rollout.engine, config.rollout.engine_options)
    codec = load_tokenizer(config.model)
    settings = EngineConfig(config.model, codec, config.rollout.max_concurrency, devices_of(leased))

    def build(wanted: EngineConfig) -> Engine:
        engine = chosen.build(wanted)
        require_engine(chosen.name, engine)
        return engine

    if config.reply is not None:
        from headrace_rollout.runs.replying import conversing

        return TextRun(name, config, conversing(config, config.reply, settings, build), codec)
    return TextRun(name, config, build(settings), codec)


def _robot_run(
    name: str,
    config: RolloutConfig,
    policy: AnyConfig,
    devices: tuple[torch.device, ...],
    blobs: BlobReader,
    token: str | None,
) -> RobotRun:
    from headrace_modelkit.robot.language import instruction_encoder

    from headrace_rollout.robot.engine import RobotEngine

    if config.environment is None:
        raise ModelNotReadable("environment: a robot policy acts in environments; name them")
    encode = instruction_encoder(policy, config.model.path)
    return RobotRun(name, config, RobotEngine(policy, config.environment, devices, blobs, token), encode)


def devices_of(leased: Sequence[str]) -> tuple[torch.device, ...]:
    """torch's names of leased devices, none for none. Raises ServiceError INVALID for a GPU that is not seen."""
    from headrace_modelkit.devices import DeviceNotSeen, torch_devices

    if not leased:
        return ()
    try:
        return torch_devices(gpu_uuids(leased))
    except DeviceNotSeen as error:
        raise ServiceError(grpc.StatusCode.INVALID_ARGUMENT, "INVALID", str(error)) from error


def memory_on(leased: Sequence[str]) -> Memory:
    """What is free on leased devices, and what this process uses there."""
    from headrace_modelkit.devices import free_bytes, used_bytes

    gpus = [device for device in devices_of(leased) if device.type == "cuda"]
    if not gpus:
        return host_memory()
    return Memory(sum(map(free_bytes, gpus)), sum(map(used_bytes, gpus)))
