"""The root module of a robot policy that is sharded: what is asked of the policy goes through its forward."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace_modelkit.robot.policy import Observation
from torch import Tensor

from headrace_trainer.backends.fsdp.sharding import Root

if TYPE_CHECKING:
    from headrace_modelkit.robot.policy import RobotPolicy


@dataclass(frozen=True)
class Drawn:
    """Chunks that were drawn, to be scored."""

    observation: Observation
    sampled: Mapping[str, Tensor]


@dataclass(frozen=True)
class Shown:
    """Actions of demonstrations, to be imitated; as `RobotPolicy.imitate` takes them."""

    observation: Observation
    actions_BHA: Tensor
    seeds: Many[int]


class RobotRoot(Root):
    """A robot policy. fully_shard hangs on a module's forward, and knows tensors only where they lie in a tuple."""

    def __init__(self, policy: RobotPolicy) -> None:
        super().__init__()
        self.model, self.critic = policy, None

    def forward(self, asked: Drawn | Shown | None, anchor: Tensor) -> tuple[Tensor, ...]:
        """(log-probs, entropies, values) of chunks that were drawn; the losses of those that were shown."""
        if asked is None:
            return (anchor * 1.0,)
        if isinstance(asked, Shown):
            losses_BH: Tensor = self.model.imitate(asked.observation, asked.actions_BHA, asked.seeds)
            return (losses_BH.clone(),)
        found = self.model.evaluate(asked.observation, asked.sampled)
        # No views: fully_shard's hook on one is lost where it is written to.
        return found.log_probs_BCA.clone(), found.entropy_BCA.clone(), found.values_B.clone()
