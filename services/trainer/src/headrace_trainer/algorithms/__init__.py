"""How rewards become a gradient: the registry of algorithms, and the functions that they are made of.

The functions (`gae_advantages`, `ppo_terms` and others, listed in docs/algorithms.md) are those of `functional`. They
load when one is first used: asking for the names of the algorithms must not import torch.
"""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar

from headrace_servicekit.registry import PluginError, Registry

from headrace_trainer.algorithms.options import PolicyOptions
from headrace_trainer.errors import Refusal, refused

if TYPE_CHECKING:
    from headrace_schema.sections.learning import AlgorithmSection

    from headrace_trainer.algorithms._base import Algorithm
    from headrace_trainer.algorithms.functional import *  # noqa: F403
else:

    def __getattr__(name: str) -> Any:
        if not name.startswith("_"):
            functional = import_module(f"{__name__}.functional")
            if name in functional.__all__:
                return getattr(functional, name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = ["ALGORITHMS", "build_algorithm", "built"]
Made = TypeVar("Made")
_BUILT_IN = (
    *("cispo", "clip_cov", "dapo", "distill", "gpg", "kl_cov", "reinforce", "remax"),
    *("dr_grpo", "gmpo", "grpo", "gspo", "opo"),
    *("passk_grpo", "ppo", "reinforce_pp", "reinforce_pp_baseline", "rloo", "sapo"),
)
_GIVEN = ("bradley_terry", "dpo", "ipo", "kto", "orpo", "prm", "session", "sft", "simpo")
"""Of answers that the data or a loop of the user's own gives."""

ALGORITHMS: Registry[Algorithm] = Registry(
    "headrace.algorithms",
    "algorithm",
    "algorithm.name",
    "algorithm.options",
    {name: f"headrace_trainer.algorithms.plugins:{name.upper()}" for name in _BUILT_IN}
    | {name: f"headrace_trainer.algorithms.given:{name.upper()}" for name in _GIVEN},
)


def build_algorithm(section: AlgorithmSection) -> Algorithm:
    """The algorithm that the section names, with its options. Raises Refusal INVALID, naming the key."""
    algorithm = built(ALGORITHMS, section)
    _check_batch(section, algorithm)
    by_turn = getattr(algorithm, "turn_credit", None) is not None
    if by_turn and (reason := getattr(algorithm, "whole_answers", "")):
        fix = "set credit: trajectory, or take grpo, rloo, reinforce_pp or ppo"
        raise _unfit("algorithm.options.credit", f"{section.name} cannot tell turns apart: {reason}; {fix}")
    return algorithm


def built(registry: Registry[Made], section: AlgorithmSection) -> Made:
    """What the section names, with the correction that its options take for the section's `max_staleness`.

    Raises Refusal INVALID, naming the key.
    """
    try:
        chosen = registry.choose(section.name, section.options)
        if isinstance(chosen.options, PolicyOptions):
            chosen = replace(chosen, options=chosen.options.for_staleness(section.max_staleness))
        return chosen.build()
    except PluginError as error:
        raise refused(error) from error


def _check_batch(section: AlgorithmSection, algorithm: Algorithm) -> None:
    minibatches = algorithm.passes.minibatches
    if section.group_size < algorithm.least_group:
        raise _unfit(
            "algorithm.group_size",
            f"{section.name} compares the samples of a group, and {section.group_size} is too few; use at least "
            f"{algorithm.least_group}",
        )
    if section.prompts_per_step < minibatches:
        raise _unfit(
            "algorithm.options.minibatches",
            f"{minibatches} minibatches of whole groups cannot be made of algorithm.prompts_per_step: "
            f"{section.prompts_per_step}; use at most {section.prompts_per_step}",
        )


def _unfit(key: str, problem: str) -> Refusal:
    return Refusal("INVALID", f"{key}: {problem}", "invalid", key=key)
