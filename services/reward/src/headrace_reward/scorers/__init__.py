"""Scorers by name. Loaded in child processes only, so that no third party's import can harm the service."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace_servicekit.registry import Chosen, PluginError, Registry

from headrace_reward.scorers.base import Scorer, ScorerError

_HERE = "headrace_reward.scorers"
SCORERS: Registry[Scorer] = Registry(
    "headrace.scorers",
    "scorer",
    "name",
    "options",
    {
        "capture": f"{_HERE}.text:Capture",
        "code": f"{_HERE}.coding:Code",
        "episode": f"{_HERE}.episodes:Episode",
        "exact": f"{_HERE}.text:Exact",
        "format": f"{_HERE}.text:Format",
        "judge": f"{_HERE}.judges.absolute:Judge",
        "judge_group": f"{_HERE}.judges.relative:JudgeGroup",
        "last_number": f"{_HERE}.text:LastNumber",
        "length": f"{_HERE}.text:Length",
        "math_verify": f"{_HERE}.mathematics:MathVerify",
        "reasoning_gym": f"{_HERE}.reasoning:ReasoningGym",
        "regex": f"{_HERE}.text:Regex",
        "reward_model": f"{_HERE}.judges.model:RewardModel",
    },
)


def choose(name: str, options: Mapping[str, Any]) -> Chosen[Scorer]:
    """A scorer with its options.

    Raises:
        ScorerError: the name is unknown, what it leads to is no plug-in, or an option is wrong.
    """
    try:
        return SCORERS.choose(name, options)
    except PluginError as error:
        raise _refusal(error) from error


def built(chosen: Chosen[Scorer]) -> Scorer:
    """A scorer of its options. Raises ScorerError for a secret that is not there."""
    try:
        return chosen.build()
    except PluginError as error:
        raise _refusal(error) from error


def _refusal(error: PluginError) -> ScorerError:
    first = error.problems[0]
    own = "; your own is written path/to/file.py:function" if first.key == "name" else ""
    message = f"{first.problem}; {first.fix}" if first.fix else first.problem
    return ScorerError(first.key, message + own)
