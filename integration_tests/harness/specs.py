"""Run specs that take seconds: the tiny model copies digits, a few steps of 16 answers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

GROUPS, SAMPLES = 4, 4
BATCH = GROUPS * SAMPLES


def small_spec(model: Path, **overrides: Any) -> dict[str, Any]:
    """A run of 3 steps; overrides are merged key by key, with `__` between sections and keys."""
    spec: dict[str, Any] = {
        "name": "small",
        "steps": 3,
        "seed": 7,
        "model": {"path": str(model), "dtype": "float32"},
        "data": {
            "source": "copy_digits",
            "options": {"digits": 3},
            "heldout": 8,
            "prompt": {"template": "{question}", "chat": False},
        },
        "sampling": {"max_new_tokens": 4},
        "algorithm": {"prompts_per_step": GROUPS, "group_size": SAMPLES},
        "optimizer": {"lr": 5.0e-4},
        "trainer": {"warmup": {"steps": 2, "lr": 2.0e-3, "batch": 16}},
        "rollout": {"max_concurrency": 32},
        "placement": {"mode": "collocated"},  # a long run would change it after its first steps
        # Answers of a model that knows nothing differ in length alone: without it no group has a gradient.
        "reward": {"scorers": [{"name": "exact"}, {"name": "length", "options": {"target": 1, "limit": 4}}]},
        "checkpoint": {"interval_steps": 1},
        "export": False,
    }
    for path, value in overrides.items():
        _merge(spec, path.split("__"), value)
    return spec


def _merge(section: dict[str, Any], path: list[str], value: Any) -> None:
    *sections, key = path
    for name in sections:
        section = section.setdefault(name, {})
    inner = section.get(key)
    if isinstance(inner, dict) and isinstance(value, Mapping) and key != "options":
        section[key] = {**inner, **value}
    else:
        section[key] = value
