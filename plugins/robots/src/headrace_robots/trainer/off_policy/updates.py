"""One update of each algorithm with critics: critics, temperature and policy, from a batch of transitions.

Knows no store, no optimizer and no ranks: `Steps` has them. Shapes: B transitions of this rank, C actions of a chunk, A
numbers of an action, E critics, K categories.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from headrace_robots.policies.policy import Observation, RobotPolicy
from headrace_robots.trainer.off_policy import losses, plugins
from headrace_robots.trainer.off_policy.critics import Critics, follow, target_of

ACTOR = "actor"
"""Name of what the policy's own weights learn with."""


@dataclass(frozen=True)
class Batch:
    """Drawn transitions. `actions_BCA` is what was drawn, as the policy draws; `count` the batch's size over all ranks.

    `successes_B` and `returns_B` are of the whole episode, `to_go_B` is what it earned from there on, discounted;
    `shown_B` is true at demonstrations, and where a person acted.
    """

    seen: Observation
    actions_BCA: Tensor
    rewards_B: Tensor
    discounts_B: Tensor
    following: Observation
    weights_B: Tensor
    successes_B: Tensor
    returns_B: Tensor
    shown_B: Tensor
    to_go_B: Tensor
    count: float


class Steps(Protocol):
    """What an update moves weights with, on all ranks alike."""

    def step(self, name: str, loss: Tensor) -> None:
        """One optimizer step of the named part down the gradient of the sum of all ranks' losses."""

    def total(self, value: Tensor) -> Tensor:
        """The sum of a number without gradient over all ranks."""


class Update(ABC):
    """One update. `learned` are parts that learn beside the policy, `kept` those that do not; checkpoints have both."""

    offline = False
    """Whether its warm-up is updates from demonstrations alone; that of the others imitates them."""

    def __init__(self, policy: Any, options: Any) -> None:
        self.policy, self.options = policy, options
        self.learned: dict[str, nn.Module] = {}
        self.kept: dict[str, nn.Module] = {}
        self.build()

    def build(self) -> None:  # noqa: B027  # some have none
        """Makes the parts, from torch's random state."""

    @abstractmethod
    def __call__(
        self, batch: Batch, number: int, noise: Callable[[], Tensor], steps: Steps
    ) -> dict[str, Tensor]:
        """Makes update `number` of the run; its figures, as this rank's part of a mean over the batch.

        `noise` draws (B, C, A) normal numbers. Under DIFFERENCES it gives (B,) temporal differences, if there are any.
        """


DIFFERENCES = "differences"


class Critical(Update):
    """An update with critics, and targets that follow them."""

    options: plugins.CriticOptions

    def build(self) -> None:
        head = self.policy.head
        self.categories = head.outputs if len(getattr(head, "category_D", ())) else 0
        given = self._shape()
        self.critics = Critics(*given[0], **given[1]).eval()
        self.learned["critics"] = self.critics
        if self.has_targets:
            self.targets = target_of(self.critics, *given[0], **given[1])
            self.kept["targets"] = self.targets

    has_targets = True

    def _shape(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        chosen, policy = self.options, self.policy
        actions = 0 if self.categories else policy.chunk_length * policy.action_size
        more = {"outputs": self.categories or 1, "layer_norm": chosen.layer_norm}
        return (policy, chosen.critics, actions, chosen.critic_hidden), more

    def values(self, critics: Critics, seen: Observation, actions_BCA: Tensor) -> Tensor:
        """(E, B) values of actions."""
        if self.categories:
            index_EBK = actions_BCA.flatten(1).long().expand(critics.critics, -1, -1)
            found: Tensor = critics(seen).gather(-1, index_EBK)[..., 0]
        else:
            found = critics(seen, actions_BCA.flatten(1))[..., 0]
        return found

    def some(self, values_EB: Tensor, number: int) -> Tensor:
        """The values of `least_of` critics, the same on every rank."""
        chosen = self.options
        if chosen.least_of == chosen.critics:
            return values_EB
        generator = torch.Generator().manual_seed(number)
        return values_EB[
            torch.randperm(chosen.critics, generator=generator)[: chosen.least_of].to(values_EB.device)
        ]

    def fit(self, values_EB: Tensor, targets_B: Tensor, batch: Batch, steps: Steps) -> dict[str, Tensor]:
        """A step of the critics towards targets."""
        loss = losses.critic_loss(values_EB, targets_B, batch.weights_B, batch.count)
        steps.step("critics", loss)
        return {
            "critic_loss": loss.detach(),
            "value_mean": losses.mean(values_EB.detach().mean(0), batch.count),
            DIFFERENCES: (values_EB.detach() - targets_B).abs().mean(0),
        }


class Temperature(nn.Module):
    """The logarithm of the entropy's weight."""

    def __init__(self, first: float) -> None:
        super().__init__()
        self.log = nn.Parameter(torch.tensor(first).log())


class SacUpdate(Critical):
    """SAC and RLPD, which differ by options alone."""

    options: plugins.SacOptions

    def build(self) -> None:
        super().build()
        chosen = self.options
        self.learns_temperature = chosen.temperature == "auto"
        first = chosen.first_temperature if chosen.temperature == "auto" else chosen.temperature
        self.temperature = Temperature(first)
        (self.learned if self.learns_temperature else self.kept)["temperature"] = self.temperature
        numbers = self.policy.chunk_length * self.policy.action_size
        largest = torch.tensor(float(max(2, self.categories))).log().item()
        default = 0.6 * largest if self.categories else -float(numbers)
        self.target_entropy = default if chosen.target_entropy is None else chosen.target_entropy

    def __call__(
        self, batch: Batch, number: int, noise: Callable[[], Tensor], steps: Steps
    ) -> dict[str, Tensor]:
        weight = self.temperature.log.detach().exp()
        figures = self.fit(*self._differences(batch, number, noise, weight), batch, steps)
        if (number + 1) % self.options.actor_every == 0:
            figures |= self._improve(batch, noise, weight, steps)
        if self.has_targets:
            follow(self.targets, self.critics, self.options.tau)
        return figures

    def _differences(
        self, batch: Batch, number: int, noise: Callable[[], Tensor], weight: Tensor
    ) -> tuple[Tensor, Tensor]:
        """(E, B) values and (B,) what they should be."""
        with torch.no_grad():
            if self.categories:
                log_probs_BK = self._log_probs(batch.following)
                next_EBK = self.some(self.targets(batch.following), number)
                next_B = losses.soft_values_of_categories(next_EBK, log_probs_BK, weight)
            else:
                drawn_BCA, log_probs_B = self._sample(batch.following, noise())
                next_EB = self.some(self.values(self.targets, batch.following, drawn_BCA), number)
                next_B = losses.soft_values(next_EB, log_probs_B, weight)
        targets_B = losses.bootstrapped(batch.rewards_B, batch.discounts_B, next_B)
        return self.values(self.critics, batch.seen, batch.actions_BCA), targets_B

    def _improve(
        self, batch: Batch, noise: Callable[[], Tensor], weight: Tensor, steps: Steps
    ) -> dict[str, Tensor]:
        """A step of the policy, and of the temperature after it."""
        how = self.options.actor_critics
        if self.categories:
            log_probs_BK = self._log_probs(batch.seen)
            values_B = losses.soft_values_of_categories(
                self.critics(batch.seen).detach(), log_probs_BK, weight, how
            )
            log_probs_B = (log_probs_BK.exp() * log_probs_BK).sum(-1)
            loss = -losses.mean(values_B, batch.count)
        else:
            drawn_BCA, log_probs_B = self._sample(batch.seen, noise())
            values_EB = self.values(self.critics, batch.seen, drawn_BCA)
            loss = losses.soft_actor_loss(values_EB, log_probs_B, weight, batch.count, how)
        steps.step(ACTOR, loss)
        if self.learns_temperature:
            steps.step(
                "temperature",
                losses.temperature_loss(self.temperature.log, log_probs_B, self.target_entropy, batch.count),
            )
        share = len(batch.rewards_B) / batch.count
        return {
            "actor_loss": loss.detach(),
            "policy_entropy": -losses.mean(log_probs_B.detach(), batch.count),
            "temperature": weight * share,
        }

    def _sample(self, seen: Observation, noise_BCA: Tensor) -> tuple[Tensor, Tensor]:
        found: tuple[Tensor, Tensor] = self.policy.head.sample(self.policy.outputs(seen), noise_BCA)
        return found

    def _log_probs(self, seen: Observation) -> Tensor:
        found: Tensor = self.policy.outputs(seen).flatten(1).log_softmax(-1)
        return found


class CrossQUpdate(SacUpdate):
    """CrossQ: a batch and what follows it go through the critics together, and there are no targets."""

    options: plugins.CrossQOptions
    has_targets = False

    def _shape(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        given, more = super()._shape()
        return given, more | {"renorm": (self.options.norm_momentum, self.options.norm_warmup)}

    def _differences(
        self, batch: Batch, number: int, noise: Callable[[], Tensor], weight: Tensor
    ) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            drawn_BCA, log_probs_B = self._sample(batch.following, noise())
        critics, encoder = self.critics, self.critics.encoder
        read_BS = torch.cat([encoder(batch.seen), encoder(batch.following)])
        critics.train()
        values_EB = critics.of_features(read_BS, torch.cat([batch.actions_BCA, drawn_BCA]).flatten(1))[..., 0]
        critics.eval()
        own_EB, next_EB = values_EB.chunk(2, 1)
        next_B = losses.soft_values(self.some(next_EB.detach(), number), log_probs_B, weight)
        return own_EB, losses.bootstrapped(batch.rewards_B, batch.discounts_B, next_B)


class Td3BcUpdate(Critical):
    """TD3+BC; TD3 with bc_alpha none."""

    offline = True
    options: plugins.Td3BcOptions

    def build(self) -> None:
        super().build()
        self.target_policy: RobotPolicy = copy.deepcopy(self.policy).requires_grad_(False)
        self.kept["target_policy"] = self.target_policy

    def __call__(
        self, batch: Batch, number: int, noise: Callable[[], Tensor], steps: Steps
    ) -> dict[str, Tensor]:
        chosen = self.options
        with torch.no_grad():
            wanted_BCA = torch.tanh(self.target_policy.outputs(batch.following))  # type: ignore[operator]
            shift_BCA = chosen.target_noise * noise()
            limit = chosen.target_noise_clip
            drawn_BCA = (wanted_BCA + shift_BCA.clamp(-limit, limit)).clamp(-1, 1)
            next_EB = self.some(self.values(self.targets, batch.following, drawn_BCA), number)
            targets_B = losses.bootstrapped(batch.rewards_B, batch.discounts_B, next_EB.amin(0))
        figures = self.fit(self.values(self.critics, batch.seen, batch.actions_BCA), targets_B, batch, steps)
        if (number + 1) % chosen.actor_every == 0:
            figures["actor_loss"] = self._improve(batch, steps)
            follow(self.targets, self.critics, chosen.tau)
            follow(self.target_policy, self.policy, chosen.tau)
        return figures

    def _improve(self, batch: Batch, steps: Steps) -> Tensor:
        drawn_BCA = torch.tanh(self.policy.outputs(batch.seen))
        values_B = self.values(self.critics, batch.seen, drawn_BCA)[0]
        errors_B = (drawn_BCA - batch.actions_BCA).square().flatten(1).mean(-1)
        scale = steps.total(values_B.detach().abs().sum() / batch.count)
        loss = losses.td3_bc_actor_loss(values_B, errors_B, self.options.bc_alpha, batch.count, scale)
        steps.step(ACTOR, loss)
        return loss.detach()


class IqlUpdate(Critical):
    """IQL: values, then policy, then critics, then targets, in the order of its authors' code."""

    offline = True
    options: plugins.IqlOptions

    def build(self) -> None:
        super().build()
        self.value = Critics(
            self.policy, 1, 0, self.options.critic_hidden, layer_norm=self.options.layer_norm
        )
        self.learned["value"] = self.value

    def __call__(
        self, batch: Batch, number: int, noise: Callable[[], Tensor], steps: Steps
    ) -> dict[str, Tensor]:
        chosen = self.options
        with torch.no_grad():
            worth_B = self.values(self.targets, batch.seen, batch.actions_BCA).amin(0)
        differences_B = worth_B - self.value(batch.seen)[0, :, 0]
        value_loss = losses.expectile_loss(differences_B, chosen.expectile, batch.weights_B, batch.count)
        steps.step("value", value_loss)
        figures = {"value_loss": value_loss.detach()}
        if (number + 1) % chosen.actor_every == 0:
            figures["actor_loss"] = self._improve(batch, worth_B, steps)
        with torch.no_grad():
            next_B = self.value(batch.following)[0, :, 0]
            targets_B = losses.bootstrapped(batch.rewards_B, batch.discounts_B, next_B)
        figures |= self.fit(self.values(self.critics, batch.seen, batch.actions_BCA), targets_B, batch, steps)
        follow(self.targets, self.critics, chosen.tau)
        return figures

    def _improve(self, batch: Batch, worth_B: Tensor, steps: Steps) -> Tensor:
        with torch.no_grad():
            advantages_B = worth_B - self.value(batch.seen)[0, :, 0]
        chosen = self.options
        weights_B = losses.advantage_weights(advantages_B, chosen.inverse_temperature, chosen.most_weight)
        log_probs_BCA = self.policy.head.score(self.policy.outputs(batch.seen), batch.actions_BCA)[0]
        loss = -losses.mean(weights_B * log_probs_BCA.flatten(1).sum(-1), batch.count)
        steps.step(ACTOR, loss)
        return loss.detach()
