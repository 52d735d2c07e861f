"""Which engine a run takes, and what it needs of it. Pure but for one read: a local model's config.json."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from headrace_schema.evaluating import AnswerSection
from headrace_schema.problems import choose, problem
from headrace_schema.resources.views import KeyProblemView
from headrace_schema.spec import RunSpec

from headrace_coordinator.domain.devices.places import named_devices

if TYPE_CHECKING:
    from headrace_coordinator.api.submission.admission import FleetView

AUTO, BUILT_IN = "auto", "transformers"
EXTRAS = ("vllm", "sglang")
"""Engines that are an extra of headrace-rollout, the one that `auto` prefers first."""
ATTENTION = {"full_attention", "sliding_attention"}
"""Kinds of layers that the built-in engine runs."""


def settle_engine(spec: RunSpec, fleet: FleetView) -> tuple[RunSpec, str]:
    """The spec with the engine that `rollout.engine: auto` stands for, and why it is that one; empty for others."""
    if spec.rollout.engine != AUTO:
        return spec, ""
    name, why = _choose(spec, fleet)
    rollout = spec.rollout.model_copy(update={"engine": name})
    return spec.model_copy(update={"rollout": rollout}), f"rollout.engine: auto takes {name}: {why}"


def engine_problems(spec: RunSpec, fleet: FleetView) -> Iterator[KeyProblemView]:
    """An engine that no instance can run, and needs of the spec that the engine lacks."""
    name, known = spec.rollout.engine, fleet.names("rollout", "engines")
    if not known:  # Without a ready instance there are no names to compare with: a problem of its own.
        return
    if name not in known:
        reason = f"no rollout instance has {name!r} among its engines"
        fix = choose(name, known)
        if name in EXTRAS:
            fix = (
                f"install headrace-rollout[{name}] where a rollout instance runs and restart that, or set "
                f"rollout.engine: {' or '.join(sorted(known))}"
            )
        yield problem("rollout.engine", reason, fix)
    elif spec.deterministic and not _offers(fleet, name, "deterministic"):
        fit = [other for other in sorted(known) if _offers(fleet, other, "deterministic")]
        yield problem(
            "deterministic",
            f"rollout.engine: {name} cannot sample the same tokens again, since its random numbers follow its batches",
            f"set rollout.engine: {' or '.join(fit)}" if fit else "set deterministic: false",
        )


def answer_problems(asked: AnswerSection, engine: str, fleet: FleetView) -> Iterator[KeyProblemView]:
    """Distributions of an evaluation's answers that its engine would sample otherwise than asked."""
    if asked.top_p < 1 and (asked.top_k or asked.min_p) and not _offers(fleet, engine, "top_p_after_others"):
        reason = f"rollout.engine: {engine} counts top-p over all tokens, not over those that top_k and min_p leave"
        yield problem("sampling.top_p", reason, "set top_p: 1, or top_k: 0 and min_p: 0")
    if asked.repetition_penalty != 1 and not _offers(fleet, engine, "penalty_counts_prompt"):
        reason = f"rollout.engine: {engine} counts no tokens of the prompt for it"
        yield problem("sampling.repetition_penalty", reason, "set 1")


def _choose(spec: RunSpec, fleet: FleetView) -> tuple[str, str]:
    known = fleet.names("rollout", "engines")
    extras = [name for name in EXTRAS if name in known]
    if not extras:
        return BUILT_IN, f"no rollout instance has {' or '.join(EXTRAS)} installed"
    if spec.deterministic:
        return BUILT_IN, f"deterministic: true, which {' and '.join(extras)} cannot promise"
    if spec.model.gguf_file is not None:
        return BUILT_IN, "the model is a GGUF file"
    if other := _other_layers(spec.model.path):
        return extras[0], f"the model has {', '.join(sorted(other))} layers, which {BUILT_IN} cannot run"
    if not _on_gpus(spec, fleet):
        return BUILT_IN, f"the run has no GPU, and without one {extras[0]} takes longer to start"
    return extras[0], "it is installed and the run has GPUs"


def _offers(fleet: FleetView, name: str, feature: str) -> bool:
    """What instances registered of an engine; one of a release that registers no features counts as before."""
    listed = fleet.names("rollout", "engine_features")
    return not listed or f"{name}:{feature}" in listed


def _on_gpus(spec: RunSpec, fleet: FleetView) -> bool:
    named = named_devices(spec.placement.rollout, fleet.devices, fleet.hosts)
    devices = named or fleet.devices
    return any(device.rpartition("/")[2].startswith("gpu") for device in devices)


def _other_layers(path: str) -> set[str]:
    try:
        config = json.loads((Path(path).expanduser() / "config.json").read_text(encoding="utf-8"))
        kinds = config.get("text_config", config).get("layer_types") or ()
        return {str(kind) for kind in kinds} - ATTENTION
    except (OSError, ValueError, AttributeError, TypeError):  # an id, or what `admission` finds wrong
        return set()
