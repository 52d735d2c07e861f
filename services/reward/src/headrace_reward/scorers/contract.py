"""What every packaged scorer must hold, as a check that its author runs in a test of the own package."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Mapping
from typing import Any

from headrace_servicekit.contract import check_plugin, require

from headrace_reward.judge import TURNS
from headrace_reward.scorers import SCORERS
from headrace_reward.scorers.base import Answer, Scorer


def check_scorer(name: str, options: Mapping[str, Any], right: Answer) -> Scorer:
    """The scorer, built with these options. Raises AssertionError saying what does not hold.

    `right` is an answer that it can judge. It must judge it to finite numbers, twice alike.
    """
    scorer = check_plugin(SCORERS, name, options).build()
    first, second = asyncio.run(_both(scorer, right))
    numbers = [first]
    if isinstance(first, Mapping):
        numbers = [each for key, each in first.items() if key != TURNS] + list(first.get(TURNS, ()))
    require(all(math.isfinite(float(number)) for number in numbers), f"a score is not finite: {first}")
    require(first == second, f"the same answer gets two scores: {first} and {second}")
    return scorer


async def _both(scorer: Scorer, right: Answer) -> list[Any]:
    """Two scores of one answer, which may be coroutines."""
    said: list[Any] = [scorer.score(right), scorer.score(right)]
    return [await each if inspect.isawaitable(each) else each for each in said]
