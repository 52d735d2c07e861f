"""Demonstrations as episodes of a replay store: with rewards, and actions as the policy draws them.

Knows no optimizer. Shapes: T steps, C actions of a chunk, A numbers of an action, S numbers of a state.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import torch
from headrace_schema.openings import TrainerConfig

from headrace_robots.policies.policy import RobotPolicy
from headrace_robots.trainer.backend.cloning import open_demonstrations, refused
from headrace_robots.trainer.replay.records import Stored

if TYPE_CHECKING:
    from headrace_robots.demonstrations import Demonstration


def demonstrated(
    config: TrainerConfig, policy: RobotPolicy, rank: int, ranks: int, *, rewarded: bool
) -> Iterator[Stored]:
    """Every `ranks`-th episode, from the `rank`-th on. Raises Refusal INVALID, also where rewards are `rewarded` and
    there are none.
    """
    from headrace_robots.demonstrations import DemonstrationsNotReadable

    data = open_demonstrations(config, policy.config)
    if rewarded and not data.rewarded:
        raise refused(
            "states no reward of each step (a feature next.reward), and the critics learn from them; collect it with "
            "headrace demonstrations collect --noise 0, or give a data set that has them"
        )
    count = min(len(data), config.trainer.warmup.episodes or len(data))
    try:
        for place in range(rank, count, ranks):
            yield from _stored(data[place], policy, place)
    except DemonstrationsNotReadable as error:
        raise refused(str(error)) from error


def _stored(shown: Demonstration, policy: RobotPolicy, place: int) -> Iterator[Stored]:
    """The episode: without its last chunk where that was cut, for nobody knows what it ended with."""
    if (moments := policy.config.moments) > 1:
        shown = shown.stacked(moments)
    length, steps = policy.chunk_length, len(shown.action_TA)
    starts = np.arange(0, steps, length)
    ended = shown.terminated
    chunks = len(starts) if ended else len(starts) - 1
    if not chunks:
        return
    actions_TCA = policy.head.drawn_of(shown.action_TA)[  # type: ignore[operator, union-attr]
        torch.from_numpy(np.minimum(starts[:, None] + np.arange(length), steps - 1))
    ]
    rewards_T = np.zeros(steps, np.float32) if shown.reward_T is None else shown.reward_T.numpy()
    state_TS = np.zeros((steps, 0), np.float32) if shown.state_TS is None else shown.state_TS.numpy()
    seen = [*starts[: chunks + 1], *([starts[-1]] if ended else [])]
    yield Stored(
        slot=(-1, place),
        version=0,
        states_TS=state_TS[seen],
        actions_TA=actions_TCA[:chunks].flatten(1).float().numpy(),
        rewards_T=np.add.reduceat(rewards_T, starts)[:chunks],
        terminated=ended,
        success=True,
        pictures={name: image.numpy()[seen] for name, image in shown.images.items()},
    )
