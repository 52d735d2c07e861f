"""Numbers of a trainer, its algorithm and its batch that do not fit. Each rule yields problems with their fixes.

A trainer checks the rest as a run opens: algorithms and options that are not built in, and what depends on the model.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from headrace_schema.problems import problem
from headrace_schema.resources.views import KeyProblemView
from headrace_schema.rules.asked import GROUP_RELATIVE, OTHERS
from headrace_schema.sections.learning import TrainerSection
from headrace_schema.sections.run import RunSections

LOW_RATE = 1e-5
SIZES = {
    "megatron": ("tensor_parallel", "pipeline_parallel", "context_parallel"),
    "fsdp": ("context_parallel",),
}
"""Options of a backend by which several ranks compute one model between them."""


def batch(spec: RunSections) -> Iterator[KeyProblemView]:
    """Problems of the numbers that make a step's batch, and of the schedule."""
    algorithm, ranks = spec.algorithm, spec.trainer.ranks
    shares = max(1, ranks // model_ranks(spec.trainer))
    comparing = [each.name for each in spec.algorithms.values() if each.name in GROUP_RELATIVE]
    if comparing and algorithm.group_size < 2:
        reason = f"{comparing[0]} compares the samples of a group"
        fix = "use at least 2"
        if spec.is_online:
            fix += ", with a group named for each session (X-Headrace-Group), or set algorithm.name: reinforce_pp"
        yield problem("algorithm.group_size", reason, fix)
    if spec.session is None and algorithm.prompts_per_step % shares:
        replicas = "" if shares == ranks else f", which are {shares} replicas of the model"
        yield problem(
            "algorithm.prompts_per_step",
            f"{algorithm.prompts_per_step} groups cannot be shared evenly by trainer.ranks: {ranks}{replicas}",
            f"the nearest valid value is {max(1, round(algorithm.prompts_per_step / shares)) * shares}",
        )
    # Of episodes, minibatches are counted in chunks.
    for where, each in () if spec.acts_in_environments else spec.algorithms.items():
        count, prompts = each.options.get("minibatches", 1), each.prompts_per_step
        if each.name in GROUP_RELATIVE | OTHERS and isinstance(count, int) and count > prompts:
            reason = f"{count} minibatches of whole groups cannot be made of {prompts} prompts a step"
            yield problem(f"{where}.options.minibatches", reason, f"the nearest valid value is {prompts}")
    schedule = spec.optimizer.schedule
    total = schedule.total_steps or spec.steps
    if schedule.warmup_steps > total:
        yield problem(
            "optimizer.schedule.warmup_steps",
            f"the warm-up of {schedule.warmup_steps} steps does not end within the schedule's {total}",
            f"the nearest valid value is {total}",
        )


def doubtful_adapter_rate(spec: RunSections) -> Iterator[KeyProblemView]:
    """Yields a warning where adapters have a learning rate that suits whole weights."""
    if spec.trainer.lora is not None and spec.optimizer.lr < LOW_RATE:
        reason = f"adapters hardly move at {spec.optimizer.lr:g}: they need about ten times the rate of whole weights"
        yield problem("optimizer.lr", reason, "try 1e-5 to 1e-3")


def model_ranks(trainer: TrainerSection) -> int:
    """How many ranks compute one model between them, and therefore learn from the same rows."""
    sizes = (trainer.backend_options.get(name, 1) for name in SIZES.get(trainer.backend, ()))
    # What is no count is a problem of the options, which their own model finds.
    return math.prod(size for size in sizes if isinstance(size, int) and size > 0)


def ranks_of_trainer(spec: RunSections) -> Iterator[KeyProblemView]:
    """Problems of numbers of ranks: their bounds, and whole models or sets of experts that cannot be made of them."""
    trainer, options, size = spec.trainer, spec.trainer.backend_options, model_ranks(spec.trainer)
    least, most = trainer.min_ranks or trainer.ranks, trainer.max_ranks or trainer.ranks
    if least > trainer.ranks:
        yield problem("trainer.min_ranks", f"{least} is above trainer.ranks", f"use at most {trainer.ranks}")
    if most < trainer.ranks:
        yield problem("trainer.max_ranks", f"{most} is below trainer.ranks", f"use at least {trainer.ranks}")
    if trainer.ranks % size:
        sizes = " x ".join(f"{name} {options[name]}" for name in SIZES[trainer.backend] if name in options)
        reason = f"{trainer.ranks} ranks are no multiple of the {size} that compute one model ({sizes})"
        fix = f"the nearest valid value is {max(1, round(trainer.ranks / size)) * size}"
        yield problem("trainer.ranks", reason, fix)
    experts = options.get("expert_parallel", 1)
    if trainer.backend != "fsdp" or not isinstance(experts, int) or experts < 2:
        return
    for name in ("ranks", "min_ranks", "max_ranks"):
        ranks = getattr(trainer, name)
        if ranks is not None and ranks % experts:
            reason = (
                f"{ranks} ranks are no multiple of the {experts} that divide the experts (expert_parallel)"
            )
            fix = f"the nearest valid value is {max(1, round(ranks / experts)) * experts}"
            yield problem(f"trainer.{name}", reason, fix)
