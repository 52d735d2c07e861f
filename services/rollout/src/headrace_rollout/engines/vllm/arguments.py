"""From a run's settings to vLLM's AsyncEngineArgs and its processes' variables; why it refuses. Imports vLLM.

vLLM says only that its engine core did not start: the reason is an error in the log of the core or of a worker.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from headrace.rollout.v1 import rollout_pb2
from headrace_modelkit.devices import says_out_of_memory, variables_for
from headrace_modelkit.loading import QUANTISATION, context_limit, load_architecture, quantisation
from headrace_schema.images import MOST_IMAGES
from headrace_schema.workflow import MOST_WORDS
from headrace_servicekit.problems import KeyProblem
from headrace_servicekit.registry import PluginError
from transformers import PreTrainedConfig
from vllm import AsyncEngineArgs
from vllm.config.lora import MaxLoRARanks
from vllm.logger import DEFAULT_LOGGING_CONFIG

from headrace_rollout.engines.base import EngineConfig
from headrace_rollout.engines.hosted.backend import Start
from headrace_rollout.engines.hosted.options import Speculation, check_names, parallel_size
from headrace_rollout.engines.hosted.relaying import RELAYS
from headrace_rollout.engines.vllm.options import (
    FIXED_ARGUMENTS,
    OWN_ARGUMENTS,
    REFUSED_ARGUMENTS,
    SCHEMES,
    VllmOptions,
)

WORKER = "headrace_rollout.engines.vllm.worker.HeadraceWorker"
TRANSFER = "headrace_shm"
CPU_BATCH_TOKENS, GPU_BATCH_TOKENS = 4096, 8192
"""Tokens of a pass. On a GPU vLLM itself would take 2,048, and prefills of long prompts would wait for many passes."""
IMAGES = {
    "limit_mm_per_prompt": {"image": MOST_IMAGES, "video": MOST_IMAGES},
    "skip_mm_profiling": True,  # it would read files of its own
    # Done in the model its factors are buffers, which the load format dummy fills with noise, and no version has them.
    "mm_device_do_normalize": False,
}
"""Of an engine whose prompts have images."""
SOCKETS = "VLLM_RPC_BASE_PATH"
"""The variable that tells the engine's processes in which directory to make the sockets that they speak through."""
OWNER = "HEADRACE_ENGINE_OWNER"
"""The variable that tells the engine's processes whose they are, by process id."""


def check_extra(arguments: Mapping[str, Any]) -> None:
    """Raises PluginError for names that vLLM does not know, and for those that are not a run's to set."""
    check_names(
        arguments,
        (field.name for field in dataclasses.fields(AsyncEngineArgs)),
        own=OWN_ARGUMENTS,
        fixed=FIXED_ARGUMENTS,
        engine="vLLM",
        listed_in="AsyncEngineArgs",
        refused=REFUSED_ARGUMENTS,
    )


def engine_args(
    config: EngineConfig,
    options: VllmOptions,
    start: Start,
    meeting: rollout_pb2.FollowResponse | None = None,
    rank: int = 0,
) -> AsyncEngineArgs:
    """The arguments of an engine on a lease's devices, or of the part that a host of `rank` has of one.

    Raises ValueError for what vLLM refuses.
    """
    on_gpu = any(device.type == "cuda" for device in start.devices)
    cache_gib = options.kv_cache_gib or (None if on_gpu else 1.0)
    model = config.model
    architecture = load_architecture(model)
    context = context_limit(model, architecture)
    span = parallel_size(options.tensor_parallel_size, start, options.pipeline_parallel_size, options.hosts)
    workers = span * options.pipeline_parallel_size
    return AsyncEngineArgs(
        model=model.path,
        revision=model.revision,
        dtype=model.dtype,
        max_model_len=context,
        max_num_seqs=config.max_concurrency,
        tensor_parallel_size=span,
        pipeline_parallel_size=options.pipeline_parallel_size,
        gpu_memory_utilization=options.gpu_memory_utilization,
        kv_cache_memory_bytes=int(cache_gib * 2**30) if cache_gib else None,
        enforce_eager=options.enforce_eager or not on_gpu,
        # A policy is installed before the first token: nothing is read from disk.
        load_format="dummy",
        logprobs_mode="processed_logprobs",
        max_logprobs=MOST_WORDS,
        # Requests are token ids, and no file beside the model may change how they are sampled.
        skip_tokenizer_init=config.codec.images is None,  # its processor of images wants one
        **({} if config.codec.images is None else IMAGES),
        **as_transformers_reads(architecture),
        generation_config="vllm",
        worker_extension_cls=WORKER,
        weight_transfer_config={"backend": TRANSFER},
        **(_over_hosts(options.hosts, rank, meeting) if meeting else {}),
        **({"enable_return_routed_experts": True} if config.routed_experts else {}),
        **(lora_arguments(config.adapters) if config.adapters else {}),
        **({"quantization": SCHEMES[options.quantization]} if options.quantization else {}),
        **(drafting(options.speculative, on_gpu=on_gpu) if options.speculative else {}),
        **{
            "disable_log_stats": True,
            **(sleeping(options, workers) if on_gpu else {}),
            **batching(config, options, context, on_gpu=on_gpu),
            **options.engine_args,
        },
    )


def sleeping(options: VllmOptions, workers: int) -> dict[str, Any]:
    """What lets an engine on GPUs give back as much as it can while it sleeps, of what this vLLM knows.

    Captured graphs go to the host and come back to their places; so does what communicators of several workers hold,
    where their NCCL can (2.29.7). Without these an engine over two GPUs keeps 2 to 7 GiB of each.
    """
    known = {field.name for field in dataclasses.fields(AsyncEngineArgs)}
    wanted = {
        "enable_sleep_mode": True,
        "sleep_mode_offload_cudagraph": not options.enforce_eager,
        "enable_nccl_comm_suspend": workers > 1,
    }
    return {name: value for name, value in wanted.items() if value and name in known}


def as_transformers_reads(architecture: PreTrainedConfig) -> dict[str, Any]:
    """What keeps vLLM at the model that trainers compute with, and publish.

    Of a quantised checkpoint that is its weights in model.dtype: vLLM would build layers that these do not fit. A
    Qwen3-VL has time, height and width in turns along a head, in transformers whatever its config.json says, in vLLM
    only where `mrope_interleaved` stands there: else log-probs behind an image are off by 0.3, and nothing warns.
    """
    found: dict[str, Any] = {QUANTISATION: {}} if quantisation(architecture) else {}
    if architecture.model_type == "qwen3_vl":
        rope = {**architecture.get_text_config().rope_parameters, "mrope_interleaved": True}
        found["text_config"] = {"rope_parameters": rope}
    return {"hf_overrides": found} if found else {}


def _over_hosts(hosts: int, rank: int, meeting: rollout_pb2.FollowResponse) -> dict[str, Any]:
    """VLLM's own processes on each host, which meet by torch.distributed: no Ray."""
    return {
        "nnodes": hosts,
        "node_rank": rank,
        "master_addr": meeting.meeting_host,
        "master_port": meeting.meeting_port,
        "distributed_executor_backend": "mp",
    }


def lora_arguments(ranks: Mapping[str, int]) -> dict[str, Any]:
    """Room for so many adapters of the largest of these ranks, all of them in one batch."""
    most = max(ranks.values())
    fitting = [each for each in get_args(MaxLoRARanks) if each >= most]
    if not fitting:
        fix = f"the nearest valid value is {max(get_args(MaxLoRARanks))}, or leave rollout.enable_lora out"
        raise PluginError([KeyProblem("trainer.lora.rank", f"vLLM takes no adapters of rank {most}", fix)])
    return {"enable_lora": True, "max_loras": len(ranks), "max_lora_rank": min(fitting)}


def drafting(speculation: Speculation, *, on_gpu: bool) -> dict[str, Any]:
    """Drafts, and their check by vLLM's rejection sampler, which keeps the policy's distribution."""
    drafted: dict[str, Any] = {"num_speculative_tokens": speculation.tokens}
    if speculation.method == "ngram":
        matches = {
            "prompt_lookup_max": speculation.longest_match,
            "prompt_lookup_min": speculation.shortest_match,
        }
        return {"speculative_config": {"method": "ngram", **drafted, **matches}}
    # The draft model is no policy: it is read from its own files, and stays where the policy's weights are discarded.
    own: dict[str, Any] = {
        "model": speculation.model,
        "revision": speculation.revision,
        "draft_load_config": {"load_format": "auto"},
    }
    kept = {"sleep_preserve_parameter_names": ["draft.*"]} if on_gpu else {}
    return {"speculative_config": {"method": "draft_model", **drafted, **own}, **kept}


def batching(config: EngineConfig, options: VllmOptions, context: int, *, on_gpu: bool) -> dict[str, Any]:
    """Tokens of a pass, and on a CPU no prefill in parts.

    vLLM 0.32 sets a seeded request's generator back after a part, which a CPU's cannot do: the engine would end.
    """
    drafted = options.speculative.tokens if options.speculative else 0
    decoded = config.max_concurrency * (1 + drafted)
    if on_gpu:
        return {"max_num_batched_tokens": max(GPU_BATCH_TOKENS, decoded)}
    tokens = max(CPU_BATCH_TOKENS, context, decoded)
    return {"enable_chunked_prefill": False, "max_num_batched_tokens": tokens}


def variables_of(
    start: Start, options: VllmOptions, *, routed_experts: bool, host: str = ""
) -> dict[str, str]:
    """What an engine's processes read; `host`: the address of this one, where an engine spans several."""
    stages, hosts = options.pipeline_parallel_size, options.hosts
    workers = max(1, parallel_size(options.tensor_parallel_size, start, stages, hosts) * stages // hosts)
    # Processes are spawned: a fork of one that serves gRPC would inherit its locks.
    variables = {
        **({"VLLM_USE_V2_MODEL_RUNNER": "1"} if routed_experts else {}),
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_NO_USAGE_STATS": "1",
        **({"VLLM_BATCH_INVARIANT": "1"} if options.batch_invariant else {}),
        OWNER: str(os.getpid()),
        "OMP_NUM_THREADS": str(max(1, start.threads // workers)),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        **({"VLLM_HOST_IP": host} if host else {}),
        **({RELAYS: start.relays} if start.relays else {}),
    }
    if all(device.type != "cuda" for device in start.devices):
        # Eager on a CPU: no compiler is needed, nor the minute that it takes for what vLLM decorates.
        variables["TORCHDYNAMO_DISABLE"] = "1"
    return variables | variables_for(start.devices)


@contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """What the engine's processes inherit; this process gets its own back."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


CONFIG_PATH = "VLLM_LOGGING_CONFIG_PATH"
OPERATORS = (CONFIG_PATH, "VLLM_CONFIGURE_LOGGING")
"""Variables with which an operator configures vLLM's log; it is left alone then."""
_RECORD = "\x1e"
_ERROR = re.compile(r"^(?:\w+\.)*\w*(?:Error|Exception): .+", re.MULTILINE)
_REFUSED_VALUE = re.compile(r"Value error, (.+?)(?: \[type=|\n|$)")


@dataclass(frozen=True)
class LoggedErrors:
    """The errors that processes started with `variables` log; none where the operator configures vLLM's log."""

    variables: dict[str, str]
    file: Path

    def reason(self) -> str:
        """The error that was logged first: a worker's comes before the core's, which only says that one failed."""
        records = self.file.read_text().split(_RECORD) if self.file.exists() else []
        found = (_ERROR.findall(record) for record in records)
        return next((errors[-1] for errors in found if errors), "")

    def out_of_memory(self) -> str:
        """The first that is of a device without memory: who waits for the core hears that it is dead, and not why."""
        words = self.file.read_text() if self.file.exists() else ""
        return next((found for found in _ERROR.findall(words) if says_out_of_memory(found)), "")


@contextmanager
def logged_errors() -> Iterator[LoggedErrors]:
    """While its body runs: what is logged later goes on into a file that has no name."""
    with tempfile.TemporaryDirectory(prefix="headrace-vllm-") as directory:
        file = Path(directory) / "errors"
        if any(name in os.environ for name in OPERATORS):
            yield LoggedErrors({}, file)
            return
        config = deepcopy(DEFAULT_LOGGING_CONFIG)
        config["formatters"]["record"] = {"format": f"{_RECORD}%(message)s"}
        handler = {"class": "logging.FileHandler", "filename": str(file), "level": "ERROR"}
        config["handlers"]["errors"] = {**handler, "formatter": "record"}
        config["loggers"]["vllm"]["handlers"].append("errors")
        settings = Path(directory) / "logging.json"
        settings.write_text(json.dumps(config))
        yield LoggedErrors({CONFIG_PATH: str(settings)}, file)


def one_line(error: BaseException) -> str:
    """An error of vLLM in one line; pydantic's say what was refused behind a heading."""
    cause = error.__cause__
    words = str(error) or (str(cause) if cause is not None else "")
    if refused := _REFUSED_VALUE.search(words):
        return refused[1]
    return f"{type(error).__name__}: {words}".strip(": ")


def start_failed(error: BaseException, reason: str) -> str:
    """Why a start failed, and which settings of the run to change where that is known."""
    words = reason.partition(": ")[2] or one_line(error)
    if "KV cache" in words or "cache blocks" in words:
        fix = (
            "raise rollout.engine_options.kv_cache_gib or gpu_memory_utilization, or lower model.max_context"
        )
        return f"{words.partition(' See http')[0].rstrip('.')}; {fix}"
    if says_out_of_memory(words):
        fix = (
            "lower rollout.engine_options.gpu_memory_utilization or rollout.max_concurrency, or raise "
            "rollout.engine_options.tensor_parallel_size"
        )
        return f"{words}; {fix}"
    return f"{words}; see this instance's log for the engine's own words"
