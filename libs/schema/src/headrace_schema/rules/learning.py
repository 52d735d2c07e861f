"""What cannot work of a trainer, its algorithm, its backend and its batch. Each rule yields problems with their fixes.

A trainer checks the rest as a run opens: algorithms and options that are not built in, and what depends on the model.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from headrace_schema.problems import problem
from headrace_schema.resources.views import KeyProblemView
from headrace_schema.sections.learning import AlgorithmSection, TrainerSection
from headrace_schema.sections.policies import adapters_of
from headrace_schema.sections.run import RunSections

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
FSDP = LORA_BACKEND = "fsdp"
LOW_RATE = 1e-5
MEGATRON = "megatron"
SIZES = ("tensor_parallel", "pipeline_parallel", "context_parallel")
"""Options of megatron by which several ranks hold one model."""
CONTEXT = "context_parallel"
"""Option of fsdp, and of megatron, by which several ranks divide the rows of one replica."""
CRITICS = ("ppo",)
"""Built-in algorithms with a critic."""
ELSE = ", or set trainer.backend: fsdp"


def batch(spec: RunSections) -> Iterator[KeyProblemView]:
    """Problems of the numbers that make a step's batch, and of the schedule."""
    algorithm, ranks = spec.algorithm, spec.trainer.ranks
    shares = max(1, ranks // model_ranks(spec.trainer))
    comparing = [each.name for each in spec.algorithms.values() if each.name in GROUP_RELATIVE]
    if comparing and algorithm.group_size < 2:
        reason = f"{comparing[0]} compares the samples of a group"
        fix = "use at least 2"
        if spec.agent is not None and spec.agent.online is not None:
            fix += ", with a group named for each session (X-Headrace-Group), or set algorithm.name: reinforce_pp"
        yield problem("algorithm.group_size", reason, fix)
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


def changing_ranks(spec: RunSections) -> Iterator[KeyProblemView]:
    """Problems of a trainer group that grows and shrinks by itself."""
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


def passes(spec: RunSections) -> Iterator[KeyProblemView]:
    """Problems of epochs and minibatches of built-in algorithms."""
    if spec.workflow != "embodied":  # Of episodes, minibatches are counted in chunks.
        for key, algorithm in spec.algorithms.items():
            yield from _passes(f"{key}.options", algorithm)


def _passes(where: str, algorithm: AlgorithmSection) -> Iterator[KeyProblemView]:
    if algorithm.name not in GROUP_RELATIVE | OTHERS:
        return
    options, prompts = algorithm.options, algorithm.prompts_per_step
    epochs, minibatches = options.get("epochs", 1), options.get("minibatches", 1)
    if isinstance(minibatches, int) and minibatches > prompts:
        reason = f"{minibatches} minibatches of whole groups cannot be made of {prompts} prompts a step"
        yield problem(f"{where}.minibatches", reason, f"the nearest valid value is {prompts}")
    if epochs == minibatches == 1 and not algorithm.max_staleness:
        for key in RATIO_OPTIONS:
            if key in options:
                reason = (
                    "with one optimizer step a commit the ratio to the old policy is 1, and it has no effect"
                )
                fix = f"remove it, or set {where}.epochs or minibatches to 2 or more"
                yield problem(f"{where}.{key}", reason, fix)
    if options.get("critic", "head") == "head" and options.get("critic_path") is not None:
        reason = "a value head reads the policy's own hidden states"
        yield problem(f"{where}.critic_path", reason, f"remove it, or set {where}.critic: model")


def reference(spec: RunSections) -> Iterator[KeyProblemView]:
    """Problems of the reference model of built-in algorithms."""
    algorithm, given = spec.algorithm, spec.trainer.reference is not None
    if algorithm.name == "distill" and not given:
        yield problem("trainer.reference", "distill learns from a teacher", "give the teacher's path")
    if algorithm.name in GROUP_RELATIVE and given and not any(map(algorithm.options.get, KL_OPTIONS)):
        reason = f"no option of {algorithm.name} uses it"
        yield problem("trainer.reference", reason, "set algorithm.options.kl_loss_coef above 0, or remove it")


def lora(spec: RunSections) -> Iterator[KeyProblemView]:
    """Problems of training adapters alone."""
    trainer, algorithm = spec.trainer, spec.algorithm
    if spec.weights.lora == "adapter" and (reason := _published_whole(spec)):
        yield problem("weights.lora", reason, "set weights.lora: auto")
    if spec.rollout.enable_lora:
        yield from _beside(spec)
    if spec.weights.publish == "ranks" and not _published_whole(spec) and spec.weights.lora != "merged":
        reason = "adapters alone are a version of one rank"
        yield problem("weights.publish", reason, "set weights.publish: leader, or weights.lora: merged")
    if trainer.lora is None or spec.workflow == "embodied":
        return
    fix = ", or remove trainer.lora"
    if trainer.backend != LORA_BACKEND:
        reason = f"{trainer.backend} has no adapters"
        yield problem("trainer.lora", reason, f"set trainer.backend: {LORA_BACKEND}{fix}")
    if trainer.helpers:
        reason = "a helper holds the published weights, in which adapters are merged and get no gradient of their own"
        yield problem("trainer.helpers", reason, f"set trainer.helpers: 0{fix}")
    if algorithm.name == "ppo" and algorithm.options.get("critic") == "model":
        reason = "a critic with a model of its own has no adapters, and all its weights would be trained"
        yield problem("algorithm.options.critic", reason, f"set algorithm.options.critic: head{fix}")


def _published_whole(spec: RunSections) -> str:
    """Why a run cannot publish adapters alone; empty: it may."""
    if spec.trainer.lora is None:
        return "the run trains no adapters: trainer.lora is not given"
    if spec.workflow == "embodied":
        return "a robot policy is published whole: its heads and normalisers change, too"
    if not adapters_of(spec.model, spec.trainer, spec.policies):
        return "policies with another model, or without trainer.lora, are published whole"
    return ""


def _beside(spec: RunSections) -> Iterator[KeyProblemView]:
    """Problems of engines that compute with adapters beside their base."""
    key, fix = "rollout.enable_lora", "leave it out: adapters are merged then"
    if reason := _published_whole(spec):
        yield problem(key, reason, f"{fix}, or give all policies one model and trainer.lora")
    if spec.weights.lora == "merged":
        yield problem(
            "weights.lora", "whole weights have no adapters to compute with", "set weights.lora: auto"
        )
    if spec.deterministic:
        reason = "log-probs with adapters beside their base are not the trainer's to the bit, as those of merged ones"
        yield problem(key, reason, f"{fix}, or set deterministic: false")
    for name, policy in spec.policies.items():
        if policy.own_devices:
            reason = "rollout.enable_lora has one engine for all policies"
            yield problem(f"policies.{name}.own_devices", reason, f"remove it, or {key}")


def doubtful_adapter_rate(spec: RunSections) -> Iterator[KeyProblemView]:
    """Yields a warning where adapters have a learning rate that suits whole weights."""
    if spec.trainer.lora is not None and spec.optimizer.lr < LOW_RATE:
        reason = f"adapters hardly move at {spec.optimizer.lr:g}: they need about ten times the rate of whole weights"
        yield problem("optimizer.lr", reason, "try 1e-5 to 1e-3")


def model_ranks(trainer: TrainerSection) -> int:
    """How many ranks compute one model between them, and therefore learn from the same rows."""
    names = {MEGATRON: SIZES, FSDP: (CONTEXT,)}.get(trainer.backend, ())
    sizes = (trainer.backend_options.get(name, 1) for name in names)
    # What is no count is a problem of the options, which their own model finds.
    return math.prod(size for size in sizes if isinstance(size, int) and size > 0)


def divided_rows(spec: RunSections) -> Iterator[KeyProblemView]:
    """Problems of a run whose fsdp ranks divide rows."""
    trainer, size = spec.trainer, model_ranks(spec.trainer)
    if trainer.backend != FSDP or size == 1:
        return
    key, without = f"trainer.backend_options.{CONTEXT}", f", or remove trainer.backend_options.{CONTEXT}"
    if spec.workflow == "embodied":
        yield problem(
            key, "a robot policy has a backend of its own, whose ranks have whole episodes", "remove it"
        )
    if trainer.ranks % size:
        reason = f"{trainer.ranks} ranks are no multiple of the {size} that divide a row"
        fix = f"the nearest valid value is {max(1, round(trainer.ranks / size)) * size}{without}"
        yield problem("trainer.ranks", reason, fix)
    for name, ranks in (("min_ranks", trainer.min_ranks), ("max_ranks", trainer.max_ranks)):
        if ranks not in (None, trainer.ranks):
            reason = (
                f"a group that changes by itself takes any number of ranks, and rows are divided over {size}"
            )
            yield problem(f"trainer.{name}", reason, f"remove it{without}")
    if trainer.helpers:
        reason = "a helper has no other ranks to divide rows with"
        yield problem("trainer.helpers", reason, f"set trainer.helpers: 0{without}")


def megatron(spec: RunSections) -> Iterator[KeyProblemView]:
    """Problems of a run whose backend is megatron."""
    trainer = spec.trainer
    if trainer.backend != MEGATRON:
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
    yield from _lacking_in_megatron(spec)


def _lacking_in_megatron(spec: RunSections) -> Iterator[KeyProblemView]:
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
