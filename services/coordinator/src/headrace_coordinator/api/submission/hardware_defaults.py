"""What a spec leaves out and the hardware decides: sizes that suit GPUs. On CPU slots the schema's own defaults stay.

Knows no memory of a GPU, which instances do not report: a forward's size follows from the model, for a card on which
ACTIVATION_BYTES are free beside what training keeps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from headrace_schema.spec import RunSpec

from headrace_coordinator.api.submission.fleet_view import FleetView, has_gpus, text_config

CONCURRENCY = 256
"""Sequences that an engine on a GPU decodes together; its cache admits fewer where they do not fit."""
ACTIVATION_BYTES = 16 * 2**30
ACTIVATIONS = 34
"""Bytes a token, layer and unit of width that a bf16 forward keeps for its backward (Korthikanti et al., 2022)."""
CHECKPOINTED = 4
"""The same where layers are computed again: their inputs alone, and one layer's whole."""
FEWEST_TOKENS, MOST_TOKENS = 2048, 16_384


@dataclass(frozen=True)
class Default:
    """A key that was left out, and the value that it gets."""

    section: str
    key: str
    value: int


def hardware_defaults(spec: RunSpec, fleet: FleetView) -> list[Default]:
    """Defaults of a run that has GPUs, of keys that its spec does not name; none for robot policies."""
    if spec.workflow == "embodied" or not has_gpus(spec, fleet):
        return []
    wanted = [
        Default("rollout", "max_concurrency", CONCURRENCY),
        Default("trainer", "micro_batch_tokens", micro_batch_tokens(spec)),
    ]
    return [each for each in wanted if each.key not in getattr(spec, each.section).model_fields_set]


def micro_batch_tokens(spec: RunSpec) -> int:
    """The most tokens, a power of two, whose activations fit beside a model; few for one that cannot be read here."""
    config = text_config(spec.model.path)
    width, layers = config.get("hidden_size"), config.get("num_hidden_layers")
    if type(width) is not int or type(layers) is not int or width < 1 or layers < 1:
        return FEWEST_TOKENS
    each = width * layers * (CHECKPOINTED if spec.trainer.gradient_checkpointing else ACTIVATIONS)
    fits = 1 << (max(1, ACTIVATION_BYTES // each).bit_length() - 1)
    return max(FEWEST_TOKENS, min(MOST_TOKENS, fits))


def with_defaults(spec: RunSpec, defaults: list[Default]) -> RunSpec:
    """The spec with them in place."""
    changed: dict[str, Any] = {}
    for each in defaults:
        section = changed.get(each.section, getattr(spec, each.section))
        changed[each.section] = section.model_copy(update={each.key: each.value})
    return spec.model_copy(update=changed)


def told(defaults: list[Default]) -> str:
    """For the run's events and a dry run."""
    values = ", ".join(f"{each.section}.{each.key}: {each.value}" for each in defaults)
    return f"on GPUs the defaults are {values}" if values else ""
