"""What an episode of a robot, or a conversation with an environment, is worth, from what its rollout says of it."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from typing import Any, Literal

from headrace_servicekit.registry import Options, plugin
from pydantic import Field

from headrace_reward.scorers.base import Answer, Score


class EpisodeOptions(Options):
    """Options of `episode`."""

    of: Literal["return", "success", "success_at_end", "outcome", "steps"] = Field(
        "return",
        description="the sum of rewards; 1 for success at any action, or at the last one; outcome: success where the "
        "environment says it, and the return where it never does; or the number of actions or turns",
    )
    scale: float = Field(1.0, description="factor of the figure")


@plugin(EpisodeOptions)
class Episode:
    """A figure of an episode: its return, success or steps."""

    def __init__(self, options: EpisodeOptions) -> None:
        self._of, self._scale = options.of, options.scale

    def score(self, answer: Answer) -> Score:
        """The scaled figure, of a conversation's return by turn and by role too.

        A blank answer, which scorers are tried with, is worth 0; ValueError for other text.
        """
        if answer.episode is None and not answer.completion.strip():
            return 0.0
        try:
            told = json.loads(answer.completion) if answer.episode is None else answer.episode
            of = self._of
            if of == "outcome":
                of = "return" if told["success"] is None else "success"
            # Of a success that ends its episode, it is the last action's too.
            found: Any = told["success"] if of == "success_at_end" and of not in told else told[of]
            value = math.nan if found is None else float(found) * self._scale
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(
                f"{answer.completion[:80]!r} does not tell the {self._of} of an episode"
            ) from error
        if found is None:
            raise ValueError(
                f"the environment never said its {self._of} (success: info['success']): report it, or score of: return"
            )
        if not math.isfinite(value):
            raise ValueError(f"the {self._of} of the episode is {found}")
        if self._of == "return" and answer.episode is not None:
            turns = [each * self._scale for each in answer.episode["rewards"]]
            by_role: dict[str, float] = defaultdict(float)
            for role, reward in zip(answer.episode.get("roles", ()), turns, strict=False):
                by_role[role] += reward
            return {**by_role, "score": value, "turns": turns}
        return value
