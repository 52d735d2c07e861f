"""Counter-based uniforms: the same (seed, prompt, sample, position) gives the same number anywhere.

Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011), vectorised.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)
_ROUNDS = 10

Words = NDArray[np.uint64]


def philox4x32(counter: tuple[Words, Words, Words, Words], key: tuple[Words, Words]) -> tuple[Words, ...]:
    """Ten rounds on arrays of 32-bit words (held in uint64); returns four arrays of 32-bit words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        first, second = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (
            (second >> _SHIFT) ^ c1 ^ k0,
            second & _LOW,
            (first >> _SHIFT) ^ c3 ^ k1,
            first & _LOW,
        )
        k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
    return c0, c1, c2, c3


def uniforms(
    seed: NDArray[np.int64],
    prompt_ordinal: NDArray[np.int64],
    sample_index: NDArray[np.int64],
    position: NDArray[np.int64],
) -> NDArray[np.float32]:
    """fp32 uniforms in [0, 1), one an element; `position` counts the sample's tokens from 0."""
    key, prompt = seed.astype(np.uint64), prompt_ordinal.astype(np.uint64)
    counter = (
        position.astype(np.uint64) & _LOW,
        sample_index.astype(np.uint64) & _LOW,
        prompt & _LOW,
        prompt >> _SHIFT,
    )
    word = philox4x32(counter, (key & _LOW, key >> _SHIFT))[0]
    # 24 bits are what an fp32 holds exactly, and never round up to 1.
    return ((word >> np.uint64(8)).astype(np.float64) * 2.0**-24).astype(np.float32)
