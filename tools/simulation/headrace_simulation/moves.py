"""How devices move inside the steps of a world: as the real policy says, or as soon and as often as they can."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from contextlib import contextmanager

from headrace_coordinator.run.step.loans import Helping, Loan
from headrace_coordinator.run.step.tail import Tail
from headrace_planner.elastic.policy import ElasticState, Move, Role


def move_eagerly(state: ElasticState, now: float) -> tuple[Move, ...]:
    """All rollouts but one give their devices back, and that one once it decodes no more, whatever that gains.

    The trainer group's devices decode at once, and go back as soon as they may.
    """
    held_s = now - state.moved_at
    if state.idle_owners:
        return tuple(Move(rollout.name, Role.DECODE) for rollout in state.idle_owners)
    if borrowed := [rollout for rollout in state.rollouts if rollout.owner]:
        back = borrowed if held_s >= state.terms.costs.min_hold_s else ()
        return tuple(Move(rollout.name, Role.OWN) for rollout in back)
    if not any(rollout.unfinished for rollout in state.rollouts):
        return tuple(Move(rollout.name, Role.HELP) for rollout in state.rollouts if state.owners_learn)
    leaving = state.rollouts[1:] if held_s >= state.terms.costs.min_hold_s else ()
    return tuple(Move(rollout.name, Role.HELP) for rollout in leaving)


def help_always(state: ElasticState) -> float:
    """Lets a helper take any group, even one that it finishes too late."""
    return math.inf


@contextmanager
def moving(seed: int) -> Iterator[None]:
    """Within the context three of four seeds move eagerly: simulated answers leave the real policy little to gain."""
    policy, until, steps = Loan.policy, Helping.until, Tail.fewest_steps
    if random.Random(f"{seed}/moves").random() < 0.75:
        Loan.policy, Helping.until = staticmethod(move_eagerly), staticmethod(help_always)
        Tail.fewest_steps = 1  # Simulated runs are short, and start again often.
    try:
        yield
    finally:
        Loan.policy, Helping.until = staticmethod(policy), staticmethod(until)
        Tail.fewest_steps = steps
