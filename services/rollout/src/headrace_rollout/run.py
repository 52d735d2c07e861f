"""An open run: its engine, tokenizer and custody, built from the run's config. Knows no gRPC calls."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import grpc
from headrace_modelkit.errors import ModelNotReadable
from headrace_schema.openings import RolloutConfig
from headrace_servicekit.errors import ServiceError
from headrace_servicekit.registry import PluginError

from headrace_rollout.config import CUSTODY_BYTES
from headrace_rollout.custody import Custody
from headrace_rollout.engines import ENGINES
from headrace_rollout.engines.base import Engine, EngineConfig

if TYPE_CHECKING:
    from headrace_modelkit.tokenizer import TextCodec


STREAM_END_S = 10.0
"""How long a Generate stream may take to hand out its partial outputs when its run is closed."""


class LiveStream(Protocol):
    """A Generate stream that serves the run."""

    ended: asyncio.Event

    def end(self) -> None:
        """Sends what has come back and ends."""


@dataclass(frozen=True, eq=False)
class OpenedRun:
    """What an instance holds for its run."""

    name: str
    config: RolloutConfig
    engine: Engine
    codec: TextCodec
    custody: Custody
    streams: set[LiveStream] = field(default_factory=set)

    async def end_streams(self) -> None:
        """Ends all streams; one whose caller does not read is left behind after STREAM_END_S."""
        streams = list(self.streams)
        for stream in streams:
            stream.end()
        waits = [asyncio.ensure_future(stream.ended.wait()) for stream in streams]
        if waits:
            _, late = await asyncio.wait(waits, timeout=STREAM_END_S)
            for wait in late:
                wait.cancel()


def open_run(name: str, config: RolloutConfig, device: str) -> OpenedRun:
    """Builds everything but the weights; takes seconds the first time, as it imports torch.

    Raises ServiceError INVALID for an unknown engine or wrong options, and MODEL_NOT_READABLE.
    """
    try:
        chosen = ENGINES.choose(config.rollout.engine, config.rollout.engine_options)
    except PluginError as error:
        code = grpc.StatusCode.INVALID_ARGUMENT
        raise ServiceError(code, "INVALID", str(error), **error.metadata) from error
    from headrace_modelkit.tokenizer import load_tokenizer

    try:
        codec = load_tokenizer(config.model)
        engine = chosen.build(EngineConfig(config.model, codec, config.rollout.max_concurrency, device))
    except ModelNotReadable as error:
        raise ServiceError(grpc.StatusCode.INVALID_ARGUMENT, "MODEL_NOT_READABLE", str(error)) from error
    return OpenedRun(name, config, engine, codec, Custody(CUSTODY_BYTES))
