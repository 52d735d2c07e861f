"""Engine and trainer compared on answers of a step that has no gradient. Knows no rounds and no wire."""

from __future__ import annotations

import math

from headrace_trainer.learning.samples import Group, Sequence

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
    differences = [
        abs(own - engine)
        for sequence, values in zip(sequences, log_probs, strict=True)
        for own, engine in zip(values, sequence.engine_log_probs, strict=True)
    ]
    return {
        "log_prob_compared_tokens": float(len(differences)),
        "log_prob_mismatch_mean": math.fsum(differences) / len(differences),
        "log_prob_mismatch_max": max(differences),
    }
