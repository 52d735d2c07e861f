"""What every packaged scorer must hold, as a check that its author runs in a test of the own package."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from headrace_servicekit.contract import check_plugin, require

from headrace_reward.scorers import SCORERS
from headrace_reward.scorers.base import Answer, Scorer


def check_scorer(name: str, options: Mapping[str, Any], right: Answer) -> Scorer:
    """The scorer, built with these options. Raises AssertionError saying what does not hold.

    `right` is an answer that it can judge. It must judge it to finite numbers, twice alike.
    """
    scorer = check_plugin(SCORERS, name, options).build()
    first, second = scorer.score(right), scorer.score(right)
    numbers = list(first.values()) if isinstance(first, Mapping) else [first]
    require(all(math.isfinite(float(number)) for number in numbers), f"a score is not finite: {first}")
    require(first == second, f"the same answer gets two scores: {first} and {second}")
    return scorer
