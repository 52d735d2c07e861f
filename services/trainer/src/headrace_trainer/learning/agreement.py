"""Engine and trainer compared on answers of a step that has no gradient. Knows no rounds and no wire."""

from __future__ import annotations

import math

from headrace_trainer.learning.samples import Group, Sequence

LARGEST_LOG_RATIO = 20.0
"""What ratios are cut at, so that one token does not make a sum infinite."""
WITNESSES = 4
"""Most answers that are kept for the comparison."""


def witnesses(group: Group, version: int) -> list[Sequence]:
    """A few of the group's answers that `version` sampled alone and whose log-probs the engine has told."""
    fit = [
        Sequence(member.tokens, member.trained, member.engine_log_probs)
        for member in group.members
        if member.trained
        and set(member.versions) == {version}
        and all(math.isfinite(value) for value in member.engine_log_probs)
    ]
    return fit[:WITNESSES]


def agreement(sequences: list[Sequence], log_probs: list[list[float]]) -> dict[str, float]:
    """The figures of the comparison; a value that is not finite stays one, so that it is seen."""
    log_ratios = [
        own - engine
        for sequence, values in zip(sequences, log_probs, strict=True)
        for own, engine in zip(values, sequence.engine_log_probs, strict=True)
    ]
    count, ratios = len(log_ratios), [math.exp(min(value, LARGEST_LOG_RATIO)) for value in log_ratios]
    return {
        "log_prob_compared_tokens": float(count),
        "log_prob_mismatch_mean": math.fsum(map(abs, log_ratios)) / count,
        "log_prob_mismatch_max": max(map(abs, log_ratios)),
        "log_prob_mismatch_kl": math.fsum(r - 1 - v for r, v in zip(ratios, log_ratios, strict=True)) / count,
        "log_prob_ratio_mean": math.fsum(ratios) / count,
        "log_prob_ratio_max": max(ratios),
    }
