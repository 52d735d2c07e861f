"""All rules of which values of a run spec cannot work together, found without a fleet."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from headrace_schema.problems import problem
from headrace_schema.resources.views import KeyProblemView
from headrace_schema.rules import learning, placing
from headrace_schema.rules.acting import scorer_problems, simulator_problems
from headrace_schema.rules.agentic import agentic_problems
from headrace_schema.rules.embodied import embodied_problems
from headrace_schema.rules.workflow import workflow_problems
from headrace_schema.sections.generating import SamplingSection
from headrace_schema.sections.run import RunSections
from headrace_schema.workflow import CONVERSATIONS

ON_POLICY = frozenset({"opo"})
"""Built-in algorithms that are right only for answers of the version that learns from them; a trainer refuses others
as a run opens, by their `on_policy_only`."""
STRICT = ", or set algorithm.max_staleness: 0"


def staleness(spec: RunSections) -> Iterator[KeyProblemView]:
    """Problems of `algorithm.max_staleness` with what else the spec asks for."""
    if not spec.algorithm.max_staleness:
        if spec.rollout.install is not None:
            reason = "with algorithm.max_staleness: 0 no answer is in hand when a version is installed"
            yield problem("rollout.install", reason, "remove it, or set algorithm.max_staleness to 1 or more")
        return
    yield from _placing(spec)
    if spec.deterministic:
        reason = "which version makes which token depends on times, so no two runs are alike"
        yield problem("algorithm.max_staleness", reason, "set it to 0, or set deterministic: false")
    for key, algorithm in spec.algorithms.items():
        if algorithm.name in ON_POLICY:
            reason = f"{algorithm.name} is right only for answers of the version that learns from them"
            fix = "use an algorithm that corrects for older versions, such as grpo"
            yield problem(f"{key}.name", reason, f"{fix}{STRICT}")
    if spec.data.curriculum is not None:
        reason = "it chooses a step's items by the pass rates of the step before, which has not ended when they start"
        yield problem("data.curriculum", reason, f"remove it{STRICT}")
    if spec.rollout.install in ("in_flight", "abort_and_resume"):
        what = (
            "an episode"
            if spec.workflow == "embodied"
            else "a conversation"
            if spec.workflow == CONVERSATIONS
            else ""
        )
        if what:
            reason = f"{what} is made with one version"
            yield problem("rollout.install", reason, "set rollout.install: drain, or remove it")


def _placing(spec: RunSections) -> Iterator[KeyProblemView]:
    placement = spec.placement
    if placement.share:
        reason = "a run that shares holds the devices of one side at a time, so nothing is generated while it learns"
        yield problem("placement.share", reason, f"set placement.share: false{STRICT}")
    elif placement.mode == "collocated":
        reason = (
            "rollout and trainer take turns on the same devices, so nothing is generated while the trainer learns, "
            "and answers would only become older"
        )
        yield problem("placement.mode", reason, f"set placement.mode: disaggregated or hybrid{STRICT}")
    for key, helpers in (("trainer", spec.trainer.helpers), ("rollout", spec.rollout.helpers)):
        if helpers:
            reason = "the last answers of a step decode beside those of the next ones, so no device is idle in a step"
            yield problem(f"{key}.helpers", reason, f"set {key}.helpers: 0{STRICT}")


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


def _size(spec: RunSections) -> Iterator[KeyProblemView]:
    group, prompts = spec.algorithm.group_size, spec.algorithm.prompts_per_step
    if spec.slots_per_step > MAX_SLOTS_PER_STEP:
        key, other = ("group_size", prompts) if group >= prompts else ("prompts_per_step", group)
        yield problem(
            f"algorithm.{key}",
            f"{group:,} samples of {prompts:,} prompts are more than the {MAX_SLOTS_PER_STEP:,} answers of one step",
            f"use at most {max(1, MAX_SLOTS_PER_STEP // other)}",
        )


def _prompt(spec: RunSections) -> Iterator[KeyProblemView]:
    prompt = spec.data.prompt
    if prompt.system is not None and not prompt.chat:
        yield problem(
            "data.prompt.system",
            "text that is fed as it is has no system message",
            "remove it, or set data.prompt.chat: true",
        )


def truncated_sampling(sampling: SamplingSection) -> Iterator[KeyProblemView]:
    """The keys of a distribution whose log-probs the trainer cannot compare."""
    neutral: dict[str, float] = {"top_p": 1, "top_k": 0, "min_p": 0, "repetition_penalty": 1}
    for key, value in neutral.items():
        if getattr(sampling, key) != value:
            yield problem(
                f"sampling.{key}",
                "truncated or penalised sampling is refused on policy (the kept set does not travel)",
                f"set {key}: {value}",
            )


def _sampling(spec: RunSections) -> Iterator[KeyProblemView]:
    sampling, context = spec.sampling, spec.model.max_context
    yield from truncated_sampling(sampling)
    for key, tokens in (
        ("sampling", sampling.max_new_tokens),
        ("evaluation", spec.evaluation.max_new_tokens),
    ):
        if context is not None and tokens is not None and tokens >= context:
            yield problem(
                f"{key}.max_new_tokens",
                f"{tokens} new tokens leave no room for a prompt within model.max_context: {context}",
                f"use less than {context}",
            )
    if any(not text for text in sampling.stop):
        yield problem("sampling.stop", "an empty text ends every answer at once", "remove it")


def _evaluation(spec: RunSections) -> Iterator[KeyProblemView]:
    evaluation = spec.evaluation
    wants = (
        "every" if evaluation.every else "baseline_prefill" if evaluation.baseline_prefill is not None else ""
    )
    other = ", give evaluation.data" if wants == "every" else ""
    if wants and not spec.data.heldout and not (wants == "every" and evaluation.data):
        yield problem(
            f"evaluation.{wants}",
            "there are no held-out items to evaluate",
            f"set data.heldout above 0{other}, or evaluation.{wants} to {'0' if wants == 'every' else 'null'}",
        )
    for name in sorted(evaluation.data.keys() & {"heldout", "baseline_prefill"}):
        yield problem(
            f"evaluation.data.{name}", "is the name of another kind of evaluation", "use another name"
        )
    if evaluation.greedy and evaluation.samples > 1:
        yield problem(
            "evaluation.samples",
            "greedy decoding gives the same answer every time",
            "set evaluation.samples: 1, or evaluation.greedy: false",
        )


def _reward(spec: RunSections) -> Iterator[KeyProblemView]:
    for part, scorers in spec.reward.sets().items():
        if all(scorer.weight == 0 for scorer in scorers):
            yield problem(
                f"reward.{part}", "every weight is 0, so every answer is worth the same", "weigh one scorer"
            )
        for index, scorer in enumerate(scorers):
            if scorer.name.endswith((".py", ".py:")):
                yield problem(
                    f"reward.{part}[{index}].name",
                    f"{scorer.name} names a file but no function in it",
                    f"write {scorer.name.rstrip(':')}:function",
                )


RULES: tuple[Callable[[RunSections], Iterator[KeyProblemView]], ...] = (
    _size,
    learning.batch,
    learning.changing_ranks,
    learning.passes,
    learning.reference,
    _prompt,
    _sampling,
    placing.placement,
    placing.engine_over_hosts,
    placing.share,
    placing.trainer_helpers,
    placing.rollout_helpers,
    staleness,
    _evaluation,
    _reward,
    simulator_problems,
    scorer_problems,
    workflow_problems,
    embodied_problems,
    agentic_problems,
    learning.lora,
    learning.divided_rows,
    learning.megatron,
)
"""In the order in which a user reads the problems."""
