"""What cannot work with `trainer.backend: megatron`; what depends on the model a trainer checks as a run opens."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from headrace_schema.problems import problem
from headrace_schema.resources.views import KeyProblemView

if TYPE_CHECKING:
    from headrace_schema.sections.learning import TrainerSection
    from headrace_schema.spec import RunSpec

NAME = "megatron"
SIZES = ("tensor_parallel", "pipeline_parallel", "context_parallel")
CRITICS = ("ppo",)
"""Built-in algorithms with a critic."""
ELSE = ", or set trainer.backend: fsdp"


def model_ranks(trainer: TrainerSection) -> int:
    """How many ranks compute one model between them, and therefore learn from the same rows."""
    if trainer.backend != NAME:
        return 1
    sizes = (trainer.backend_options.get(name, 1) for name in SIZES)
    # What is no count is a problem of the options, which their own model finds.
    return math.prod(size for size in sizes if isinstance(size, int) and size > 0)


def megatron_problems(spec: RunSpec) -> Iterator[KeyProblemView]:
    """Problems of a run whose backend is megatron."""
    trainer = spec.trainer
    if trainer.backend != NAME:
        return
    options, model = trainer.backend_options, model_ranks(trainer)
    if trainer.ranks % model:
        sizes = " x ".join(f"{name} {options[name]}" for name in SIZES if name in options)
        yield problem(
            "trainer.ranks",
            f"{trainer.ranks} ranks are no multiple of the {model} that hold one model ({sizes})",
            f"the nearest valid value is {max(1, round(trainer.ranks / model)) * model}",
        )
    if options.get("sequence_parallel") is True and options.get("tensor_parallel", 1) == 1:
        yield problem(
            "trainer.backend_options.sequence_parallel",
            "it divides what tensor-parallel ranks would all have, and tensor_parallel is 1",
            "set tensor_parallel to 2 or more, or remove it",
        )
    yield from _unsupported(spec)


def _unsupported(spec: RunSpec) -> Iterator[KeyProblemView]:
    trainer = spec.trainer
    for key, ranks in (("min_ranks", trainer.min_ranks), ("max_ranks", trainer.max_ranks)):
        if ranks not in (None, trainer.ranks):
            reason = (
                "a group that changes by itself takes any number of ranks, and megatron needs whole models"
            )
            yield problem(f"trainer.{key}", reason, f"remove it{ELSE}")
    if trainer.helpers:
        reason = "megatron takes no gradients of helpers"
        yield problem("trainer.helpers", reason, f"set trainer.helpers: 0{ELSE}")
    if trainer.shared_prefix:
        reason = "Megatron's layers attend along rows, and follow no tree of prefixes"
        yield problem("trainer.shared_prefix", reason, f"remove it, or set it to false{ELSE}")
    if spec.workflow == "embodied":
        reason = "megatron trains language models, and a robot policy has a backend of its own"
        yield problem("trainer.backend", reason, "remove it")
    elif spec.algorithm.name in CRITICS:
        reason = f"{spec.algorithm.name} learns with a critic, which megatron does not have"
        yield problem("algorithm.name", reason, f"use an algorithm without a critic, such as grpo{ELSE}")
