"""What a spec leaves out and its GPUs decide: an engine's sizes and shares, and the size of a forward, with reasons.

Follows from the GPU's memory and the model's configuration, as far as they are known. On CPU slots nothing is decided
here: the sections' own defaults stay.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headrace_schema.learner_size import FEWEST_TOKENS, MOST_TOKENS, Learner, fit
from headrace_schema.model_size import ModelSize, model_size, text_config
from headrace_schema.openings import role_model
from headrace_schema.rules.learning import model_ranks
from headrace_schema.sections.generating import ModelSection, engine_gpus, engine_hosts
from headrace_schema.sections.learning import TrainerSection
from headrace_schema.sections.policies import adapters_of
from headrace_schema.spec import RunSpec

GIB = 2**30
SPANNING = ("vllm", "sglang")
"""Engines one of which may span several GPUs."""
CONCURRENCY, FEWEST_ROWS, MOST_ROWS = 256, 16, 1024
"""Sequences decoded together: where the cache is not known, and at least and most where it is."""
MOST_SHARE, RESERVED_BYTES, RESERVED_SHARE = 0.92, 8 * GIB, 0.15
"""Of a GPU's memory: the most that an engine takes, and what it leaves to contexts and to a trainer that waits."""
ASLEEP_SHARE = 0.15
"""Of a GPU's memory, the most that a sleeping engine may keep: contexts, and what its libraries give to nobody."""
BUILT_IN_SHARE, SGLANG_SHARE = 0.8, 0.8
WEIGHTS_SHARE = 0.6
"""Of what an engine takes, the most that its weights should have."""
WORKSPACE = 0.1
"""Of what an engine takes: activations and captured graphs."""
ACTIVATION_BYTES, ACTIVATION_SHARE = 16 * GIB, 0.2
"""For a forward's activations where no layout is foreseen: the GPU's memory is not known, and where it is."""
PARTS_OF_A_STAGE = 4
"""Parts that megatron divides a pipeline's micro-batch into for each stage, by default."""
EXPECTED_SHARE = 0.25
"""Of the longest answer, the length that one is expected to have until lengths are measured."""
PROMPT_TOKENS = 1024
"""Of the longest prompt, where data.prompt.longest does not say."""
ADAPTER_BYTES = 4
"""Of a number of an adapter: the built-in engine computes with them in fp32."""
SPAN = "rollout.engine_options.tensor_parallel_size"


@dataclass(frozen=True)
class Default:
    """A key that was left out, the value that it gets, and why."""

    key: str
    value: Any
    why: str


@dataclass(frozen=True)
class Gpus:
    """What a run may generate and learn on. 0 where it is not known."""

    memory_bytes: int = 0
    """Of the smallest of them."""
    seen: int = 0
    """Most that one rollout instance sees, which is of one host."""
    count: int = 0
    """How many the run's rollouts may have in all."""
    on_host: int = 0
    """How many of the run's may be on one host."""


def gpu_defaults(spec: RunSpec, engine: str, config: Mapping[str, Any], gpus: Gpus) -> list[Default]:
    """Defaults of a language model's run on GPUs, of keys that its spec does not name. `config`: the model's, or {}."""
    size, found = model_size(config), []
    options = dict(spec.rollout.engine_options)
    if engine == "vllm" and gpus.memory_bytes and "gpu_memory_utilization" not in options:
        share = engine_share(gpus.memory_bytes)
        left = (1 - share) * gpus.memory_bytes / GIB
        why = (
            f"it leaves {left:.1f} of {gpus.memory_bytes / GIB:.0f} GiB to contexts and a trainer that waits"
        )
        found.append(Default("rollout.engine_options.gpu_memory_utilization", share, why))
        options["gpu_memory_utilization"] = share
    # A helper decodes on a rank's one GPU: beside them no engine spans several.
    engines = spec.rollout.instances * spec.engines
    span = None if size is None or spec.rollout.helpers else _span(engine, options, size, gpus, engines)
    if span is not None:
        found.append(span)
        options["tensor_parallel_size"] = span.value
    if "max_concurrency" not in spec.rollout.model_fields_set:
        found.append(_rows(spec, engine, options, size, gpus))
    if "micro_batch_tokens" not in spec.trainer.model_fields_set:
        found.append(_tokens(spec, size, gpus))
    return found


def engine_share(memory_bytes: int) -> float:
    """The part of a GPU's memory that an engine takes.

    >>> [engine_share(gib * 2**30) for gib in (24, 40, 80, 141)]
    [0.85, 0.85, 0.9, 0.92]
    """
    reserved = min(RESERVED_BYTES, RESERVED_SHARE * memory_bytes)
    return min(MOST_SHARE, round(1 - reserved / memory_bytes, 2))


def asleep_limit(memory_bytes: int) -> int:
    """Most bytes of a GPU that a sleeping engine may keep; of 80 GB where its memory is not known (0).

    >>> asleep_limit(80 * 2**30) // 2**30
    12
    """
    return int(ASLEEP_SHARE * (memory_bytes or 80e9))


def room(engine: str, options: Mapping[str, Any], gpus: Gpus) -> float:
    """Bytes of one GPU that an engine takes."""
    named = options.get({"vllm": "gpu_memory_utilization", "sglang": "memory_fraction"}.get(engine, ""))
    own = {"vllm": engine_share(gpus.memory_bytes), "sglang": SGLANG_SHARE}.get(engine, BUILT_IN_SHARE)
    return gpus.memory_bytes * (float(named) if isinstance(named, (int, float)) else own)


def fitting_spans(engine: str, options: Mapping[str, Any], size: ModelSize, gpus: Gpus) -> list[int]:
    """Tensor parallel sizes at which the weights are within what an engine takes of that many of its hosts' GPUs."""
    stages, hosts = engine_gpus({**options, "tensor_parallel_size": 1}), engine_hosts(options)
    weights, each = size.weight_bytes(options.get("quantization")), room(engine, options, gpus)
    most = gpus.seen * hosts // stages if gpus.seen else max(size.sizes)
    whole = [span for span in size.sizes if span * stages % hosts == 0]
    return [span for span in whole if span <= most and weights <= span * stages * each]


def _span(
    engine: str, options: Mapping[str, Any], size: ModelSize, gpus: Gpus, instances: int
) -> Default | None:
    if engine not in SPANNING or not gpus.memory_bytes or "tensor_parallel_size" in options:
        return None
    fitting = fitting_spans(engine, options, size, gpus)
    stages = engine_gpus(options)
    weights, each = size.weight_bytes(options.get("quantization")), room(engine, options, gpus)
    easy = [span for span in fitting if weights <= WEIGHTS_SHARE * span * stages * each]
    wanted = easy[0] if easy else fitting[-1] if fitting else 1
    # Of an engine over several hosts each of these has an instance.
    most = gpus.count * engine_hosts(options) // (instances * stages) if gpus.count else wanted
    chosen = max((span for span in fitting if span <= min(wanted, most)), default=wanted)
    if chosen == 1:
        return None
    why = f"weights of {weights / GIB:.1f} GiB leave room for keys and values on so many GPUs of "
    less = f"; rollout.instances: {instances} leave no more to each" if chosen < wanted else ""
    return Default(SPAN, chosen, f"{why}{gpus.memory_bytes / GIB:.0f} GiB{less}")


def _rows(
    spec: RunSpec, engine: str, options: Mapping[str, Any], size: ModelSize | None, gpus: Gpus
) -> Default:
    key = "rollout.max_concurrency"
    if size is None or not gpus.memory_bytes:
        unknown = "the model's size" if size is None else "the GPUs' memory"
        return Default(key, CONCURRENCY, f"{unknown} is not known here; the cache admits what fits")
    each = (1 - WORKSPACE) * room(engine, options, gpus)
    held, weights = engine_weights(spec, options, size)
    cache = engine_gpus(options) * each - held
    expected = longest_sequence(spec, EXPECTED_SHARE)
    fitting = int(max(0.0, cache) / (expected * size.token_bytes))
    rows = max(FEWEST_ROWS, min(MOST_ROWS, fitting // FEWEST_ROWS * FEWEST_ROWS))
    why = (
        f"{max(0.0, cache) / GIB:.1f} GiB of keys and values hold {fitting} sequences of the {expected} tokens that "
        f"are expected{weights}; an engine begins fewer where answers turn out longer"
    )
    return Default(key, rows, why)


def longest_sequence(spec: RunSpec, share: float = 1.0) -> int:
    """Tokens of a prompt and of a share of the longest answer, within the context that the spec names."""
    found = (spec.data.prompt.longest or PROMPT_TOKENS) + math.ceil(share * spec.sampling.max_new_tokens)
    return found if spec.model.max_context is None else min(found, spec.model.max_context)


def engine_weights(spec: RunSpec, options: Mapping[str, Any], size: ModelSize) -> tuple[float, str]:
    """Bytes of the weights of a run's models on the devices of its own policy's engine, and of several, in words, where
    they come from: each policy has an engine, or with rollout.enable_lora all have one; so has each frozen model.
    """
    each, sharing = size.weight_bytes(options.get("quantization")), 1
    for policy in spec.policies.values():
        sharing += not policy.own_devices and policy.model in (None, spec.model)
    frozen = sum(frozen_bytes(spec, options).values())
    more = f", beside frozen models of {frozen / GIB:.1f} GiB" if frozen else ""
    if not spec.rollout.enable_lora:
        words = f", beside the weights of {sharing} policies" if sharing > 1 else ""
        return sharing * each + frozen, words + more
    found = adapters_of(spec.model, spec.trainer, spec.policies)
    own = ADAPTER_BYTES * size.adapter_sides * sum(lora.rank for lora in found.values())
    words = f", beside one base ({each / GIB:.1f} GiB) and adapters of {len(found)} ({own / GIB:.2f} GiB)"
    return each + own + frozen, words + more


def frozen_bytes(spec: RunSpec, options: Mapping[str, Any]) -> dict[str, int]:
    """Bytes of the weights of each frozen model on the devices of a policy's engine, by the key that names it first: a
    teacher that reads answers, and models that play roles. Those of unknown size are left out.
    """
    named: dict[str, ModelSection] = {}
    if spec.teacher_top and spec.trainer.reference is not None:
        named["trainer.reference.path"] = spec.trainer.reference
    for name, role in (spec.environment.roles if spec.environment else {}).items():
        if role.path and not role.own_devices:
            model = role_model(spec.model, role)
            if model not in named.values():  # one that plays several roles is there once
                named[f"environment.roles.{name}.path"] = model
    sizes = {key: model_size(text_config(model)) for key, model in named.items()}
    return {key: size.weight_bytes(options.get("quantization")) for key, size in sizes.items() if size}


def _tokens(spec: RunSpec, size: ModelSize | None, gpus: Gpus) -> Default:
    key, longest = "trainer.micro_batch_tokens", longest_sequence(spec)
    if size is None:
        return Default(key, FEWEST_TOKENS, "the model's size is not known here")
    if spec.trainer.backend != "fsdp" or not gpus.memory_bytes:
        whole = Learner.of(spec, size).token_bytes(again=bool(spec.trainer.gradient_checkpointing))
        each = whole / _kept_apart(spec.trainer)
        space = int(ACTIVATION_SHARE * gpus.memory_bytes) or ACTIVATION_BYTES
        tokens = max(FEWEST_TOKENS, min(MOST_TOKENS, _power_of_two(int(space / each))))
        return Default(
            key,
            tokens,
            f"a token's activations are {each / 2**20:.2f} MiB, and {space / GIB:.0f} GiB are for them",
        )
    found = fit(spec, size, gpus.memory_bytes, gpus.on_host or gpus.seen, longest)
    tokens = found.tokens or max(FEWEST_TOKENS, min(MOST_TOKENS, longest))
    return Default(key, tokens, f"{found.why}, beside the layout that the trainers take ({found.layout})")


def _kept_apart(trainer: TrainerSection) -> int:
    """How many tokens of a micro-batch a rank has for each whose activations it keeps: ranks of a model keep parts of a
    token's, and a stage those of as many parts as there are stages.
    """
    if trainer.backend == "fsdp":
        return 1
    stages = trainer.backend_options.get("pipeline_parallel", 1)
    return model_ranks(trainer) * (PARTS_OF_A_STAGE if isinstance(stages, int) and stages > 1 else 1)


def _power_of_two(most: int) -> int:
    return 1 << (max(1, most).bit_length() - 1)


def with_defaults(spec: RunSpec, defaults: Sequence[Default]) -> RunSpec:
    """The spec with them in place."""
    for each in defaults:
        spec = _with(spec, each.key.split("."), each.value)
    return spec


def _with(place: Any, path: Sequence[str], value: Any) -> Any:
    """A copy of a section, or of a mapping, with a value at the end of the path."""
    key, *rest = path
    mapped = isinstance(place, Mapping)
    if rest:
        value = _with(place[key] if mapped else getattr(place, key), rest, value)
    return {**place, key: value} if mapped else place.model_copy(update={key: value})


def told(defaults: Sequence[Default]) -> str:
    """For people: what was decided, and why."""
    values = "; ".join(f"{each.key}: {each.value} ({each.why})" for each in defaults)
    return f"decided for what the spec leaves out: {values}" if values else ""
