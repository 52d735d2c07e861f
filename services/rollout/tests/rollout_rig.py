"""A rollout instance that listens, versions that it installs, and Generate streams to it."""

from __future__ import annotations

import asyncio
import json
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import grpc
import torch
from headrace.common.v1 import common_pb2
from headrace.rollout.v1 import rollout_pb2, rollout_pb2_grpc
from headrace_rollout.engines.base import Engine
from headrace_rollout.service import RolloutServicer
from headrace_servicekit.instance import Instance
from rollout_calls import HEADER, RUN

WAIT_S = 30.0


@dataclass
class Published:
    """A version as a trainer publishes it."""

    version: common_pb2.PolicyVersion
    manifest: common_pb2.WeightManifest
    source: common_pb2.WeightSource


@dataclass
class Rollout:
    """A rollout instance that listens, and a stub to it."""

    instance: Instance
    stub: rollout_pb2_grpc.RolloutServiceStub
    model_path: Path = Path()
    last: Published | None = None

    @property
    def servicer(self) -> RolloutServicer:
        return self.instance.on_grant.__self__

    async def open(self, model_path, more=None, **rollout):
        self.model_path = model_path
        model = {"path": str(model_path), "dtype": "float32", "max_context": 128}
        config = json.dumps({"model": model, "rollout": rollout, "seed": 7, **(more or {})})
        return await self.stub.OpenRun(rollout_pb2.OpenRunRequest(header=HEADER, config_json=config))

    async def prefetch(self, published: Published):
        return await self.install(published, prefetch=True)

    async def install(self, published: Published, *, in_flight: bool = False, prefetch: bool = False):
        self.last = published
        return await self.stub.InstallPolicy(
            rollout_pb2.InstallPolicyRequest(
                header=HEADER,
                version=published.version,
                manifest=published.manifest,
                sources=[published.source],
                in_flight=in_flight,
                prefetch=prefetch,
            )
        )

    async def reopen(self, **rollout) -> None:
        """Opens the run again after a close, with the weights of the last install."""
        assert self.last is not None
        await self.open(self.model_path, **rollout)
        await self.install(self.last)

    @property
    def engine(self) -> Engine:
        return self.servicer._run.engine

    def decoding(self) -> tuple[int, set[int]]:
        """Threads and cores of the decoding thread, as that thread sees them."""
        look = self.engine._executor.submit(lambda: (torch.get_num_threads(), os.sched_getaffinity(0)))
        return look.result(WAIT_S)

    def generate(self, groups, *, half_close=True, **options) -> GenerateCall:
        return GenerateCall(self.stub, groups, half_close, options)


class GenerateCall:
    """A Generate stream; `responses` collects, `assign` and `close` write."""

    def __init__(self, stub, groups, half_close, options):
        self.call = stub.Generate()
        self.chunks, self.partials, self.prefills, self.revoked = [], [], [], False
        self.stages, self.lost_pools = [], []
        fields = {"policy_number": 1, "max_new_tokens": 24, "seed": 7, **options}
        distribution = common_pb2.SamplingDistribution(temperature=fields.pop("temperature", 1.0))
        self._opening = rollout_pb2.GenerateOpen(header=HEADER, distribution=distribution, **fields)
        self._groups, self._half_close = groups, half_close

    async def start(self) -> GenerateCall:
        # A refused opening may end the call before the rest is written: who reads it is told why.
        with suppress(grpc.aio.AioRpcError):
            await self.call.write(rollout_pb2.GenerateRequest(open=self._opening))
            if self._groups:
                await self.assign(self._groups)
            if self._half_close:
                await self.call.done_writing()
        return self

    async def assign(self, groups) -> None:
        await self.call.write(rollout_pb2.GenerateRequest(assign=rollout_pb2.AssignGroups(groups=groups)))

    async def reauthorize(self, epoch: int) -> None:
        header = common_pb2.CommandHeader(run=RUN, coordinator_epoch=1, lease_epoch=epoch)
        message = rollout_pb2.Reauthorize(header=header)
        await self.call.write(rollout_pb2.GenerateRequest(reauthorize=message))

    async def read_until(self, condition) -> None:
        async with asyncio.timeout(WAIT_S):
            while not condition(self):
                response = await self.call.read()
                if response is grpc.aio.EOF:
                    return
                self.chunks += response.chunks
                self.partials += response.partials
                self.prefills += response.prefills
                self.stages.append({each.stage: each.wall_time.ToNanoseconds() for each in response.stages})
                self.lost_pools += response.lost_pools
                assert not self.revoked, "a revoked stream has ended"
                self.revoked = response.revoked

    async def read_all(self) -> dict[tuple[int, int], common_pb2.Trajectory]:
        await self.read_until(lambda _: False)
        return self.finished()

    def finished(self) -> dict[tuple[int, int], common_pb2.Trajectory]:
        return {
            (chunk.sample.prompt_ordinal, chunk.sample.sample_index): chunk.finished
            for chunk in self.chunks
            if chunk.HasField("finished")
        }
