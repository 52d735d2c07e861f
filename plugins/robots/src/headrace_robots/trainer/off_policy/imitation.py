"""One update of each algorithm that imitates the store, and which update each algorithm makes.

Knows no store, no optimizer and no ranks. Shapes: B transitions of this rank, C actions of a chunk, A numbers of an
action.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from typing_extensions import override

from headrace_robots.policies.policy import RobotPolicy
from headrace_robots.trainer.off_policy import losses, plugins
from headrace_robots.trainer.off_policy.critics import Critics
from headrace_robots.trainer.off_policy.updates import (
    ACTOR,
    DIFFERENCES,
    Batch,
    CrossQUpdate,
    IqlUpdate,
    SacUpdate,
    Steps,
    Td3BcUpdate,
    Update,
)


class CloningUpdate(Update):
    """Imitates the actions of the store, those of better episodes more; demonstrations always."""

    options: plugins.CloningOptions

    def __call__(
        self, batch: Batch, number: int, noise: Callable[[], Tensor], steps: Steps
    ) -> dict[str, Tensor]:
        weights_B = torch.where(batch.shown_B, 1.0, self._weights(batch, steps)) * batch.weights_B
        executed_BCA = self.policy.head.executed(batch.actions_BCA)
        errors_B = self.policy.imitate(batch.seen, executed_BCA.float(), ()).mean(-1)
        total = steps.total(weights_B.sum()).clamp(min=1e-6)
        loss = (weights_B * errors_B).sum() / total
        steps.step(ACTOR, loss)
        return {
            "actor_loss": loss.detach(),
            "imitated_share": losses.mean((weights_B > 0).float(), batch.count),
        }

    def _weights(self, batch: Batch, steps: Steps) -> Tensor:
        if self.options.weigh == "success":
            return batch.successes_B.float()
        mean = steps.total(batch.returns_B.sum() / batch.count)
        spread = steps.total((batch.returns_B - mean).square().sum() / batch.count).sqrt()
        return (
            (self.options.inverse_temperature * (batch.returns_B - mean) / (spread + 1e-6))
            .exp()
            .clamp(max=100.0)
        )


class DaggerUpdate(CloningUpdate):
    """Imitates what the expert would have done; of demonstrations and interventions, what was done.

    Without an expert it imitates these alone (HG-DAgger, arXiv 1810.02890).
    """

    options: plugins.DaggerOptions  # type: ignore[assignment]
    expert: RobotPolicy | None = None
    """Given before the first update."""

    def __call__(
        self, batch: Batch, number: int, noise: Callable[[], Tensor], steps: Steps
    ) -> dict[str, Tensor]:
        if self.expert is None:
            return super().__call__(batch, number, noise, steps)
        seeds = [0] * len(batch.seen)
        wanted_BCA = self.expert.act(batch.seen, seeds, deterministic=True).executed_BCA.float()
        done_BCA = self.policy.head.executed(batch.actions_BCA).float()
        wanted_BCA = torch.where(batch.shown_B[:, None, None], done_BCA, wanted_BCA)
        errors_B = self.policy.imitate(batch.seen, wanted_BCA, ()).mean(-1)
        loss = losses.mean(batch.weights_B * errors_B, batch.count)
        steps.step(ACTOR, loss)
        return {"actor_loss": loss.detach()}

    @override
    def _weights(self, batch: Batch, steps: Steps) -> Tensor:
        return torch.zeros_like(batch.weights_B)


class RecapUpdate(Update):
    """RECAP: a value says which actions did better than it, and the policy imitates all, told which these are."""

    options: plugins.RecapOptions
    offline = True

    def build(self) -> None:
        chosen = self.options
        self.value = Critics(self.policy, 1, 0, chosen.critic_hidden, layer_norm=chosen.layer_norm)
        self.learned["value"] = self.value

    def __call__(
        self, batch: Batch, number: int, noise: Callable[[], Tensor], steps: Steps
    ) -> dict[str, Tensor]:
        values_B = self.value(batch.seen)[0, :, 0]
        differences_B = batch.to_go_B - values_B
        value_loss = losses.mean(batch.weights_B * differences_B.square(), batch.count)
        with torch.no_grad():
            next_B = self.value(batch.following)[0, :, 0]
            came_B = losses.bootstrapped(batch.rewards_B, batch.discounts_B, next_B)
            better_B, threshold = self.better(batch, came_B - values_B, steps)
        steps.step("value", value_loss)
        loss = losses.mean(batch.weights_B * self._errors(batch, better_B, noise()), batch.count)
        steps.step(ACTOR, loss)
        return {
            "value_loss": value_loss.detach(),
            "actor_loss": loss.detach(),
            "value_mean": losses.mean(values_B.detach(), batch.count),
            "advantage_threshold": threshold * len(values_B) / batch.count,
            "better_share": losses.mean(better_B.float(), batch.count),
            DIFFERENCES: differences_B.detach().abs(),
        }

    def better(self, batch: Batch, advantages_B: Tensor, steps: Steps) -> tuple[Tensor, Tensor]:
        """(B,) which actions were better than most, and the advantage from which on they are: the mean of all ranks'.

        Where it is not above 0, one that just comes to it, as all failures may, is not.
        """
        own_N = advantages_B[~batch.shown_B]
        count = torch.tensor(float(len(own_N)), device=own_N.device)
        least = own_N.quantile(1 - self.options.better_share) if len(own_N) else count
        threshold = steps.total(least * count) / steps.total(count).clamp(min=1)
        own_B = torch.where(threshold > 0, advantages_B >= threshold, advantages_B > threshold)
        return batch.shown_B | own_B, threshold

    def _errors(self, batch: Batch, better_B: Tensor, noise_BCA: Tensor) -> Tensor:
        """(B,) of imitation, told of all but the dropped ones."""
        dropped_B = torch.special.ndtr(noise_BCA[:, 0, 0]) < self.options.dropped_share
        told_B = torch.where(dropped_B, 0.0, torch.where(better_B, 1.0, -1.0))
        head = self.policy.head
        executed_BCA = head.executed(batch.actions_BCA).float()
        errors_BC: Tensor = head.imitate(self.policy.outputs(batch.seen, told_B), executed_BCA)
        return errors_BC.mean(-1)


UPDATES: Mapping[str, type[Update]] = {
    "sac": SacUpdate,
    "rlpd": SacUpdate,
    "crossq": CrossQUpdate,
    "td3_bc": Td3BcUpdate,
    "iql": IqlUpdate,
    "dagger": DaggerUpdate,
    "success_cloning": CloningUpdate,
    "recap": RecapUpdate,
}
"""By name of the algorithm."""
