"""Episodes as ranks get them in rounds: arrays as bytes, and what each chunk is worth. No wire, no torch.

Shapes: T chunks of an episode, C actions of a chunk, A numbers of an action; N chunks of all episodes of a step.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import numpy as np

EpisodeKey = tuple[int, int]
"""(prompt ordinal, sample index)."""


class Packed(msgspec.Struct, frozen=True, array_like=True):
    """An array."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes

    @classmethod
    def of(cls, array: np.ndarray) -> Packed:
        """A copy of an array."""
        whole = np.ascontiguousarray(array)
        return cls(whole.dtype.str, array.shape, whole.tobytes())

    def array(self) -> np.ndarray:
        """The array, writable."""
        return np.frombuffer(bytearray(self.data), dtype=np.dtype(self.dtype)).reshape(self.shape)


class EpisodeData(msgspec.Struct, frozen=True):
    """What a policy scores of an episode. `final` is the observation behind the last action of one that was cut."""

    key: EpisodeKey
    prompt: list[int]
    observation: dict[str, Packed]
    sampled: dict[str, Packed]
    valid_TC: Packed
    final: dict[str, Packed]


class EpisodeScores(msgspec.Struct, frozen=True):
    """An episode under the weights of the moment: (T, C, A) log-probs, (T,) values, the value of a cut one's end."""

    key: EpisodeKey
    log_probs_TCA: Packed
    values_T: Packed
    final_value: float


class CreditData(msgspec.Struct, frozen=True):
    """What a step's chunks are worth, in the order of `keys` and, within an episode, of time.

    `advantages` is (N, C), (N, 1) at level chunk. `mask_NC` is true at actions that are learned from. Returns and old
    values are (N,); `returns_N` is None without a critic. `weights_N` is what each unit of a chunk weighs in the sum.
    """

    keys: list[EpisodeKey]
    old_log_probs_NCA: Packed
    engine_log_probs_NCA: Packed
    values_N: Packed
    advantages: Packed
    mask_NC: Packed
    weights_N: Packed
    returns_N: Packed | None = None


def packed(arrays: Mapping[str, np.ndarray]) -> dict[str, Packed]:
    """Arrays by name."""
    return {name: Packed.of(array) for name, array in arrays.items()}
