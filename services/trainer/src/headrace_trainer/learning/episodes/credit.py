"""What the chunks of a step's episodes are worth, and how a minibatch of them is divided. Knows no rounds, no model.

Shapes: B episodes, T chunks of the longest, C actions of a chunk, A numbers of an action; N chunks of all episodes.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from headrace_trainer.algorithms.episodes._base import Credit, EpisodeAlgorithm, EpisodeOutcomes
from headrace_trainer.learning.episodes.data import CreditData, EpisodeKey, Packed


@dataclass(frozen=True)
class KeptEpisode:
    """An episode on the leader: outcomes, the engine's log-probs, and those of the weights at which the step began."""

    key: EpisodeKey
    reward: float
    trained: bool
    terminated: bool
    valid_TC: np.ndarray
    rewards_TC: np.ndarray
    successes_TC: np.ndarray
    engine_log_probs_TCA: np.ndarray
    old_log_probs_TCA: np.ndarray
    values_T: np.ndarray
    final_value: float


@dataclass(frozen=True)
class Plan:
    """What ranks are told, and what the leader keeps of it.

    `groups_N` is each chunk's group, by place; `units_N` its units that are learned from, `shares_N` how much of its
    episode they are. `learned` numbers the chunks that have any.
    """

    data: CreditData
    groups_N: list[int]
    units_N: np.ndarray
    shares_N: np.ndarray

    @property
    def learned(self) -> list[int]:
        """Numbers of the chunks that are learned from."""
        found: list[int] = np.flatnonzero(self.units_N).tolist()
        return found

    def denominator(self, algorithm: EpisodeAlgorithm, chunks: list[int]) -> float:
        """What the sum over these chunks is divided by."""
        return algorithm.denominator(float(self.units_N[chunks].sum()), float(self.shares_N[chunks].sum()))


def plan_credit(groups: Many[Many[KeptEpisode]], algorithm: EpisodeAlgorithm) -> Plan:
    """What every chunk of these groups' episodes is worth."""
    kept = [(place, episode) for place, group in enumerate(groups) for episode in group]
    episodes = [episode for _, episode in kept]
    credit = algorithm.credit(_outcomes(kept))
    mask_NC = _flat(credit.mask_BTC, episodes)
    units_N = _units(mask_NC, algorithm, episodes[0].old_log_probs_TCA.shape[-1])
    lengths = [len(episode.values_T) for episode in episodes]
    starts = np.cumsum([0, *lengths[:-1]])
    totals_N = np.repeat(np.add.reduceat(units_N, starts), lengths)
    weights_N = np.array([algorithm.token_weight(max(1, int(total))) for total in totals_N])
    data = CreditData(
        keys=[episode.key for episode in episodes],
        old_log_probs_NCA=_joined(episodes, lambda each: each.old_log_probs_TCA),
        engine_log_probs_NCA=_joined(episodes, lambda each: each.engine_log_probs_TCA),
        values_N=_joined(episodes, lambda each: each.values_T),
        advantages=Packed.of(_flat(credit.advantages, episodes)),
        mask_NC=Packed.of(mask_NC),
        weights_N=Packed.of(weights_N),
        returns_N=_returns(credit, episodes),
    )
    places = [place for (place, _), length in zip(kept, lengths, strict=True) for _ in range(length)]
    return Plan(data, places, units_N, units_N / np.maximum(1, totals_N))


def _outcomes(kept: Many[tuple[int, KeptEpisode]]) -> EpisodeOutcomes:
    episodes = [episode for _, episode in kept]
    return EpisodeOutcomes(
        rewards_B=torch.tensor([each.reward for each in episodes], dtype=torch.float64),
        groups_B=torch.tensor([place for place, _ in kept]),
        trained_B=torch.tensor([each.trained for each in episodes]),
        rewards_BTC=_padded([each.rewards_TC for each in episodes]).double(),
        successes_BTC=_padded([each.successes_TC for each in episodes]),
        valid_BTC=_padded([each.valid_TC for each in episodes]),
        values_BT=_padded([each.values_T for each in episodes]).double(),
        final_values_B=torch.tensor([each.final_value for each in episodes], dtype=torch.float64),
        terminated_B=torch.tensor([each.terminated for each in episodes]),
    )


def _units(mask_NC: np.ndarray, algorithm: EpisodeAlgorithm, numbers: int) -> np.ndarray:
    """How many units of each chunk are learned from."""
    if algorithm.level == "chunk":
        return np.asarray(np.any(mask_NC, -1), np.int64)
    each = numbers if algorithm.level == "token" else 1
    return np.asarray(np.count_nonzero(mask_NC, -1), np.int64) * each


def _returns(credit: Credit, episodes: Many[KeptEpisode]) -> Packed | None:
    return None if credit.returns_BT is None else Packed.of(_flat(credit.returns_BT, episodes))


def _padded(arrays: Many[np.ndarray]) -> Tensor:
    """(B, T, …), 0 behind the end of an episode."""
    longest = max(map(len, arrays))
    whole = np.zeros((len(arrays), longest, *arrays[0].shape[1:]), dtype=arrays[0].dtype)
    for row, array in zip(whole, arrays, strict=True):
        row[: len(array)] = array
    return torch.from_numpy(whole)


def _flat(values_BT: Tensor, episodes: Many[KeptEpisode]) -> np.ndarray:
    """(N, …): the chunks of each episode, one after the other."""
    rows = zip(values_BT.numpy(), episodes, strict=True)
    return np.concatenate([row[: len(episode.values_T)] for row, episode in rows])


def _joined(episodes: Many[KeptEpisode], part: Callable[[KeptEpisode], np.ndarray]) -> Packed:
    return Packed.of(np.concatenate([part(episode) for episode in episodes]))
