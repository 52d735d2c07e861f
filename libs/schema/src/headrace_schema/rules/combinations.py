"""All rules of a run spec that are checked without a fleet: numbers, names, and `table`."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from headrace_schema.problems import problem
from headrace_schema.resources.views import KeyProblemView
from headrace_schema.rules import learning, placing
from headrace_schema.rules.acting import beside_problems
from headrace_schema.rules.agentic import agentic_problems
from headrace_schema.rules.environments import environment_problems
from headrace_schema.rules.features import Resolved
from headrace_schema.rules.table import conflicts
from headrace_schema.rules.workflow import workflow_problems
from headrace_schema.sections.run import RunSections

MAX_SLOTS_PER_STEP = 2**20
MANY_SLOTS = 65_536
MANY_TOKENS = 131_072
HIGH_RATE = 0.01


def impossible_combinations(spec: RunSections) -> Iterator[KeyProblemView]:
    """Every problem of a spec whose single values are valid."""
    for rule in RULES:
        yield from rule(spec)


def doubtful_values(spec: RunSections) -> Iterator[KeyProblemView]:
    """What is valid and rarely meant, as warnings."""
    for key, rate in (("optimizer.lr", spec.optimizer.lr), ("trainer.warmup.lr", spec.trainer.warmup.lr)):
        if rate > HIGH_RATE:
            yield problem(
                key, f"{rate:g} is a hundred times a usual learning rate or more", "try 1e-6 to 1e-3"
            )
    yield from learning.doubtful_adapter_rate(spec)
    if spec.slots_per_step > MANY_SLOTS:
        yield problem(
            "algorithm.group_size",
            f"a step has {spec.slots_per_step:,} answers of up to {spec.sampling.max_new_tokens:,} tokens",
            "try fewer samples or prompts",
        )
    if spec.sampling.max_new_tokens > MANY_TOKENS:
        yield problem(
            "sampling.max_new_tokens",
            f"{spec.sampling.max_new_tokens:,} tokens are beyond most models' context",
            "set what answers need",
        )


def _length_stages(spec: RunSections) -> Iterator[KeyProblemView]:
    begins, most = 0, spec.sampling.max_new_tokens
    for place, stage in enumerate(spec.sampling.stages):
        key = f"sampling.stages[{place}]"
        if stage.until_step <= begins:
            reason = f"{stage.until_step} is not above {begins}, the step that the stage begins with"
            yield problem(f"{key}.until_step", reason, f"use at least {begins + 1}, or remove the stage")
        if stage.until_step >= spec.steps:
            reason = f"steps: {spec.steps} end the run before sampling.max_new_tokens: {most} holds"
            fix = f"use less than {spec.steps}, or remove the stage and give its length as sampling.max_new_tokens"
            yield problem(f"{key}.until_step", reason, fix)
        if stage.max_new_tokens >= most:
            reason = f"{stage.max_new_tokens} is not below sampling.max_new_tokens: {most}, of the last stage"
            yield problem(f"{key}.max_new_tokens", reason, "lower it, or raise sampling.max_new_tokens")
        begins = stage.until_step


def _values(spec: RunSections) -> Iterator[KeyProblemView]:
    """Values that cannot be, whatever else the run asks for: sizes, texts that are empty, names that are taken."""
    group, prompts, context = (
        spec.algorithm.group_size,
        spec.algorithm.prompts_per_step,
        spec.model.max_context,
    )
    if spec.store is not None and "checkpoints" in spec.store.keep and not spec.checkpoint.enabled:
        fix = "set it to true, or leave checkpoints out of store.keep"
        yield problem("checkpoint.enabled", "store.keep names checkpoints, and there are none", fix)
    if spec.slots_per_step > MAX_SLOTS_PER_STEP:
        key, other = ("group_size", prompts) if group >= prompts else ("prompts_per_step", group)
        most = f"the {MAX_SLOTS_PER_STEP:,} answers of one step"
        reason = f"{group:,} samples of {prompts:,} prompts are more than {most}"
        yield problem(f"algorithm.{key}", reason, f"use at most {max(1, MAX_SLOTS_PER_STEP // other)}")
    for name, neutral in (("top_p", 1), ("top_k", 0), ("min_p", 0), ("repetition_penalty", 1)):
        if getattr(spec.sampling, name) != neutral:
            reason = "truncated or penalised sampling is refused on policy (the kept set does not travel)"
            yield problem(f"sampling.{name}", reason, f"set {name}: {neutral}")
    for key, section in (("sampling", spec.sampling), ("evaluation", spec.evaluation)):
        if context is not None and (section.max_new_tokens or 0) >= context:
            room = f"no room for a prompt within model.max_context: {context}"
            reason = f"{section.max_new_tokens} new tokens leave {room}"
            yield problem(f"{key}.max_new_tokens", reason, f"use less than {context}")
    yield from _length_stages(spec)
    if any(not text for text in spec.sampling.stop):
        yield problem("sampling.stop", "an empty text ends every answer at once", "remove it")
    for name in sorted(spec.evaluation.data.keys() & {"heldout", "baseline_prefill"}):
        reason = "is the name of another kind of evaluation"
        yield problem(f"evaluation.data.{name}", reason, "use another name")
    for part, scorers in spec.reward.sets().items():
        if not scorers and spec.is_scored:
            yield problem(f"reward.{part}", "no scorer judges an answer", "name one, such as exact")
        elif scorers and all(scorer.weight == 0 for scorer in scorers):
            reason = "every weight is 0, so every answer is worth the same"
            yield problem(f"reward.{part}", reason, "weigh one scorer")
        for index, scorer in enumerate(scorers):
            if scorer.name.endswith((".py", ".py:")):
                reason, fix = f"{scorer.name} names a file but no function in it", scorer.name.rstrip(":")
                yield problem(f"reward.{part}[{index}].name", reason, f"write {fix}:function")


RULES: tuple[Callable[[RunSections], Iterator[KeyProblemView]], ...] = (
    _values,
    learning.batch,
    learning.ranks_of_trainer,
    placing.placement,
    placing.processes,
    beside_problems,
    workflow_problems,
    environment_problems,
    agentic_problems,
    lambda spec: conflicts(Resolved(spec)),
)
"""In the order in which a user reads the problems: numbers and names first, then what does not go together."""
