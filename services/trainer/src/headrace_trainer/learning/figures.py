"""The figures of a step, by the names that the coordinator shows. Knows no tensors and no rounds."""

from __future__ import annotations

import math
import statistics
import struct
from collections import Counter
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Many
from dataclasses import dataclass

import msgspec

from headrace_trainer.errors import Refusal, invalid
from headrace_trainer.learning.passes import OptimizerStep
from headrace_trainer.learning.samples import Disposition, Group, GroupRecord, Sample
from headrace_trainer.learning.step import StepState, held_version

LARGEST_LOG_RATIO = 20.0
"""What ratios are cut at, so that one token does not make a sum infinite."""
BITS = "mismatch_bits"
"""Name of a sum: bits in which log-probs of a deterministic run differ from the engine's."""
WITNESSES = 4
"""Most answers that are kept for the comparison."""


def step_figures(steps: Many[OptimizerStep], records: Many[GroupRecord], *, rate: float) -> dict[str, float]:
    """All figures of a step that was committed with these optimizer steps, of which there is at least one.

    Loss and norm are means over the optimizer steps. Token figures (entropy, clip_fraction, approx_kl and others of
    the algorithm's own) are means over the tokens that were computed, in every epoch anew: a group whose rewards are
    all equal may not be, and where no token was, those figures and the loss are absent. The mismatch is between the
    engine and the weights at which the step began, over the `log_prob_compared_tokens` whose log-prob the engine has
    told: mean and largest difference, in a deterministic run the bits that differ, an estimate of KL(engine ||
    trainer), and mean, largest and effective sample size (0 to 1) of the probabilities' ratios.
    Of a model with experts: `balance_loss` (before its coefficient, mean over layers: 1 where all experts are equal),
    `busiest_expert` (most choices of one, against an equal share, mean over layers), and with routing replay
    `routes_changed`, the share of choices that the trainer's routers would have made otherwise, and
    `log_prob_mismatch_without_replay`, which is of the step's first micro-batch on each rank.
    Of a run whose policy has a head that drafts: `draft_loss`, the cross-entropy of its next token against the policy's
    distribution, and `draft_overlap`, the probability that both have in common (1: every draft is right).
    reward_std is over all samples of the step (population). With a critic `explained_variance` is that of the returns
    by the values under the base (absent where all returns are equal), and the critic's own norm stands apart.
    """
    rewards = [reward for record in records for reward in record.rewards]
    lengths = [length for record in records for length in record.answer_lengths]
    return {
        **_loss(steps),
        "grad_norm": statistics.fmean(step.report.grad_norm for step in steps),
        **_critic_norm(steps),
        "learning_rate": rate,
        "optimizer_steps": float(len(steps)),
        **(
            {"reward_mean": statistics.fmean(rewards), "reward_std": statistics.pstdev(rewards)}
            if rewards
            else {}
        ),
        "groups_all_equal": float(sum(record.all_equal for record in records)),
        **({"answer_length_mean": statistics.fmean(lengths)} if any(lengths) else {}),
        **_token_means(steps),
        **_mismatch([step for step in steps if step.epoch == 0]),
        **_experts(steps),
        **_drafts(steps),
    }


def _loss(steps: Many[OptimizerStep]) -> dict[str, float]:
    """Nothing where no token was computed."""
    found = [step for step in steps if step.report.token_sums["tokens"]]
    losses = (step.report.token_sums["loss"] / step.denominator for step in found)
    return {"loss": statistics.fmean(losses)} if found else {}


def staleness_figures(state: StepState) -> dict[str, float]:
    """How far the trained tokens of the open attempt lag behind its base, in steps: mean, most, share that lags.

    Absent where no token carries loss.
    """
    lags: Counter[int] = Counter()
    base = held_version(state)
    for record in state.accumulated:
        for number, tokens in record.tokens_by_version.items():
            lags[base.ordinal - state.lineage[number]] += tokens
    tokens = lags.total()
    if not tokens:
        return {}
    return {
        "staleness_mean": sum(lag * count for lag, count in lags.items()) / tokens,
        "staleness_max": float(max(lag for lag, count in lags.items() if count)),
        "stale_tokens_fraction": 1.0 - lags[0] / tokens,
    }


def _experts(steps: Many[OptimizerStep]) -> dict[str, float]:
    sums = _sums(steps)
    found = {}
    if balanced := sums.get("balanced", 0.0):
        found = {name: sums[name] / balanced for name in ("balance_loss", "busiest_expert")}
    if routes := sums.get("routes", 0.0):
        found["routes_changed"] = sums["routes_changed"] / routes
    if tokens := sums.get("unforced_tokens", 0.0):
        found["log_prob_mismatch_without_replay"] = sums["unforced_mismatch"] / tokens
    return found


def _drafts(steps: Many[OptimizerStep]) -> dict[str, float]:
    sums = _sums(steps)
    tokens = sums.get("draft_tokens", 0.0)
    return {name: sums[name] / tokens for name in ("draft_loss", "draft_overlap")} if tokens else {}


def _critic_norm(steps: Many[OptimizerStep]) -> dict[str, float]:
    norm = statistics.fmean(step.report.critic_grad_norm for step in steps)
    return {"critic_grad_norm": norm} if norm else {}


def _token_means(steps: Many[OptimizerStep]) -> dict[str, float]:
    sums = _sums(steps)
    own = {name.removeprefix("own."): value for name, value in sums.items() if name.startswith("own.")}
    tokens = sums["tokens"]
    if not tokens:
        return {}
    means = {name: value / tokens for name, value in own.items()}
    return {"entropy": sums["entropy"] / tokens, **_explained(means)}


def _explained(means: dict[str, float]) -> dict[str, float]:
    """Means of values and returns, whose squares become the share of the returns' variance that the values explain."""
    if "return_square" not in means:
        return means
    found = dict(means)
    spread = found.pop("return_square") - found["return_mean"] ** 2
    left = found.pop("value_error_square") - found.pop("value_error") ** 2
    if spread > 1e-12:
        found["explained_variance"] = 1.0 - left / spread
    return found


def _mismatch(first_epoch: Many[OptimizerStep]) -> dict[str, float]:
    sums = _sums(first_epoch)
    compared = sums["engine_tokens"]
    found = {"log_prob_compared_tokens": compared}
    if compared:
        found["log_prob_mismatch_mean"] = sums["mismatch"] / compared
        found["log_prob_mismatch_max"] = max(step.report.token_maxima["mismatch"] for step in first_epoch)
    if compared and BITS in sums:
        found["log_prob_mismatch_bits"] = sums[BITS]
    if compared and "ratio" in sums:  # a backend of someone else's may not tell
        found["log_prob_mismatch_kl"] = sums["mismatch_kl"] / compared
        found["log_prob_ratio_mean"] = sums["ratio"] / compared
        found["log_prob_ratio_max"] = max(step.report.token_maxima["ratio"] for step in first_epoch)
        found["log_prob_ratio_ess"] = sums["ratio"] ** 2 / (compared * sums["ratio_square"])
    return found


def _sums(steps: Many[OptimizerStep]) -> dict[str, float]:
    total: dict[str, float] = {}
    for step in steps:
        for name, value in step.report.token_sums.items():
            total[name] = total.get(name, 0.0) + value
    return total


def witnesses(state: StepState, groups: Iterable[Group]) -> list[Sample]:
    """A few answers of the first group that was accumulated; empty where none was.

    They are those which the held version sampled alone and whose log-probs the engine has told.
    """
    version = held_version(state).number
    for group in groups:
        if state.groups[group.prompt_ordinal].disposition is not Disposition.ACCUMULATED:
            continue
        fit = [
            msgspec.structs.replace(sample, routes=b"", slot=(group.prompt_ordinal, member.sample_index))
            for member in group.members
            for sample in member.samples
            if set(sample.versions) == {version} and all(map(math.isfinite, sample.engine_log_probs))
        ]
        if fit:
            return fit[:WITNESSES]
    return []


def rated(groups: Iterable[Group]) -> dict[tuple[int, int], Sample]:
    """By prompt ordinal and sample index: what groups that are rated have of one branch."""
    return {
        (group.prompt_ordinal, member.sample_index): msgspec.structs.replace(
            member.samples[0], slot=(group.prompt_ordinal, member.sample_index)
        )
        for group in groups
        if group.rated
        for member in group.members
        if len(member.samples) == 1
    }


@dataclass(frozen=True, order=True)
class Difference:
    """A token of an answer whose log-prob the trainer computes to other bits than the engine."""

    slot: tuple[int, int]
    place: int
    """Among the answer's trained tokens, from 0."""
    token: int
    engine: float
    trainer: float

    def __str__(self) -> str:
        prompt, sample = self.slot
        return (
            f"slot (prompt {prompt}, sample {sample}), token {self.place} (id {self.token}): the engine's log-prob is "
            f"{_exactly(self.engine)}, the trainer's {_exactly(self.trainer)}"
        )


def differences(samples: Iterable[Sample], log_probs: Iterable[Many[float]]) -> Iterator[Difference]:
    """The tokens of these samples whose log-prob, as the trainer computes it, has not the engine's bits.

    A token without one of the engine is left out.
    """
    for sample, own in zip(samples, log_probs, strict=True):
        for place, (engine, trainer) in enumerate(zip(sample.engine_log_probs, own, strict=True)):
            if not math.isnan(engine) and _bits(engine) != _bits(trainer):
                token = sample.tokens[sample.trained[place]]
                yield Difference(sample.slot, place, token, engine, trainer)


def differing(step: int, what: str) -> Refusal:
    """Why a deterministic run ends; `step` counts from 0."""
    return invalid(
        f"deterministic: engine and trainer differ in step {step + 1}, {what}; no bit may: install the same versions "
        "on alike processors for both, or set deterministic: false",
        reason="LOG_PROBS_DIFFER",
        key="deterministic",
    )


def _bits(value: float) -> bytes:
    return struct.pack(">f", value)


def _exactly(value: float) -> str:
    return f"{value:.9g} (0x{_bits(value).hex()})"


def agreement(sequences: list[Sample], log_probs: list[list[float]]) -> dict[str, float]:
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
