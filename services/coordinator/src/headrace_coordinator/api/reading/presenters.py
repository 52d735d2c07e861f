"""Presenters: runs, steps, certificates and events as views."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from headrace_schema.resources.evaluations import (
    EvaluationRunView,
    EvaluationView,
    SuiteEvaluationView,
)
from headrace_schema.resources.overviews import FlowView, RunSummaryView, columns_of
from headrace_schema.resources.views import (
    CertificateView,
    CountsView,
    EventView,
    PolicyView,
    RunPlanView,
    RunView,
    StepView,
    UploadsView,
)
from headrace_schema.sections.running import PlacementSection

from headrace_coordinator.domain import events as ev
from headrace_coordinator.domain.devices.leases import is_gpu
from headrace_coordinator.domain.devices.placement import first_mode, placement_of
from headrace_coordinator.domain.devices.scheduling import Gift
from headrace_coordinator.domain.ledger.compact import expand, expand_drops
from headrace_coordinator.domain.ledger.slot_index import (
    ACCUMULATED,
    ASSIGNED,
    DROPPED,
    FINISHED,
    PENDING,
    SETTLED,
)
from headrace_coordinator.domain.runs import STALLED, RunState, SuiteEvaluation
from headrace_coordinator.store.run_files import Item

LISTS_OF_SLOTS = ("trained", "dropped")


def run_view(
    run: RunState, waiting_for: list[str], place: int | None = None, gift: Gift | None = None
) -> RunView:
    """One run, from its running figures; `gift`: the smaller trainer group that it goes on with after this step."""
    totals, base, asked = run.totals, run.lineage.base, run.evaluation
    return RunView.of(
        run,
        name=f"runs/{run.id}",
        place=place,
        step=run.ledger.step if asked is None else asked.answers,
        steps=run.steps_total if asked is None else asked.total,
        ranks=run.ranks if asked is None else 0,
        wanted_ranks=run.wanted_ranks or (gift.ranks if gift else 0),
        ranks_reason=gift.reason if gift else run.ranks_reason,
        started_at=run.started_at or None,
        finished_at=run.finished_at or None,
        waiting_for=waiting_for,
        warnings=list(run.warnings.values()),
        stalled=STALLED in run.warnings,
        engine_restarts=totals.engine_restarts,
        policy=PolicyView.of(base) if base else None,
        baseline_prefill=EvaluationView.from_json(totals.baseline) if totals.baseline else None,
        evaluations=[EvaluationView.from_json(view) for view in totals.evaluations],
        last_step=StepView.from_json(totals.last_step) if totals.last_step else None,
        counts=CountsView.of(
            totals.tally,
            max_staleness=totals.tally.max_staleness if totals.tally.trained else None,
            frontier=run.ledger.frontier,
        ),
        run_directory=run.directory,
        forked_from=(run.spec.get("from_checkpoint") or {}).get("run", ""),
        first_step=run.ledger.first_step,
        pipeline=[*run.follows, run.id] if run.follows else [],
        uploads=_uploads_view(run) if run.spec.get("store") else None,
        suite=None if asked is None else suite_view(asked, run.dataset_digest),
        plan=plan_view(run) if asked is None else None,
    )


def _uploads_view(run: RunState) -> UploadsView:
    known = run.uploads
    behind = max(0, known.saved - known.step)
    return UploadsView.of(known, behind_steps=behind, size_bytes=known.size)


def run_summary_view(
    run: RunView, rewards: list[float | None], columns: Sequence[str] = ()
) -> RunSummaryView:
    """A run in short, with a sparkline of mean rewards, and its values of `columns`."""
    scores = [view.score for view in run.evaluations if view.kind == "heldout"]
    others = {key: value for key, value in run.spec.items() if key != "seed"}
    return RunSummaryView.of(
        run,
        reward_mean=finite(run.last_step.reward_mean) if run.last_step else None,
        score=finite(scores[-1]) if scores else None,
        rewards=rewards,
        algorithm=run.spec.get("algorithm", {}).get("name", ""),
        seed=run.spec.get("seed", 0),
        values=columns_of(run, columns) if columns else {},
        family=hashlib.sha256(json.dumps(others, sort_keys=True).encode()).hexdigest()[:12],
    )


def plan_view(run: RunState) -> RunPlanView:
    """How a run uses its devices."""
    plan, placement, last = run.plan, run.spec["placement"], run.totals.last_step
    mode, ahead = placement["mode"], bool(run.spec["algorithm"].get("max_staleness"))
    gpus = any(map(is_gpu, run.grant.devices if run.grant else ()))
    now = placement_of(PlacementSection.model_validate(placement), run.plan, ahead=ahead, gpus=gpus)
    measured = {} if last is None else {**last["stage_s"], "step": last["wall_s"]}
    return RunPlanView(
        mode=now.section.mode,
        flow="" if now.turns else "pipelined" if now.streams else "sequential",
        memory="" if not now.rollouts_wait else "resident" if now.resident else "offloaded",
        chosen_by="auto" if mode == "auto" else "spec",
        from_step=plan.from_step + 1 if plan else 1,
        rollout=plan.rollout if plan else placement["rollout"],
        trainer=plan.trainer if plan else placement["trainer"],
        reason=plan.reason if plan else _before_any_plan(run.spec),
        predicted_s=plan.predicted_s if plan else {},
        measured_s={name: measured[name] for name in ("generate", "learn", "step") if name in measured},
        alternatives=plan.alternatives if plan else {},
        proposal=run.proposal,
    )


def _before_any_plan(spec: Mapping[str, Any]) -> str:
    """Why a run's devices are used as they are before a step has said anything."""
    placement = PlacementSection.model_validate(spec["placement"])
    if placement.mode != "auto":
        return f"placement.mode: {placement.mode}" + (", placement.share" if placement.share else "")
    if spec["trainer"].get("helpers"):
        return "collocated: helpers take turns on the rollouts' devices"
    ahead = bool(spec["algorithm"].get("max_staleness"))
    first = first_mode(ahead=ahead)
    if placement.measured_steps(spec["steps"]):
        second = "" if ahead else ", then disaggregated"
        return f"the first steps measure {first}{second}, then what promises more"
    if placement.measure_steps == 0:
        return f"{first}: placement.measure_steps is 0"
    return (
        f"{first}: measuring other placements is not worth it in {spec['steps']} steps; "
        "set placement.measure_steps to measure nevertheless"
    )


def suite_view(evaluation: SuiteEvaluation, data_digest: str) -> SuiteEvaluationView:
    """What an evaluation asks and has found."""
    return SuiteEvaluationView.of(
        evaluation,
        suite=evaluation.spec["suite"]["name"],
        weights_digest=evaluation.digest,
        data_digest=data_digest,
        samples=evaluation.spec["samples"],
        answers_total=evaluation.total,
    )


def evaluation_run_view(run: RunView) -> EvaluationRunView:
    """A run that evaluates, as an evaluation."""
    assert run.suite is not None
    return EvaluationRunView.of(run, **dict(run.suite) | {"name": f"evaluations/{run.id}"})


def certificate_view(certificate: ev.Certificate, live: bool) -> CertificateView:
    """One certificate, its slots in full."""
    fields = msgspec.structs.asdict(certificate)
    for name in ("number", "parent", "ordinal", "digest"):
        del fields[name]
    fields["step"] += 1
    fields["trained"] = trained = expand(certificate.trained)
    # No version sampled what is trained: the data gave it.
    fields["given"] = len(trained) if certificate.tokens and not certificate.tokens_by_version else 0
    fields["dropped"] = expand_drops(certificate.dropped)
    if not certificate.tokens_by_version:
        fields["max_staleness"] = fields["mean_staleness"] = None
    # Not validated: a hundred thousand slots that were validated when they were read.
    return CertificateView.model_construct(version=PolicyView.of(certificate), live=live, **fields)


COUNTED_FROM_0 = (
    ev.StepOpened,
    ev.GroupsAccumulated,
    ev.GroupDropped,
    ev.StepSkipped,
    ev.StepAborted,
    ev.TrainersChanged,
)
"""Events whose `step` is the index of a batch. People count from 1, as `step 3 of 50` does."""


def event_view(item: Item) -> EventView:
    """One event of a run's stream, steps counted from 1, with every slot of it by itself.

    Runs of slots are how files are kept small.
    """
    sequence, event = item
    data = msgspec.to_builtins(event)
    for name in ("type", "at", "run"):
        data.pop(name, None)
    if isinstance(event, COUNTED_FROM_0):
        data["step"] += 1
    if isinstance(event, ev.PlanAdopted):
        data["from_step"] = event.from_step + 1
    if isinstance(event, ev.StepSkipped):
        data["dropped"] = expand_drops(event.dropped)
    elif isinstance(event, ev.StepCommitted):
        data["certificate"]["step"] += 1
        data["certificate"]["trained"] = list(expand(event.certificate.trained))
        data["certificate"]["dropped"] = expand_drops(event.certificate.dropped)
    assert isinstance(event, ev.RunEvent)
    return EventView(id=sequence, type=_snake(type(event).__name__), time=event.at, run=event.run, data=data)


def brief_event_view(number: int, event: ev.Event) -> EventView:
    """An event with the number of slots in place of each list of them."""
    view = event_view((number, event))
    for part in (view.data, view.data.get("certificate", {})):
        for name in LISTS_OF_SLOTS:
            if isinstance(part.get(name), list):
                part[name] = len(part[name])
    return view


def _snake(name: str) -> str:
    return "".join(f"_{c.lower()}" if c.isupper() else c for c in name).lstrip("_")


def flow_view(run: RunState | None, names: Mapping[str, str]) -> FlowView:
    """Where the slots of the step that is learned stand; `names`: instances by incarnation. None: no step is open."""
    ledger = run.ledger if run is not None and run.ledger.open else None
    slots = ledger.step_slots if ledger is not None else []
    found = Counter(slot.state for slot in slots)
    holders = Counter(names.get(slot.holder, slot.holder) for slot in slots if slot.state == ASSIGNED)
    return FlowView(
        step=ledger.step + 1 if ledger is not None else 0,
        slots=len(slots),
        waiting=found[PENDING],
        generating=found[ASSIGNED],
        scoring=found[FINISHED],
        scored=found[SETTLED],
        learned=found[ACCUMULATED],
        dropped=found[DROPPED],
        holders=dict(sorted(holders.items())),
    )


def finite(value: float | None) -> float | None:
    """The figure, or None for NaN and infinity, which JSON does not have."""
    return value if value is not None and value - value == 0 else None
