"""From a run's settings to SGLang's ServerArgs. Imports SGLang, not its engine."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from typing import Any

from headrace_modelkit.loading import QUANTISATION, context_limit, load_architecture, quantisation
from headrace_rollout.engines.base import EngineConfig
from headrace_rollout.engines.hosted.backend import Start
from headrace_rollout.engines.hosted.options import Speculation, check_names, parallel_size
from sglang.srt.server_args import ServerArgs

from headrace_sglang.options import (
    FIXED_ARGUMENTS,
    INVARIANT,
    OWN_ARGUMENTS,
    REFUSED_ARGUMENTS,
    SglangOptions,
)

LOADER = "headrace_sglang.loader.load_version"
CPU_CACHE_TOKENS = 8192
SPARE_TOKENS = 8
"""SGLang refuses prompts that leave less than a few tokens of its context; a run may have one. So it gets more."""


def check_extra(arguments: Mapping[str, Any]) -> None:
    """Raises PluginError for names that SGLang does not know, and for those that are not a run's to set."""
    check_names(
        arguments,
        inspect.signature(ServerArgs).parameters,
        own=OWN_ARGUMENTS,
        fixed=FIXED_ARGUMENTS,
        engine="SGLang",
        listed_in="ServerArgs",
        refused=REFUSED_ARGUMENTS,
    )


def engine_args(config: EngineConfig, options: SglangOptions, start: Start) -> dict[str, Any]:
    """The arguments of an engine on a lease's devices. Raises ValueError for what the lease cannot hold."""
    on_gpu = any(device.type == "cuda" for device in start.devices)
    model = config.model
    architecture = load_architecture(model)
    context = context_limit(model, architecture) + SPARE_TOKENS
    arguments: dict[str, Any] = {
        "model_path": model.path,
        "revision": model.revision,
        "dtype": model.dtype,
        "context_length": context,
        "max_running_requests": config.max_concurrency,
        "tp_size": parallel_size(options.tensor_parallel_size, start),
        "mem_fraction_static": options.memory_fraction,
        "max_total_tokens": options.kv_cache_tokens or (None if on_gpu else max(CPU_CACHE_TOKENS, context)),
        "disable_cuda_graph": options.enforce_eager or not on_gpu,
        # A policy is installed before the first token: nothing is read from disk.
        "load_format": "dummy",
        "custom_weight_loader": [LOADER],
        # Requests are token ids, and no file beside the model may change how they are sampled.
        "skip_tokenizer_init": True,
        "sampling_defaults": "openai",
        "enable_memory_saver": on_gpu,
        # Its schedulers poll without a pause otherwise: without work, and between two leases, they would take a core.
        "sleep_on_idle": True,
        # A request whose kept set is larger is aborted; none is larger than the vocabulary.
        "sampling_mask_max_tokens": int(architecture.get_text_config().vocab_size),
        # Chunks hold what is new: those that hold everything make a long answer's cost quadratic.
        "incremental_streaming_output": True,
        "log_level": "warning",
    }
    if quantisation(architecture):  # weights come in model.dtype, which its quantised layers would not take
        arguments["json_model_override_args"] = json.dumps({QUANTISATION: None})
    if options.batch_invariant:
        arguments |= INVARIANT
    drafted = drafting(options.speculative) if options.speculative else {}
    return {**arguments, **drafted, **({} if on_gpu else CPU_ARGUMENTS), **options.engine_args}


def drafting(speculation: Speculation) -> dict[str, Any]:
    """One chain of drafted tokens, from what the sequences had before."""
    return {
        "speculative_algorithm": "NGRAM",
        "speculative_num_draft_tokens": speculation.tokens + 1,  # with the token that they follow
        "speculative_ngram_max_bfs_breadth": 1,
        "speculative_ngram_max_trie_depth": speculation.longest_match + speculation.tokens,
    }


CPU_ARGUMENTS: dict[str, Any] = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    # Its second stream is a GPU's.
    "disable_overlap_schedule": True,
}
"""The forward paths that need no kernel of a GPU."""
