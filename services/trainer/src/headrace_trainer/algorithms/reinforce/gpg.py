"""GPG (arXiv 2504.02546): group-centred rewards under the plain policy gradient, without a ratio and a clip."""

from __future__ import annotations

from torch import Tensor

from headrace_trainer.algorithms._base import Barrier, Outcomes, TokenBatch
from headrace_trainer.algorithms._policy_gradient import PolicyGradient
from headrace_trainer.algorithms.functional import Terms, gpg_advantages, reinforce_terms
from headrace_trainer.algorithms.plugins import GpgOptions


class Gpg(PolicyGradient[GpgOptions]):
    """See `gpg_advantages`; its scale without `alpha` is the whole batch's."""

    least_group = 2

    def __init__(self, options: GpgOptions) -> None:
        super().__init__(options)
        self.compares = Barrier.BATCH if options.alpha is None else Barrier.GROUP

    def advantages(self, outcomes: Outcomes) -> Tensor:
        """alpha (r - mean); alpha None is samples / samples whose reward is not 0 (verl)."""
        found_BT: Tensor = gpg_advantages(
            outcomes.rewards_B, outcomes.groups_B, outcomes.mask_BT, alpha=self.options.alpha
        )
        return found_BT

    def terms(self, batch: TokenBatch) -> Terms:
        """-A log p, in every pass."""
        return reinforce_terms(batch.log_probs_K, batch.advantages_K)
