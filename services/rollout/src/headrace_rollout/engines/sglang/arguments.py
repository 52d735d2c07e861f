"""From a run's settings to SGLang's ServerArgs. Imports SGLang, not its engine."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from headrace_modelkit.loading import context_limit, load_architecture
from headrace_servicekit.problems import KeyProblem, nearest
from headrace_servicekit.registry import PluginError
from sglang.srt.server_args import ServerArgs

from headrace_rollout.engines.base import EngineConfig
from headrace_rollout.engines.hosted import Start
from headrace_rollout.engines.sglang.options import FIXED_ARGUMENTS, OWN_ARGUMENTS, SglangOptions

KEY = "rollout.engine_options"
LOADER = "headrace_rollout.engines.sglang.loader.load_version"
CPU_CACHE_TOKENS = 8192


def check_extra(arguments: Mapping[str, Any]) -> None:
    """Raises PluginError for names that SGLang does not know, and for those that are not a run's to set."""
    known = sorted(field.name for field in dataclasses.fields(ServerArgs))
    problems = []
    for name in arguments:
        key = f"{KEY}.engine_args.{name}"
        if name in OWN_ARGUMENTS:
            problems.append(KeyProblem(key, "another setting decides it", f"set {OWN_ARGUMENTS[name]}"))
        elif name in FIXED_ARGUMENTS:
            problems.append(KeyProblem(key, "Headrace sets it itself", "leave it out"))
        elif name not in known:
            close = nearest(name, known)
            fix = f"did you mean {close!r}?" if close else "see SGLang's ServerArgs for its names"
            problems.append(KeyProblem(key, "SGLang has no such argument", fix))
    if problems:
        raise PluginError(problems)


def parallel_size(options: SglangOptions, start: Start) -> int:
    """Devices of one model. Raises ValueError when the lease has fewer."""
    gpus = [device for device in start.devices if device.type == "cuda"]
    size = options.tensor_parallel_size or max(1, len(gpus))
    if gpus and size > len(gpus):
        raise ValueError(f"{KEY}.tensor_parallel_size: {size} devices are wanted and {len(gpus)} are leased")
    return size


def engine_args(config: EngineConfig, options: SglangOptions, start: Start) -> dict[str, Any]:
    """The arguments of an engine on a lease's devices. Raises ValueError for what the lease cannot hold."""
    on_gpu = any(device.type == "cuda" for device in start.devices)
    model = config.model
    architecture = load_architecture(model)
    arguments: dict[str, Any] = {
        "model_path": model.path,
        "revision": model.revision,
        "dtype": model.dtype,
        "context_length": context_limit(model, architecture),
        "max_running_requests": config.max_concurrency,
        "tp_size": parallel_size(options, start),
        "mem_fraction_static": options.memory_fraction,
        "max_total_tokens": options.kv_cache_tokens or (None if on_gpu else CPU_CACHE_TOKENS),
        "disable_cuda_graph": options.enforce_eager or not on_gpu,
        # A policy is installed before the first token: nothing is read from disk.
        "load_format": "dummy",
        "custom_weight_loader": [LOADER],
        # Requests are token ids, and no file beside the model may change how they are sampled.
        "skip_tokenizer_init": True,
        "sampling_defaults": "openai",
        "enable_memory_saver": on_gpu,
        # A request whose kept set is larger is aborted; none is larger than the vocabulary.
        "sampling_mask_max_tokens": int(architecture.get_text_config().vocab_size),
        # Chunks hold what is new: those that hold everything make a long answer's cost quadratic.
        "incremental_streaming_output": True,
        "log_level": "warning",
    }
    return {**arguments, **({} if on_gpu else CPU_ARGUMENTS), **options.engine_args}


CPU_ARGUMENTS: dict[str, Any] = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    # Its second stream is a GPU's.
    "disable_overlap_schedule": True,
}
"""The forward paths that need no kernel of a GPU."""
