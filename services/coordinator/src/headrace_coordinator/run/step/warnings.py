"""What makes a run learn nothing, found in the figures of its last steps. Knows no events."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from statistics import fmean

from headrace_schema.resources.views import StepView
from headrace_schema.spec import RunSpec

from headrace_coordinator.domain.alerts import Alerts
from headrace_coordinator.domain.totals import ENGINE_ASLEEP, ENGINE_RESTARTS
from headrace_coordinator.projections.tensorboard import step_scalars

STEPS = 5
"""Consecutive steps before a warning; it ends with the first step of which it does not hold."""
CUT_SHARE = 0.97
"""Share of the longest answer: if answers are this long on average, nearly all of them are cut."""
COLLAPSED = 0.05
"""Share of the run's first entropy below which it counts as gone."""
FAR = 5.0
"""Nats a token from the reference: nothing of it is left."""
LEAP = 0.5
"""Nats a token between a step's samples and the weights that it leaves: it learns from answers of another policy."""
UNJUDGED = "answers_unjudged"
"""Figure: answers of a step that got reward.failed_reward, as their scorer failed at them; none: left out."""
MOST_RESTARTS = 2
"""Of engines in the last STEPS steps, before a warning."""
ROUNDING = 1e-9
"""A rate that moves nothing: fp32 weights of usual size (0.02) are 2e-9 apart."""


class Warnings:
    """The warnings of a run by what they are about; each says what holds, and what to look at."""

    def __init__(self, spec: RunSpec) -> None:
        self._spec = spec
        self._steps: deque[StepView] = deque(maxlen=STEPS)
        self._entropy: float | None = None
        self._reward: float | None = None
        """Reward of the first steps, to which later ones are compared."""
        self._alerts = Alerts(spec.tracking.alerts)

    def of(self, step: StepView) -> dict[str, str] | None:
        """All that hold after one more committed step; None where there are too few steps to say."""
        self._steps.append(step)
        steps = [*self._steps]
        early = _unjudged(step) | _restarted(steps) | self._alerts.of(step_scalars(step))
        if len(steps) < STEPS:
            told_before = any(map(_unjudged, steps)) or bool(self._spec.tracking.alerts)
            return early or ({} if told_before else None)
        if self._entropy is None and (entropies := _all(steps, "entropy")):
            self._entropy, self._reward = fmean(entropies), _reward(steps)
        found = {name: check(self, steps) for name, check in _CHECKS.items()}
        return early | {name: text for name, text in found.items() if text}

    def _equal_rewards(self, steps: Sequence[StepView]) -> str:
        size = self._spec.algorithm.group_size
        if size == 1:
            return _constant(steps)
        equal = _all(steps, "groups_all_equal")
        groups = [step.trained / size for step in steps]
        if not equal or any(not all_of or own < all_of for own, all_of in zip(equal, groups, strict=True)):
            return ""
        values = {step.reward_mean for step in steps if step.reward_mean is not None}
        what = (
            f"every reward is {values.pop():g}" if len(values) == 1 else "no group has two different rewards"
        )
        return (
            f"{what} in the last {STEPS} steps: nothing is learned by comparing answers of a group. "
            "Look at answers and parts (headrace run trajectories RUN), and try the scorer on them "
            "(headrace reward SPEC --on FILE)"
        )

    def _no_gradient(self, steps: Sequence[StepView]) -> str:
        norms = _all(steps, "grad_norm")
        if not norms or any(norms) or self._equal_rewards(steps):
            return ""
        return (
            f"the gradient is 0 in the last {STEPS} steps although rewards differ: no token carries loss. Look at "
            "algorithm.truncated, the algorithm's masks, and whether answers have tokens at all"
        )

    def _no_learning_rate(self, steps: Sequence[StepView]) -> str:
        rates = _all(steps, "learning_rate")
        if not rates or max(rates) > ROUNDING:
            return ""
        if max(rates) > 0:
            return (
                f"the learning rate is {max(rates):.1g} in the last {STEPS} steps: weights are rounded by more than a "
                "step moves them. Raise optimizer.lr"
            )
        return f"the learning rate is 0 in the last {STEPS} steps: optimizer.schedule has ended, or warms up for longer"

    def _all_cut(self, steps: Sequence[StepView]) -> str:
        longest, lengths = (
            self._spec.sampling.longest_at(steps[-1].step - 1),
            _all(steps, "answer_length_mean"),
        )
        # Answers of a few tokens may well be all of one length; no limit cuts the data's.
        short = longest < 16 or not self._spec.has_scorers
        if short or self._spec.environment is not None or not lengths or min(lengths) < CUT_SHARE * longest:
            return ""
        return (
            f"answers are {fmean(lengths):.0f} tokens long on average, of at most {longest}: nearly all are cut. Raise "
            "sampling.max_new_tokens, or look at whether the model ever ends one (headrace run trajectories RUN)"
        )

    def _entropy_gone(self, steps: Sequence[StepView]) -> str:
        entropies = _all(steps, "entropy")
        began = self._entropy or 0.0  # below 0: of continuous actions, whose entropy has no end to fall to
        if not self._spec.has_scorers:
            return ""  # It is to become sure of what the data says.
        if not entropies or began <= 0 or max(entropies) > COLLAPSED * began:
            return ""
        reward = _reward(steps)
        if reward is not None and self._reward is not None and reward > self._reward:
            return ""  # It is sure of itself because it is right.
        return (
            f"entropy has fallen from {began:.2g} to {fmean(entropies):.2g} nats and rewards did not rise: the "
            "policy hardly tries anything else. Lower optimizer.lr, or set algorithm.options.entropy_coef or clip_high"
        )

    def _far_from_reference(self, steps: Sequence[StepView]) -> str:
        distances = _all(steps, "reference_kl")
        if not distances or min(distances) < FAR:
            return ""
        return (
            f"the policy is {fmean(distances):.1f} nats a token away from its reference: it has forgotten it. Lower "
            "optimizer.lr, or raise algorithm.options.kl_loss_coef"
        )

    def _leaps(self, steps: Sequence[StepView]) -> str:
        moved = _all(steps, "approx_kl")
        if not moved or min(moved) < LEAP:
            return ""
        return (
            f"each of the last {STEPS} steps moved the policy by {fmean(moved):.1f} nats a token while it learned from "
            "the same answers: most of what they teach is clipped or of another policy. Lower optimizer.lr, "
            "algorithm.options.epochs or minibatches, or set algorithm.options.target_kl"
        )


_CHECKS: dict[str, Callable[[Warnings, Sequence[StepView]], str]] = {
    "rewards": Warnings._equal_rewards,
    "gradient": Warnings._no_gradient,
    "learning_rate": Warnings._no_learning_rate,
    "length": Warnings._all_cut,
    "entropy": Warnings._entropy_gone,
    "reference": Warnings._far_from_reference,
    "leaps": Warnings._leaps,
}


def _unjudged(step: StepView) -> dict[str, str]:
    """One step is enough: nobody measured what it learned from."""
    if not 0 < step.trained + step.filtered <= step.figures.get(UNJUDGED, 0.0):
        return {}
    return {
        "verdicts": "no answer of the last step has a verdict: its scorer failed at each, and each got "
        "reward.failed_reward. See what it said (headrace run trajectories RUN), and try it (headrace reward SPEC)"
    }


def _restarted(steps: Sequence[StepView]) -> dict[str, str]:
    """A few steps are enough: each start of an engine takes minutes."""
    count = sum(step.figures.get(ENGINE_RESTARTS, 0.0) for step in steps)
    if count < MOST_RESTARTS:
        return {}
    asleep = max(step.figures.get(ENGINE_ASLEEP, 0.0) for step in steps) / 2**30
    kept = f"; asleep they kept up to {asleep:.1f} GiB of the run's GPUs" if asleep else ""
    return {
        "engines": f"engines were started again {count:.0f} times in the last {len(steps)} steps, and each start takes "
        f"minutes{kept}. The log of the rollouts says why; where an engine keeps too much of its GPUs asleep, set a "
        "smaller rollout.engine_options.tensor_parallel_size, or placement.mode: disaggregated"
    }


def _constant(steps: Sequence[StepView]) -> str:
    """The warning for groups of one: every answer of all prompts has the same reward."""
    spreads, values = _all(steps, "reward_std"), {step.reward_mean for step in steps}
    value = values.pop()
    if not spreads or any(spreads) or values or value is None:
        return ""
    return (
        f"every reward is {value:g} in the last {STEPS} steps: no answer is better than another. Look at "
        "answers and parts (headrace run trajectories RUN), and try the scorer on them (headrace reward SPEC --on FILE)"
    )


def _reward(steps: Sequence[StepView]) -> float | None:
    """The mean over the steps whose answers have verdicts; None where no step's have."""
    found = [each.reward_mean for each in steps if each.reward_mean is not None]
    return fmean(found) if found else None


def _all(steps: Sequence[StepView], name: str) -> list[float]:
    """A figure of every step; empty where one has none."""
    found = [step.figures[name] for step in steps if name in step.figures]
    return found if len(found) == len(steps) else []
