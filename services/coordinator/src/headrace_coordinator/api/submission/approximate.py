"""Rollouts that compute with fewer bits than the trainer, or draft tokens: what does not go together, and TIS.

Quantised weights, or keys and values, make the engine another distribution than the trainer's. The difference is in
each step's `log_prob_mismatch_*`, and the gradient is corrected for it. Drafted tokens are checked by the policy, whose
distribution they keep.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from headrace_schema.gpu_defaults import Default
from headrace_schema.model_size import model_size, text_config
from headrace_schema.problems import problem
from headrace_schema.resources.views import KeyProblemView
from headrace_schema.sections.generating import drafts, quantized
from headrace_schema.spec import RunSpec
from headrace_servicekit.registry import read_capabilities

from headrace_coordinator.api.submission.fleet_view import FleetView

if TYPE_CHECKING:
    from headrace_coordinator.api.submission.submission import Submission

OPTIONS = "rollout.engine_options"
QUANTIZATION, SPECULATIVE = f"{OPTIONS}.quantization", f"{OPTIONS}.speculative"
OFF_POLICY = "off_policy"
"""Feature of algorithms that correct for samples of another distribution than the newest version's."""


def quantised(submission: Submission) -> Iterator[KeyProblemView]:
    """What asks for exact answers of an engine that computes with fewer bits."""
    spec, fleet = submission.spec, submission.fleet
    options = spec.rollout.engine_options
    what = quantized(options)
    if not what:
        return
    key = QUANTIZATION if options.get("quantization") else f"{OPTIONS}.engine_args.kv_cache_dtype"
    if spec.model.dtype == "float32":
        reason = f"model.dtype: float32 asks for exact passes, and the engine would compute with {what}"
        yield problem(key, reason, "set model.dtype: bfloat16, or leave it out")
    size = model_size(text_config(spec.model.path))
    if options.get("quantization") == "int8" and size is not None and not size.expert_parameters:
        reason = f"int8 is of experts alone, and {spec.model.path!r} has none"
        yield problem(key, reason, "set fp8, or leave it out")
    if submission.evaluated is not None:
        return
    features = fleet.names("trainer", "algorithm_features")
    for where, algorithm in spec.algorithms.items():
        name = algorithm.name
        if algorithm.options.get("correction") == "none":
            reason = f"none takes the engine's distribution for the trainer's, and it computes with {what}"
            fix = f"leave it out (truncate then), set mask, or leave {key} out"
            yield problem(f"{where}.options.correction", reason, fix)
        known = features and name in fleet.names("trainer", "algorithms")
        if known and f"{name}:{OFF_POLICY}" not in features:
            fit = sorted(each.partition(":")[0] for each in features if each.endswith(f":{OFF_POLICY}"))
            reason = f"{name} is right on samples of the trainer's own distribution only"
            yield problem(key, reason, f"leave it out, or set {where}.name to one of {', '.join(fit)}")


def drafted(submission: Submission) -> Iterator[KeyProblemView]:
    """What cannot be had of an engine that drafts tokens."""
    spec, method = submission.spec, drafts(submission.spec.rollout.engine_options)
    if not method:
        return
    if spec.algorithm.options.get("routing_replay"):
        reason = "the experts of drafted tokens are not told apart from those of tokens that were taken"
        yield problem("algorithm.options.routing_replay", reason, f"leave it out, or {SPECULATIVE}")
    if method == "draft":
        yield from _vocabulary(submission)
    if submission.evaluated is None:
        return
    asked = submission.evaluated.asked.sampling
    lacks = ("min_p",) if submission.engine == "vllm" else ("top_p", "top_k", "min_p")
    for name, neutral in (("top_p", 1), ("top_k", 0), ("min_p", 0)):
        if name in lacks and getattr(asked, name) != neutral:
            reason = f"{submission.engine} does not check drafts under it"
            yield problem(f"sampling.{name}", reason, f"set {neutral}, or leave {SPECULATIVE} out")


def _vocabulary(submission: Submission) -> Iterator[KeyProblemView]:
    spec = submission.spec
    path = spec.rollout.engine_options["speculative"].get("model")
    own, draft = (text_config(str(each)).get("vocab_size") for each in (spec.model.path, path))
    if own is not None and draft is not None and own != draft:
        reason = f"{path} has a vocabulary of {draft} tokens and {spec.model.path} one of {own}"
        fix = "name a model of the same family, or set method: ngram"
        yield problem(f"{SPECULATIVE}.model", reason, fix)


def correction(spec: RunSpec, fleet: FleetView) -> list[Default]:
    """Truncated importance sampling for rollouts that are quantised, or add adapters to a base of few bits, in each
    policy's algorithm that names no correction of its own.
    """
    what = quantized(spec.rollout.engine_options)
    why = f"the engine computes with {what}, and the trainer without"
    if not what and spec.rollout.enable_lora and spec.model.dtype != "float32":
        what = f"adapters beside {spec.model.dtype} weights"
        why = f"the engine computes with {what}, and the trainer rounds both to one weight"
    return [
        Default(f"{key}.options.correction", "truncate", why)
        for key, algorithm in spec.algorithms.items()
        if what
        and "correction" not in algorithm.options
        and algorithm.options.get("old_log_probs") != "engine"
        and _takes_correction(algorithm.name, fleet)
    ]


def _takes_correction(name: str, fleet: FleetView) -> bool:
    listed = fleet.names("trainer", "algorithm_options")
    schemas = [read_capabilities([text]).get(name) for text in listed if text.startswith(f"{name}=")]
    return any("correction" in schema.get("properties", {}) for schema in schemas if schema is not None)
