"""Makes the engine; SGLang itself is imported here, when a run asks for it."""

from __future__ import annotations

from headrace_modelkit.errors import ModelNotReadable
from headrace_servicekit.problems import KeyProblem
from headrace_servicekit.registry import PluginError

from headrace_rollout.engines.base import Engine, EngineConfig
from headrace_rollout.engines.hosted import HostedEngine
from headrace_rollout.engines.hosted.arguments import deadlines_of
from headrace_rollout.engines.sglang.options import SglangOptions


def build(options: SglangOptions, config: EngineConfig) -> Engine:
    """An engine for the config's model, without weights and without a process.

    Raises PluginError when SGLang is not installed or does not know an argument, and ModelNotReadable.
    """
    try:
        from headrace_rollout.engines.sglang.arguments import check_extra
        from headrace_rollout.engines.sglang.backend import SglangBackend
    except ImportError as error:
        reason = f"SGLang cannot be imported by this instance: {error}"
        fix = "install headrace-rollout[sglang] where the instance runs, or choose transformers"
        raise PluginError([KeyProblem("rollout.engine", reason, fix)]) from error
    check_extra(options.engine_args)
    if config.model.gguf_file is not None:
        raise ModelNotReadable(
            "model.gguf_file: rollout.engine: sglang installs weights into a directory's own architecture; "
            "give a directory with config.json"
        )
    return HostedEngine(SglangBackend(config, options), config, deadlines_of(options))
