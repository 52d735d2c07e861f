"""Makes engines of vLLM in processes of their own; vLLM is imported here, when a run asks for it."""

from __future__ import annotations

import torch
from headrace.rollout.v1 import rollout_pb2
from headrace_modelkit.loading import load_architecture
from headrace_schema.model_size import model_size
from headrace_servicekit.problems import KeyProblem
from headrace_servicekit.registry import PluginError

from headrace_rollout.engines.base import Engine, EngineConfig
from headrace_rollout.engines.hosted.engine import HostedEngine
from headrace_rollout.engines.hosted.following import FollowerEngine
from headrace_rollout.engines.hosted.options import (
    KEY,
    check_draft,
    check_heads,
    check_invariance,
    check_no_gguf,
    deadlines_of,
    needing,
)
from headrace_rollout.engines.vllm.options import VllmOptions


def build_vllm(options: VllmOptions, config: EngineConfig) -> Engine:
    """An engine for the config's model, without weights and without a process.

    Raises PluginError when vLLM is not installed or does not know an argument, and ModelNotReadable.
    """
    with needing("vllm", "vLLM"):
        from headrace_rollout.engines.vllm.arguments import check_extra, lora_arguments
        from headrace_rollout.engines.vllm.backend import VllmBackend
    check_extra(options.engine_args)
    check_invariance(options, has_gpu=torch.cuda.is_available())
    if config.adapters:
        lora_arguments(config.adapters)
    check_heads(options.tensor_parallel_size, config.model)
    check_draft(options.speculative, config.model)
    size = model_size(load_architecture(config.model).get_text_config().to_dict())
    if options.quantization == "int8" and size is not None and not size.expert_parameters:
        reason = f"int8 is of experts alone in vLLM, and {config.model.path!r} has none"
        raise PluginError([KeyProblem(f"{KEY}.quantization", reason, "set fp8, or leave it out")])
    check_no_gguf(config.model, "rollout.engine: vllm reads no GGUF; give a directory of its own")
    return HostedEngine(VllmBackend(config, options), config, deadlines_of(options))


def follow_vllm(
    options: VllmOptions,
    config: EngineConfig,
    hello: rollout_pb2.FollowRequest,
    leader: str,
    host: str,
    token: str | None,
) -> Engine:
    """This host's part of an engine that the instance at `leader` leads. `host`: the address of this one.

    Raises as `build_vllm`.
    """
    with needing("vllm", "vLLM"):
        from headrace_rollout.engines.vllm.arguments import check_extra
        from headrace_rollout.engines.vllm.part import VllmPart
    check_extra(options.engine_args)
    return FollowerEngine(VllmPart(config, options, hello.rank, host), config, hello, leader, token)
