"""Makes the engine; SGLang is imported here, when a run asks for it."""

from __future__ import annotations

import torch
from headrace_rollout.engines.base import Engine, EngineConfig
from headrace_rollout.engines.hosted.engine import HostedEngine
from headrace_rollout.engines.hosted.options import (
    KEY,
    check_heads,
    check_invariance,
    check_no_gguf,
    deadlines_of,
    needing,
)
from headrace_servicekit.problems import KeyProblem
from headrace_servicekit.registry import PluginError

from headrace_sglang.options import SglangOptions


def build(options: SglangOptions, config: EngineConfig) -> Engine:
    """An engine for the config's model, without weights and without a process.

    Raises PluginError when SGLang is not installed or does not know an argument, and ModelNotReadable.
    """
    with needing("sglang", "SGLang"):
        from headrace_sglang.arguments import check_extra
        from headrace_sglang.backend import SglangBackend
    check_extra(options.engine_args)
    check_invariance(options, has_gpu=torch.cuda.is_available())
    check_heads(options.tensor_parallel_size, config.model)
    if options.speculative is not None and not _samples_drafts():
        reason = (
            "without an NVIDIA GPU SGLang takes the likeliest token where it checks drafts, and samples none"
        )
        raise PluginError([KeyProblem(f"{KEY}.speculative", reason, "leave it out")])
    installs = "rollout.engine: sglang installs weights into a directory's own architecture"
    check_no_gguf(config.model, f"{installs}; give a directory with config.json")
    return HostedEngine(SglangBackend(config, options), config, deadlines_of(options))


def _samples_drafts() -> bool:
    return torch.cuda.is_available() and torch.version.hip is None
