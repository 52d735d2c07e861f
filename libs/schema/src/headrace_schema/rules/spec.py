"""Combinations of a run spec that cannot work, found without a fleet. Each rule yields problems with their fixes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from headrace_schema.problems import problem
from headrace_schema.resources.views import KeyProblemView
from headrace_schema.rules.embodied import embodied_problems
from headrace_schema.rules.lora import doubtful_rates, lora_problems
from headrace_schema.rules.megatron import megatron_problems, model_ranks
from headrace_schema.rules.repliers import replier_problems
from headrace_schema.rules.simulators import simulator_problems
from headrace_schema.rules.workflow import workflow_problems
from headrace_schema.sections.running import APART, EVERY, SIDES

if TYPE_CHECKING:
    from headrace_schema.sections.generating import SamplingSection
    from headrace_schema.spec import RunSpec

MAX_SLOTS_PER_STEP = 2**20
MANY_SLOTS = 65_536
MANY_TOKENS = 131_072
HIGH_RATE = 0.01


GROUP_RELATIVE = frozenset(
    {
        *("cispo", "clip_cov", "dapo", "dr_grpo", "gmpo", "gpg", "grpo", "gspo", "kl_cov", "opo"),
        *("passk_grpo", "reinforce_pp_baseline", "remax", "rloo", "sapo"),
    }
)
"""Built-in algorithms for which a group of one has nothing to compare; a trainer checks the others as a run opens."""


KL_OPTIONS = ("kl_loss_coef", "kl_reward_coef")
"""Options of built-in algorithms that need a reference model."""


OTHERS = frozenset({"distill", "ppo", "reinforce", "reinforce_pp"})
"""Built-in algorithms that take a group of one."""
RATIO_OPTIONS = (
    "clip_low",
    "clip_high",
    "dual_clip",
    "value_clip",
    "tau_positive",
    "tau_negative",
    "cov_coef",
)
"""Options of built-in algorithms that act on the ratio of new to old policy alone."""


def impossible_combinations(spec: RunSpec) -> Iterator[KeyProblemView]:
    """Every problem of a spec whose single values are valid."""
    rules = (
        _size,
        _batch,
        _ranks,
        _passes,
        _reference,
        _prompt,
        _sampling,
        _placement,
        _share,
        _helpers,
        _decoders,
        _evaluation,
        _reward,
    )
    of_parts = (
        simulator_problems,
        replier_problems,
        workflow_problems,
        embodied_problems,
        lora_problems,
        megatron_problems,
    )
    for rule in (*rules, *of_parts):
        yield from rule(spec)


def _size(spec: RunSpec) -> Iterator[KeyProblemView]:
    group, prompts = spec.algorithm.group_size, spec.algorithm.prompts_per_step
    if spec.slots_per_step > MAX_SLOTS_PER_STEP:
        key, other = ("group_size", prompts) if group >= prompts else ("prompts_per_step", group)
        yield problem(
            f"algorithm.{key}",
            f"{group:,} samples of {prompts:,} prompts are more than the {MAX_SLOTS_PER_STEP:,} answers of one step",
            f"use at most {max(1, MAX_SLOTS_PER_STEP // other)}",
        )


def doubtful_values(spec: RunSpec) -> Iterator[KeyProblemView]:
    """What is valid and rarely meant, as warnings."""
    for key, rate in (("optimizer.lr", spec.optimizer.lr), ("trainer.warmup.lr", spec.trainer.warmup.lr)):
        if rate > HIGH_RATE:
            yield problem(
                key, f"{rate:g} is a hundred times a usual learning rate or more", "try 1e-6 to 1e-3"
            )
    yield from doubtful_rates(spec)
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


def _batch(spec: RunSpec) -> Iterator[KeyProblemView]:
    algorithm, ranks = spec.algorithm, spec.trainer.ranks
    shares = max(1, ranks // model_ranks(spec.trainer))
    if algorithm.name in GROUP_RELATIVE and algorithm.group_size < 2:
        reason = f"{algorithm.name} compares the samples of a group"
        yield problem("algorithm.group_size", reason, "use at least 2")
    if algorithm.prompts_per_step % shares:
        replicas = "" if shares == ranks else f", which are {shares} replicas of the model"
        yield problem(
            "algorithm.prompts_per_step",
            f"{algorithm.prompts_per_step} groups cannot be shared evenly by trainer.ranks: {ranks}{replicas}",
            f"the nearest valid value is {max(1, round(algorithm.prompts_per_step / shares)) * shares}",
        )
    schedule = spec.optimizer.schedule
    total = schedule.total_steps or spec.steps
    if schedule.warmup_steps > total:
        yield problem(
            "optimizer.schedule.warmup_steps",
            f"the warm-up of {schedule.warmup_steps} steps does not end within the schedule's {total}",
            f"the nearest valid value is {total}",
        )


def _ranks(spec: RunSpec) -> Iterator[KeyProblemView]:
    """Of a trainer group that grows and shrinks by itself."""
    trainer = spec.trainer
    least, most = trainer.min_ranks or trainer.ranks, trainer.max_ranks or trainer.ranks
    if least > trainer.ranks:
        yield problem("trainer.min_ranks", f"{least} is above trainer.ranks", f"use at most {trainer.ranks}")
    if most < trainer.ranks:
        yield problem("trainer.max_ranks", f"{most} is below trainer.ranks", f"use at least {trainer.ranks}")
    if least == most:
        return
    key = "trainer.max_ranks" if most > trainer.ranks else "trainer.min_ranks"
    if spec.deterministic:
        yield problem(
            key, "a deterministic run keeps its ranks", f"remove {key}, or set deterministic: false"
        )
    if spec.placement.mode == "hybrid" and most > 1:
        reason = "hybrid placement gives the rollouts' devices to one rank within a step"
        yield problem(key, reason, f"remove {key}, or set another placement.mode")


def _passes(spec: RunSpec) -> Iterator[KeyProblemView]:
    """Of built-in algorithms; a trainer checks the others as a run opens."""
    algorithm = spec.algorithm
    if algorithm.name not in GROUP_RELATIVE | OTHERS or spec.workflow == "embodied":
        return  # Of episodes, minibatches are counted in chunks.
    options, prompts = algorithm.options, algorithm.prompts_per_step
    epochs, minibatches = options.get("epochs", 1), options.get("minibatches", 1)
    if isinstance(minibatches, int) and minibatches > prompts:
        reason = f"{minibatches} minibatches of whole groups cannot be made of {prompts} prompts a step"
        yield problem("algorithm.options.minibatches", reason, f"the nearest valid value is {prompts}")
    if epochs == minibatches == 1:
        for key in RATIO_OPTIONS:
            if key in options:
                reason = (
                    "with one optimizer step a commit the ratio to the old policy is 1, and it has no effect"
                )
                fix = "remove it, or set algorithm.options.epochs or minibatches to 2 or more"
                yield problem(f"algorithm.options.{key}", reason, fix)
    if options.get("critic", "head") == "head" and options.get("critic_path") is not None:
        reason = "a value head reads the policy's own hidden states"
        yield problem(
            "algorithm.options.critic_path", reason, "remove it, or set algorithm.options.critic: model"
        )


def _reference(spec: RunSpec) -> Iterator[KeyProblemView]:
    """Of built-in algorithms; a trainer checks the others as a run opens."""
    algorithm, given = spec.algorithm, spec.trainer.reference is not None
    if algorithm.name == "distill" and not given:
        yield problem("trainer.reference", "distill learns from a teacher", "give the teacher's path")
    if algorithm.name in GROUP_RELATIVE and given and not any(map(algorithm.options.get, KL_OPTIONS)):
        reason = f"no option of {algorithm.name} uses it"
        yield problem("trainer.reference", reason, "set algorithm.options.kl_loss_coef above 0, or remove it")


def _prompt(spec: RunSpec) -> Iterator[KeyProblemView]:
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


def _sampling(spec: RunSpec) -> Iterator[KeyProblemView]:
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


def _placement(spec: RunSpec) -> Iterator[KeyProblemView]:
    placement = spec.placement
    named = next((key for key in SIDES if getattr(placement, key)), None)
    if placement.mode == "auto" and named:
        yield problem(
            f"placement.{named}",
            "with placement.mode: auto the run chooses its devices",
            f"remove placement.{named}, or set placement.mode: collocated, disaggregated or hybrid",
        )
    shared = sorted(set(placement.rollout) & set(placement.trainer))
    uneven = sorted(placement.rollout) != sorted(placement.trainer)
    if placement.mode == "collocated" and uneven and not (placement.simulator or placement.reply):
        yield problem(
            "placement.trainer",
            "collocated placement takes turns on the same devices",
            "make placement.rollout and placement.trainer equal, or set placement.mode: disaggregated",
        )
    if placement.mode in APART and shared:
        yield problem(
            "placement.trainer",
            f"{', '.join(shared)} generates too; {placement.mode} placement needs disjoint devices",
            "name other devices, or set placement.mode: collocated",
        )
    if placement.mode == "hybrid":
        yield from _hybrid(spec)
    if placement.mode == "disaggregated" and placement.memory == "offloaded":
        yield problem(
            "placement.memory",
            "in disaggregated placement both sides have their devices all the time, and stay loaded",
            "remove placement.memory, or set placement.mode: collocated or hybrid",
        )
    most = spec.trainer.max_ranks or spec.trainer.ranks
    for key, users in (("rollout", spec.rollout.instances), ("trainer", max(most, spec.trainer.ranks))):
        devices: list[str] = getattr(placement, key)
        if len(set(devices)) < len(devices):
            yield problem(f"placement.{key}", "a device is named twice", "name each device once")
        elif devices and len(devices) < users and not any(_is_every(name) for name in devices):
            own = "trainer.max_ranks" if most > spec.trainer.ranks else "trainer.ranks"
            what = "rollout.instances" if key == "rollout" else own
            yield problem(
                f"placement.{key}",
                f"{len(devices)} devices are too few for {what}: {users}",
                f"name at least {users} devices, or set {what}: {len(devices)}",
            )


def _is_every(name: str) -> bool:
    return name.rpartition("/")[2] == EVERY


def _hybrid(spec: RunSpec) -> Iterator[KeyProblemView]:
    if spec.trainer.ranks > 1:
        reason = "hybrid placement gives the rollouts' devices to one rank within a step"
        yield problem(
            "trainer.ranks", reason, "set trainer.ranks: 1, or placement.mode: disaggregated or collocated"
        )


def _share(spec: RunSpec) -> Iterator[KeyProblemView]:
    placement = spec.placement
    if not placement.share:
        return
    fix = ", or set placement.share: false"
    if placement.mode == "hybrid":
        reason = "a run that shares holds the devices of one side at a time, and hybrid holds both"
        yield problem("placement.share", reason, f"set placement.mode: collocated or disaggregated{fix}")
    if placement.mode == "auto":
        reason = "a run that measures placements needs its devices to itself"
        yield problem("placement.share", reason, f"set placement.mode: collocated or disaggregated{fix}")
    if placement.memory == "resident":
        reason = "what other runs wait for is the devices and their memory"
        yield problem("placement.memory", reason, f"set placement.memory: offloaded{fix}")
    if placement.mode == "disaggregated" and placement.pipelined:
        reason = (
            "a run that shares holds the devices of one side at a time, so nothing can stream to the other"
        )
        yield problem("placement.flow", reason, f"set placement.flow: sequential{fix}")
    if spec.trainer.helpers:
        reason = "a helper's devices are the run's own until the step ends"
        yield problem("trainer.helpers", reason, f"set trainer.helpers: 0{fix}")


def _helpers(spec: RunSpec) -> Iterator[KeyProblemView]:
    """Which algorithms take help, a trainer checks as a run opens."""
    if not spec.trainer.helpers:
        return
    fix = ", or set trainer.helpers: 0"
    if spec.deterministic:
        reason = "devices that move when the tail decodes make no two runs alike"
        yield problem("trainer.helpers", reason, f"set deterministic: false{fix}")
    placement = spec.placement
    if placement.mode == "hybrid":
        reason = "the trainer group takes the rollouts' devices itself when the tail ends"
        yield problem("trainer.helpers", reason, f"set placement.mode: disaggregated or collocated{fix}")
    if placement.mode == "auto" and placement.measure_steps:
        reason = "steps in which devices move say nothing of another placement"
        yield problem("trainer.helpers", reason, f"set placement.mode: disaggregated or collocated{fix}")
    # Beside owners that learn meanwhile, a rollout that decodes no more helps too: then all of them may.
    beside = placement.mode == "disaggregated" and placement.pipelined and not placement.share
    wanted = spec.trainer.helpers + (not beside)
    if spec.rollout.instances < wanted:
        reason = "a helper takes the devices of one rollout"
        if not beside:
            reason += " while another one decodes what is left"
        yield problem("trainer.helpers", reason, f"set rollout.instances: {wanted}{fix}")


def _decoders(spec: RunSpec) -> Iterator[KeyProblemView]:
    """Rollouts that decode on the trainer's devices at a step's begin."""
    if not spec.rollout.helpers:
        return
    fix = ", or set rollout.helpers: 0"
    if spec.deterministic:
        reason = "devices that move while answers are made make no two runs alike"
        yield problem("rollout.helpers", reason, f"set deterministic: false{fix}")
    if spec.placement.mode != "disaggregated" or spec.placement.share:
        reason = "they decode on devices that the trainer has for itself, which only disaggregated placement gives it"
        yield problem(
            "rollout.helpers",
            reason,
            f"set placement.mode: disaggregated and placement.share: false{fix}",
        )
    if spec.rollout.helpers > spec.trainer.ranks:
        reason = "each decodes on the devices of one rank"
        yield problem("rollout.helpers", reason, f"use at most trainer.ranks: {spec.trainer.ranks}{fix}")


def _evaluation(spec: RunSpec) -> Iterator[KeyProblemView]:
    evaluation = spec.evaluation
    wants = (
        "every" if evaluation.every else "baseline_prefill" if evaluation.baseline_prefill is not None else ""
    )
    if wants and not spec.data.heldout:
        yield problem(
            f"evaluation.{wants}",
            "there are no held-out items to evaluate",
            f"set data.heldout above 0, or evaluation.{wants} to {'0' if wants == 'every' else 'null'}",
        )
    if evaluation.greedy and evaluation.samples > 1:
        yield problem(
            "evaluation.samples",
            "greedy decoding gives the same answer every time",
            "set evaluation.samples: 1, or evaluation.greedy: false",
        )


def _reward(spec: RunSpec) -> Iterator[KeyProblemView]:
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
