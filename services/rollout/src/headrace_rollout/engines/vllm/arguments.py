"""From a run's settings to vLLM's AsyncEngineArgs. Imports vLLM."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from headrace_modelkit.loading import context_limit, load_architecture
from headrace_servicekit.problems import KeyProblem, nearest
from headrace_servicekit.registry import PluginError
from vllm import AsyncEngineArgs

from headrace_rollout.engines.base import EngineConfig
from headrace_rollout.engines.hosted import Start
from headrace_rollout.engines.vllm.options import FIXED_ARGUMENTS, OWN_ARGUMENTS, VllmOptions

KEY = "rollout.engine_options"
WORKER = "headrace_rollout.engines.vllm.worker.HeadraceWorker"
TRANSFER = "headrace_shm"
OWNER = "HEADRACE_ENGINE_OWNER"
"""The variable that tells the engine's processes whose they are, by process id."""


def check_extra(arguments: Mapping[str, Any]) -> None:
    """Raises PluginError for names that vLLM does not know, and for those that are not a run's to set."""
    known = sorted(field.name for field in dataclasses.fields(AsyncEngineArgs))
    problems = []
    for name in arguments:
        key = f"{KEY}.engine_args.{name}"
        if name in OWN_ARGUMENTS:
            problems.append(KeyProblem(key, "another setting decides it", f"set {OWN_ARGUMENTS[name]}"))
        elif name in FIXED_ARGUMENTS:
            problems.append(KeyProblem(key, "Headrace sets it itself", "leave it out"))
        elif name not in known:
            close = nearest(name, known)
            fix = f"did you mean {close!r}?" if close else "see vLLM's AsyncEngineArgs for its names"
            problems.append(KeyProblem(key, "vLLM has no such argument", fix))
    if problems:
        raise PluginError(problems)


def parallel_size(options: VllmOptions, start: Start) -> int:
    """Devices of one model. Raises ValueError when the lease has fewer."""
    gpus = [device for device in start.devices if device.type == "cuda"]
    size = options.tensor_parallel_size or max(1, len(gpus))
    if gpus and size > len(gpus):
        raise ValueError(f"{KEY}.tensor_parallel_size: {size} devices are wanted and {len(gpus)} are leased")
    return size


def engine_args(config: EngineConfig, options: VllmOptions, start: Start) -> AsyncEngineArgs:
    """The arguments of an engine on a lease's devices. Raises ValueError for what vLLM refuses."""
    on_gpu = any(device.type == "cuda" for device in start.devices)
    cache_gib = options.kv_cache_gib or (None if on_gpu else 1.0)
    model = config.model
    return AsyncEngineArgs(
        model=model.path,
        revision=model.revision,
        dtype=model.dtype,
        max_model_len=context_limit(model, load_architecture(model)),
        max_num_seqs=config.max_concurrency,
        tensor_parallel_size=parallel_size(options, start),
        gpu_memory_utilization=options.gpu_memory_utilization,
        kv_cache_memory_bytes=int(cache_gib * 2**30) if cache_gib else None,
        enforce_eager=options.enforce_eager or not on_gpu,
        # A policy is installed before the first token: nothing is read from disk.
        load_format="dummy",
        logprobs_mode="processed_logprobs",
        # Requests are token ids, and no file beside the model may change how they are sampled.
        skip_tokenizer_init=True,
        generation_config="vllm",
        enable_sleep_mode=on_gpu,
        worker_extension_cls=WORKER,
        weight_transfer_config={"backend": TRANSFER},
        **{"disable_log_stats": True, **options.engine_args},
    )
