"""A follower's part of a vLLM engine: vLLM's executor without a front end, in processes of its own. Imports vLLM."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path

from headrace.rollout.v1 import rollout_pb2
from headrace_servicekit.process.spawn import descendants
from vllm import AsyncEngineArgs

from headrace_rollout.engines.base import EngineConfig
from headrace_rollout.engines.hosted.backend import Start
from headrace_rollout.engines.hosted.processes import kill
from headrace_rollout.engines.hosts import FILES
from headrace_rollout.engines.vllm.arguments import SOCKETS, engine_args, environment, variables_of
from headrace_rollout.engines.vllm.backend import capabilities
from headrace_rollout.engines.vllm.options import VllmOptions


class VllmPart:
    """Ranks of an engine that compute on this host."""

    def __init__(self, config: EngineConfig, options: VllmOptions, rank: int, host: str) -> None:
        self.capabilities = capabilities()
        self._config, self._options, self._rank, self._host = config, options, rank, host
        self._process: BaseProcess | None = None

    @property
    def pids(self) -> Sequence[int]:
        """Of the executor and its workers."""
        process = self._process
        if process is None or process.pid is None or not process.is_alive():
            return []
        return descendants([process.pid])

    def start(self, start: Start, meeting: rollout_pb2.FollowResponse, files: Path) -> None:
        """Spawns them. Raises ValueError for what vLLM refuses."""
        arguments = engine_args(self._config, self._options, start, meeting, self._rank)
        variables = variables_of(
            start, self._options, routed_experts=self._config.routed_experts, host=self._host
        )
        process = multiprocessing.get_context("spawn").Process(
            target=_run, args=(arguments,), name="VllmPart"
        )
        with environment({**variables, FILES: str(files), SOCKETS: str(files)}):
            process.start()
        self._process = process

    def stop(self) -> None:
        """SIGKILL to all of them."""
        process, pids = self._process, self.pids
        self._process = None
        kill(pids)
        if process is not None:
            process.join()


def _run(arguments: AsyncEngineArgs) -> None:
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    os.setpgid(0, 0)
    config = arguments.create_engine_config(usage_context=UsageContext.ENGINE_CONTEXT, headless=True)
    executor = MultiprocExecutor(config, monitor_workers=False)
    executor.start_worker_monitor(inline=True)  # returns when a worker has ended
