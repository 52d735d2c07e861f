"""Makes the engine; vLLM itself is imported here, when a run asks for it."""

from __future__ import annotations

from headrace_modelkit.errors import ModelNotReadable
from headrace_servicekit.problems import KeyProblem
from headrace_servicekit.registry import PluginError

from headrace_rollout.engines.base import Engine, EngineConfig
from headrace_rollout.engines.hosted import HostedEngine
from headrace_rollout.engines.hosted.arguments import deadlines_of
from headrace_rollout.engines.vllm.options import VllmOptions


def build(options: VllmOptions, config: EngineConfig) -> Engine:
    """An engine for the config's model, without weights and without a process.

    Raises PluginError when vLLM is not installed or does not know an argument, and ModelNotReadable.
    """
    try:
        from headrace_rollout.engines.vllm.arguments import check_extra
        from headrace_rollout.engines.vllm.backend import VllmBackend
    except ImportError as error:
        reason = f"vLLM cannot be imported by this instance: {error}"
        fix = "install headrace-rollout[vllm] where the instance runs, or choose transformers"
        raise PluginError([KeyProblem("rollout.engine", reason, fix)]) from error
    check_extra(options.engine_args)
    if config.model.gguf_file is not None:
        raise ModelNotReadable(
            "model.gguf_file: rollout.engine: vllm reads no GGUF; give a directory of its own"
        )
    return HostedEngine(VllmBackend(config, options), config, deadlines_of(options))
