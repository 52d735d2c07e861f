"""What is recorded of a committed step: its certificate, the view of it, and some of its trajectories as text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from statistics import fmean

from headrace.common.v1 import common_pb2 as common
from headrace.trainer.v1 import trainer_pb2 as trainer
from headrace_schema.resources.views import StepView
from headrace_servicekit.rpc.digests import set_digest

from headrace_coordinator.domain import events as ev
from headrace_coordinator.domain.ledger.compact import compact, compact_drops, count_drops
from headrace_coordinator.domain.ledger.reward_flow import stage_figures
from headrace_coordinator.domain.ledger.slot_index import ACCUMULATED, DROPPED, FILTERED, Slot
from headrace_coordinator.domain.ledger.versions import Lineage
from headrace_coordinator.projections.trajectories import SettledTrajectory, whole_groups
from headrace_coordinator.run.context import RunContext
from headrace_coordinator.run.step.learning import carries_no_loss, identities
from headrace_coordinator.run.step.timer import GENERATE_OPEN, StepTimer
from headrace_coordinator.run.step.trajectories import Trajectories, told
from headrace_coordinator.run.step.warnings import UNJUDGED
from headrace_coordinator.run.workers.rollout_client import weight_figures

REWARD_FIGURES = ("reward_mean", "reward_std", "groups_all_equal")
"""The trainer's figures of rewards."""


def certify(
    context: RunContext,
    opened: ev.StepOpened,
    response: trainer.CommitStepResponse,
    slots: list[Slot],
    trajectories: Trajectories,
) -> ev.Certificate:
    """Attests an update from the ledger's slots and the trainer's counts.

    With several reward stages it counts what each scored. Trajectories that were scored before the coordinator last
    started are left out there: only their reward is known.
    """
    run = context.state
    trained = [slot for slot in slots if slot.state == ACCUMULATED]
    passed, judged = _pass_rates(slots), slots if context.spec.has_scorers else []
    by_stage = list(stage_figures(context.spec.graph, _stage_rewards(trained, trajectories)))
    return ev.Certificate(
        number=opened.number,
        parent=opened.base,
        ordinal=run.lineage.versions[opened.base].ordinal + 1,
        digest=response.version.digest,
        step=opened.step,
        attempt=opened.attempt,
        trained=compact((slot.prompt, slot.sample, slot.attempt) for slot in trained),
        dropped=compact_drops((s.prompt, s.sample, s.reason) for s in slots if s.state == DROPPED),
        set_digest=set_digest(identities(trained)),
        tokens=response.token_count,
        tokens_by_version=dict(response.tokens_by_version),
        max_staleness=response.max_staleness,
        mean_staleness=_mean_staleness(run.lineage, opened.base, response.tokens_by_version),
        log_prob_mismatch_mean=response.figures.get("log_prob_mismatch_mean"),
        log_prob_mismatch_kl=response.figures.get("log_prob_mismatch_kl"),
        log_prob_mismatch_bits=_whole(response.figures.get("log_prob_mismatch_bits")),
        log_prob_compared_tokens=round(response.figures.get("log_prob_compared_tokens", 0.0)),
        drop_rate_by_length=_drop_rates(judged, lambda slot: _length_bucket(slot.tokens)),
        drop_rate_by_pass_rate=_drop_rates(judged, lambda slot: passed.get(slot.prompt, "unscored")),
        refilled=run.ledger.refilled,
        helped={name: sorted(prompts) for name, prompts in run.ledger.helped.items()},
        scored_by_stage={stage: count for stage, count, _ in by_stage},
        reward_by_stage={stage: mean for stage, _, mean in by_stage},
    )


def _whole(figure: float | None) -> int | None:
    return None if figure is None else round(figure)


def _mean_staleness(lineage: Lineage, base: int, tokens: Mapping[int, int]) -> float:
    """Over the tokens, by the version that sampled each."""
    lags = [
        (count, lineage.versions[base].ordinal - lineage.versions[number].ordinal)
        for number, count in tokens.items()
    ]
    return sum(count * lag for count, lag in lags) / max(sum(tokens.values()), 1)


def _stage_rewards(slots: Iterable[Slot], trajectories: Trajectories) -> Iterator[dict[str, float]]:
    for slot in slots:
        trajectory = trajectories.get(slot.key)
        if trajectory is not None and trajectory.stage_rewards is not None:
            yield trajectory.stage_rewards


def _length_bucket(tokens: int) -> str:
    """Powers of two: "0", "1", "2-3", "4-7", …"""
    if tokens < 2:
        return str(tokens)
    low = 1 << (tokens.bit_length() - 1)
    return f"{low}-{2 * low - 1}"


def _pass_rates(slots: Iterable[Slot]) -> dict[int, str]:
    rewards: dict[int, list[float]] = {}
    for slot in slots:
        if slot.state == ACCUMULATED:
            rewards.setdefault(slot.prompt, []).append(slot.reward)
    return {
        prompt: f"{round(4 * sum(r > 0 for r in rs) / len(rs)) / 4:.2f}" for prompt, rs in rewards.items()
    }


def _drop_rates(slots: Iterable[Slot], bucket: Callable[[Slot], str]) -> dict[str, float]:
    """Share of failures by bucket; a group that the algorithm filtered is no failure."""
    total: dict[str, int] = {}
    dropped: dict[str, int] = {}
    for slot in slots:
        name = bucket(slot)
        total[name] = total.get(name, 0) + 1
        if slot.state == DROPPED and slot.reason != FILTERED:
            dropped[name] = dropped.get(name, 0) + 1
    return {name: dropped.get(name, 0) / count for name, count in sorted(total.items())}


def step_view(
    context: RunContext,
    certificate: ev.Certificate,
    response: trainer.CommitStepResponse,
    slots: list[Slot],
    timer: StepTimer,
    trajectories: Trajectories,
) -> StepView:
    """The step as people see it."""
    trained = [slot for slot in slots if slot.state == ACCUMULATED]
    is_baseline = context.workers.leader.is_baseline
    sampled = [slot.reward for slot in trained if not is_baseline(slot.sample)]
    filtered = sum(slot.reason == FILTERED for slot in slots)
    # Where nobody judged an answer, every reward is the spec's own failed_reward.
    unjudged = (
        REWARD_FIGURES
        if not context.spec.has_scorers or 0 < len(trained) + filtered <= timer.figures.get(UNJUDGED, 0.0)
        else ()
    )
    wall, stages, generate_open = timer.wall, timer.stages(), timer.open("generate")
    if (
        context.spec.algorithm.max_staleness and "generate" in stages
    ):  # Streams of work are open all the time.
        stages["generate"] = generate_open = timer.worked("generate")
    return StepView(
        step=certificate.ordinal,
        version=certificate.number,
        wall_s=wall,
        reward_mean=fmean(sampled) if sampled and not unjudged else None,
        tokens=certificate.tokens,
        tokens_per_s=certificate.tokens / wall if wall > 0 else None,
        stage_s=stages,
        devices=timer.devices(),
        trained=len(trained),
        dropped=count_drops(certificate.dropped),
        filtered=filtered,
        refilled=certificate.refilled,
        max_staleness=certificate.max_staleness if certificate.tokens_by_version else None,
        figures={
            **{name: value for name, value in response.figures.items() if name not in unjudged},
            **weight_figures(context.workers.rollouts),
            **timer.figures,
            **draft_figures(timer.figures),
            **agent_figures(trained, trajectories),
            **episode_figures(trained, trajectories),
            **({GENERATE_OPEN: generate_open} if "generate" in stages else {}),
            **(online.figures() if (online := context.fleet.online.get(context.run_id)) else {}),
        },
    )


def draft_figures(told: Mapping[str, float]) -> dict[str, float]:
    """The share of drafted tokens that were accepted; nothing where none was drafted."""
    drafted = told.get("drafted_tokens", 0.0)
    return {"draft_acceptance": told.get("accepted_tokens", 0.0) / drafted} if drafted else {}


def episode_figures(slots: Iterable[Slot], trajectories: Trajectories) -> dict[str, float]:
    """Shares of trained episodes: that succeeded, of those whose environment says so, and that it cut before the
    run's limit, as a world model does where it does not know the way; nothing of what is not known.
    """
    records = [each for slot in slots if (each := trajectories.get(slot.key)) is not None]
    said = {
        "success_rate": [each.success for each in records if each.success is not None],
        "cut_early": [each.cut_early for each in records if each.cut_early is not None],
    }
    return {name: fmean(values) for name, values in said.items() if values}


def agent_figures(slots: Iterable[Slot], trajectories: Trajectories) -> dict[str, float]:
    """The means of what agents said of trained trajectories, each over those that said it."""
    said: dict[str, list[float]] = {}
    for slot in slots:
        for name, value in trajectories[slot.key].figures.items() if slot.key in trajectories else ():
            said.setdefault(f"agent_{name}", []).append(value)
    return {name: fmean(values) for name, values in sorted(said.items())}


def settled_lines(
    context: RunContext, certificate: ev.Certificate, slots: list[Slot], trajectories: Trajectories
) -> list[SettledTrajectory]:
    """The step's trained trajectories as text, up to the number that is kept of a step."""
    found = [
        (slot, trajectory, trajectory.shown)
        for slot in slots
        if slot.state == ACCUMULATED and (trajectory := trajectories.get(slot.key)) and trajectory.shown
    ]
    kept = whole_groups(found, context.spec.tracking.trajectories_per_step, lambda each: each[0].prompt)
    items = {prompt: context.item(prompt) for prompt in {slot.prompt for slot, _, _ in kept}}
    form = context.spec.tool_calls
    return [
        SettledTrajectory(
            step=certificate.ordinal,
            version=certificate.parent,
            prompt_ordinal=slot.prompt,
            sample_index=slot.sample,
            attempt=slot.attempt,
            prompt=items[slot.prompt].question,
            completion=shown.completion,
            reference=items[slot.prompt].answer,
            reward=slot.reward,
            parts=shown.parts,
            stage_rewards=trajectory.stage_rewards or {},
            finish_reason=common.FinishReason.Name(shown.finish_reason).removeprefix("FINISH_REASON_"),  # type: ignore[arg-type]
            tokens=slot.tokens,
            versions=list(trajectory.versions),
            log_probs=[round(value, 4) for value in shown.log_probs],
            new_log_probs=[round(value, 4) for value in shown.new_log_probs],
            text_bytes=shown.text_bytes.tolist(),
            advantage=shown.advantage,
            messages=told(form, shown.said, trajectory.turn_rewards),
            masked=carries_no_loss(context, slot.sample, shown.finish_reason),
            figures=trajectory.figures,
            read=shown.read,
        )
        for slot, trajectory, shown in kept
    ]
