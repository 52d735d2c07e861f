"""The figures of a committed step, by the names that the coordinator shows. Knows no tensors."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from headrace_trainer.backends._base import CommitReport
from headrace_trainer.learning.samples import GroupRecord


def step_figures(
    report: CommitReport, records: Sequence[GroupRecord], *, denominator: float, rate: float, seconds: float
) -> dict[str, float]:
    """All figures of a step.

    Token figures (entropy, mismatch, the algorithm's own) are means over the tokens that were computed: the
    groups whose rewards are all equal are not, and where no token was, those figures are absent. The mismatch
    is over the `log_prob_compared_tokens` of them whose log-prob the engine has told.
    reward_std is over all samples of the step (population).
    """
    rewards = [reward for record in records for reward in record.rewards]
    lengths = [length for record in records for length in record.answer_lengths]
    return {
        "loss": report.token_sums["loss"] / denominator,
        "grad_norm": report.grad_norm,
        "learning_rate": rate,
        "reward_mean": statistics.fmean(rewards),
        "reward_std": statistics.pstdev(rewards),
        "groups_all_equal": float(sum(record.all_equal for record in records)),
        "answer_length_mean": statistics.fmean(lengths),
        "learn_seconds": seconds,
        **_token_means(report),
    }


def _token_means(report: CommitReport) -> dict[str, float]:
    sums = report.token_sums
    tokens, compared = sums["tokens"], sums["engine_tokens"]
    found: dict[str, float] = {"log_prob_compared_tokens": compared}
    if tokens:
        found["entropy"] = sums["entropy"] / tokens
        own = {name.removeprefix("own."): value for name, value in sums.items() if name.startswith("own.")}
        found.update({name: value / tokens for name, value in own.items()})
    if compared:
        found["log_prob_mismatch_mean"] = sums["mismatch"] / compared
        found["log_prob_mismatch_max"] = report.token_maxima["mismatch"]
    return found
