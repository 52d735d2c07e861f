"""Helping with a step: a helper gives the gradient of whole groups, and the leader adds it to its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from headrace_servicekit.weights import StoredWeights

from headrace_trainer.backends._base import PrivateGradient, StateReader
from headrace_trainer.errors import Refusal, conflict, invalid
from headrace_trainer.learning import step as steps
from headrace_trainer.learning.contribution import Contribution, add_records, check_helped
from headrace_trainer.learning.learner import Learner
from headrace_trainer.session.held import HeldRun
from headrace_trainer.session.published import check_shapes
from headrace_trainer.session.publishing import Publisher


@dataclass(frozen=True)
class Offer:
    """A helper's contribution, published in its weight store under `name` and the attempt's next number."""

    what: Contribution
    name: str
    gradient: StoredWeights
    token_sums: Mapping[str, float]
    token_maxima: Mapping[str, float]


class HelperRun(HeldRun):
    """Both ends of a contribution."""

    _gradients: Publisher | None = None
    _contributed: Offer | None = None

    def help(self, base: steps.Version, reader: StateReader) -> None:
        """Holds a published version as a helper: without optimizer state, checkpoints or versions of its own.

        Raises Refusal CONFLICT for the leader of a run's steps, and INVALID for an older version or another model.
        """
        self.check_help(base)
        if self.state.version == base:
            return
        check_shapes(reader, self._rank.config.model)
        self._rank.reader = reader
        self.state, self._helps = steps.lost(self.state), True
        self._lead("help")
        self._learner = Learner(self._rank.config, self._rank.algorithm, self._leader)
        self.state = steps.restored(self.state, base, {})

    def check_help(self, base: steps.Version) -> None:
        """Raises what `help` would, but for another model: before weights are taken for it."""
        check_helped(self._rank.algorithm)
        leads = self.state.version is not None or self._carried is not None
        if self._rank.ranks.world_size > 1 or (leads and not self._helps):
            raise conflict(
                "this trainer leads the run's steps; a helper is a group of its own and restores nothing"
            )
        held = self.state.version
        if held is not None and held != base and base.number <= held.number:
            raise invalid(
                f"version {base.number} is not above {held.number}, which is held; numbers only rise"
            )

    def contribute(self, step: int, attempt: int) -> Offer:
        """Ends a helper's attempt; what it has accumulated, published. A retry gets the same.

        Raises Refusal NOT_OPEN, EMPTY_STEP, or NONFINITE for what nobody may add to a step.
        """
        last = self._contributed
        if last is not None and (last.what.step, last.what.attempt) == (step, attempt):
            return last
        begun, base = steps.check_open(self.state, step, attempt), steps.held_version(self.state)
        if not self._helps:
            raise Refusal("NOT_OPEN", "this trainer is no helper: call Help first")
        if not (records := self.state.accumulated):
            raise Refusal("EMPTY_STEP", "no group is accumulated")
        gradient = self._rank.helping.private_gradient()
        if self.state.tainted or not gradient.is_finite():
            self.abort(step, attempt)
            raise Refusal("NONFINITE", self.state.tainted or "the accumulated gradient is not finite")
        what = Contribution(step, attempt, base, begun.next_number, "", tuple(records))
        stored = self._offer(gradient, replace(base, number=begun.next_number))
        self._contributed = Offer(
            what, self._gradient_name, stored, gradient.token_sums, gradient.token_maxima
        )
        self.abort(step, attempt)
        return self._contributed

    def _offer(self, gradient: PrivateGradient, version: steps.Version) -> StoredWeights:
        if self._gradients is None:
            layout = [(name, "float32", tuple(tensor.shape)) for name, tensor in gradient.tensors.items()]
            self._gradients = Publisher(self._store, self._gradient_name, layout, kept=1)
        self._gradients.stage(version.number, iter(gradient.tensors.items()))
        return self._gradients.publish(version)

    @property
    def _gradient_name(self) -> str:
        return f"{self._run}/helpers/{self._store.incarnation}"

    def add(self, given: Contribution, gradient: PrivateGradient) -> None:
        """Adds a helper's gradient to the open step, whole or not at all; one that is in already changes nothing."""
        state, fresh = add_records(self.state, given)
        if not fresh:
            return
        if problem := gradient.difference(self._rank.helping.gradient_shapes()):
            raise invalid(f"the contribution of {given.helper} is of another model: {problem}")
        if not gradient.is_finite():
            raise Refusal("NONFINITE", f"the contribution of {given.helper} is not finite")
        self._leader.add(gradient)
        self.state = state
