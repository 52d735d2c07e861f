"""What an algorithm that learns off policy is to the trainer: it keeps no ratio, and its steps come from the store.

Knows no model; what a step computes is `updates`'.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace_trainer.algorithms._base import Barrier, CriticPlan, Passes, Refill

from headrace_robots.trainer.off_policy.plugins import ReplayOptions

ACTIONS, UPDATES = "replay_actions", "replay_updates"
"""Of `state`: chunks of actions that were added to the store, and optimizer steps that were made."""


class OffPolicyAlgorithm:
    """How many updates are due, beside what `Algorithm` asks for."""

    name = ""
    columns: tuple[str, ...] = ()
    critic: CriticPlan | None = None
    level = "chunk"
    barrier = Barrier.BATCH
    least_group = 1
    greedy_first = every_token = needs_teacher = False
    refill = Refill()

    def __init__(self, options: Any) -> None:
        self.options: ReplayOptions = options
        self._actions = self._updates = 0

    @property
    def passes(self) -> Passes:
        """Several optimizer steps: what they change is held until all are made."""
        return Passes(minibatch_size=self.options.batch_size)

    def due(self, actions: int) -> range:
        """Numbers of the updates that follow when so many chunks are added: the ratio holds over the whole run."""
        behind = max(0, self._actions + actions - self.options.learning_starts)
        return range(self._updates, max(self._updates, int(behind * self.options.updates_per_action)))

    def learned(self, actions: int, updates: int) -> None:
        """A step was committed."""
        self._actions += actions
        self._updates += updates

    def state(self) -> dict[str, float]:
        """Both counts."""
        return {ACTIONS: float(self._actions), UPDATES: float(self._updates)}

    def load_state(self, state: Mapping[str, float]) -> None:
        """Goes on from a `state`."""
        self._actions, self._updates = int(state.get(ACTIONS, 0)), int(state.get(UPDATES, 0))

    def observe(self, figures: Mapping[str, float], sequences: int) -> None:
        """Nothing is changed by figures."""

    def batch_figures(self) -> dict[str, float]:
        """What the ratio has come to so far, over the chunks behind `learning_starts`."""
        behind = self._actions - self.options.learning_starts
        ratio = {"updates_per_action": self._updates / behind} if behind > 0 else {}
        return {**self.state(), **ratio}

    def token_weight(self, tokens: int) -> float:
        """1."""
        return 1.0

    def denominator(self, tokens: float, sequences: float) -> float:
        """The updates that a sum of losses is over."""
        return tokens or 1.0

    def advantages(self, outcomes: Any) -> Any:
        """Not asked for: nothing is compared."""
        raise NotImplementedError

    def credit(self, outcomes: Any) -> Any:
        """Not asked for: critics say what a chunk is worth."""
        raise NotImplementedError

    def loss(self, batch: Any) -> Any:
        """Not asked for: losses are of drawn transitions."""
        raise NotImplementedError


class Sac(OffPolicyAlgorithm):
    """Soft actor-critic (arXiv 1801.01290, 1812.05905)."""

    name = "sac"


class Rlpd(Sac):
    """Reinforcement learning with prior data (arXiv 2302.02948)."""

    name = "rlpd"


class CrossQ(Sac):
    """CrossQ (arXiv 1902.05605)."""

    name = "crossq"


class Td3Bc(OffPolicyAlgorithm):
    """TD3+BC (arXiv 2106.06860), and TD3 (1802.09477) without imitation."""

    name = "td3_bc"


class Iql(OffPolicyAlgorithm):
    """Implicit Q-learning (arXiv 2110.06169)."""

    name = "iql"


class Dagger(OffPolicyAlgorithm):
    """DAgger (arXiv 1011.0686) with the learner's own episodes alone."""

    name = "dagger"


class SuccessCloning(OffPolicyAlgorithm):
    """Filtered, or return-weighted, behaviour cloning of the run's own episodes."""

    name = "success_cloning"


class Recap(OffPolicyAlgorithm):
    """RECAP (arXiv 2511.14759): RL with experience and corrections via advantage-conditioned policies."""

    name = "recap"
