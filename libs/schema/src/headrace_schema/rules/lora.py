"""What training adapters alone does not go with, and the rate that it needs. Knows no model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from headrace_schema.problems import problem
from headrace_schema.resources.views import KeyProblemView

if TYPE_CHECKING:
    from headrace_schema.spec import RunSpec

BACKEND = "fsdp"
LOW_RATE = 1e-5


def lora_problems(spec: RunSpec) -> Iterator[KeyProblemView]:
    """Of built-in algorithms; a trainer checks the others, and the targets, as a run opens."""
    trainer, algorithm = spec.trainer, spec.algorithm
    if trainer.lora is None or spec.workflow == "embodied":
        return
    fix = ", or remove trainer.lora"
    if trainer.backend != BACKEND:
        reason = f"{trainer.backend} has no adapters"
        yield problem("trainer.lora", reason, f"set trainer.backend: {BACKEND}{fix}")
    if trainer.helpers:
        reason = "a helper holds the published weights, in which adapters are merged and get no gradient of their own"
        yield problem("trainer.helpers", reason, f"set trainer.helpers: 0{fix}")
    if algorithm.name == "ppo" and algorithm.options.get("critic") == "model":
        reason = "a critic with a model of its own has no adapters, and all its weights would be trained"
        yield problem("algorithm.options.critic", reason, f"set algorithm.options.critic: head{fix}")


def doubtful_rates(spec: RunSpec) -> Iterator[KeyProblemView]:
    """A rate for whole weights moves adapters too little, as a warning."""
    if spec.trainer.lora is not None and spec.optimizer.lr < LOW_RATE:
        reason = f"adapters hardly move at {spec.optimizer.lr:g}: they need about ten times the rate of whole weights"
        yield problem("optimizer.lr", reason, "try 1e-5 to 1e-3")
