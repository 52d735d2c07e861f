"""State and history as views."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
from headrace_schema.views import (
    CertificateView,
    CountsView,
    DeviceView,
    EvaluationView,
    EventView,
    InstanceView,
    LeaseView,
    PolicyView,
    RunView,
    StepView,
)

from headrace_coordinator.audit import Audit, live_steps
from headrace_coordinator.domain import events as ev
from headrace_coordinator.domain.leases import LeaseTable
from headrace_coordinator.domain.runs import RunState
from headrace_coordinator.fleet import Fleet
from headrace_coordinator.kernel import HistoryItem


def run_view(
    run: RunState, history: list[HistoryItem], waiting_for: list[str], counts: Audit, place: int | None
) -> RunView:
    """One run."""
    last = next((s for s in reversed(live_steps(history)) if isinstance(s, ev.StepCommitted)), None)
    evaluations = evaluation_views(history)
    base = run.lineage.base
    return RunView(
        name=f"runs/{run.id}",
        id=run.id,
        state=run.state,
        reason=run.reason,
        intent=run.intent,
        priority=run.priority,
        place=place,
        step=run.ledger.step,
        steps=run.steps_total,
        created_at=run.created_at,
        started_at=run.started_at or None,
        finished_at=run.finished_at or None,
        waiting_for=waiting_for,
        policy=PolicyView(number=base.number, parent=base.parent, ordinal=base.ordinal, digest=base.digest)
        if base
        else None,
        warmup_steps=run.warmup_steps,
        baseline_prefill=next((e for e in evaluations if e.kind == "baseline_prefill"), None),
        evaluations=[e for e in evaluations if e.kind == "heldout"],
        last_step=StepView.model_validate(last.view) if last else None,
        counts=CountsView(
            trained=counts.trained,
            dropped=counts.dropped,
            duplicates=counts.duplicates,
            max_staleness=counts.max_staleness,
            frontier=counts.frontier,
        ),
        recoveries=run.recoveries,
        run_directory=run.directory,
        export_path=run.export_path,
        spec=run.spec,
    )


def step_views(history: Iterable[HistoryItem]) -> list[StepView]:
    """Committed steps of the live lineage."""
    return [StepView.model_validate(s.view) for s in live_steps(history) if isinstance(s, ev.StepCommitted)]


def evaluation_views(history: Iterable[HistoryItem]) -> list[EvaluationView]:
    """Evaluations of the live lineage, oldest first; a repeated one replaces the first."""
    found: dict[tuple[str, int], EvaluationView] = {}
    for _, event in history:
        if isinstance(event, ev.VersionRestored):
            found = {key: view for key, view in found.items() if key[1] <= event.ordinal}
        elif isinstance(event, ev.Evaluated):
            view = EvaluationView.model_validate(event.view)
            found[view.kind, view.step] = view
    return list(found.values())


def certificate_views(run: RunState, history: Iterable[HistoryItem]) -> list[CertificateView]:
    """All certificates, oldest first."""
    views = []
    for _, event in history:
        if isinstance(event, ev.StepCommitted):
            certificate = event.certificate
            fields = msgspec.structs.asdict(certificate)
            policy = {name: fields.pop(name) for name in ("number", "parent", "ordinal", "digest")}
            version = run.lineage.versions.get(certificate.number)
            views.append(
                CertificateView(version=PolicyView(**policy), live=bool(version and version.live), **fields)
            )
    return views


def event_view(item: HistoryItem) -> EventView:
    """One event of a run's stream."""
    sequence, event = item
    data = msgspec.to_builtins(event)
    for name in ("type", "at", "run"):
        data.pop(name, None)
    assert isinstance(event, ev.RunEvent)
    return EventView(id=sequence, type=_snake(type(event).__name__), time=event.at, run=event.run, data=data)


def _snake(name: str) -> str:
    return "".join(f"_{c.lower()}" if c.isupper() else c for c in name).lstrip("_")


def instance_views(fleet: Fleet) -> list[InstanceView]:
    """All registered instances."""
    views = []
    for state in sorted(fleet.kernel.state.instances.values(), key=lambda i: i.instance):
        session = fleet.sessions.get(state.incarnation)
        silent_s = fleet.silent_for(state.incarnation)
        views.append(
            InstanceView(
                name=state.instance,
                incarnation=state.incarnation,
                kind=state.kind,
                state="SILENT" if silent_s else "READY" if session else "LOST",
                host=state.host,
                address=state.address,
                devices=state.devices,
                capabilities=state.capabilities,
                run=fleet.run_of(state.incarnation),
                resident_memory_bytes=session.resident_memory_bytes if session else 0,
                last_heartbeat_age_s=fleet.kernel.monotonic() - session.heard_at if session else -1.0,
                silent_for_s=silent_s,
            )
        )
    return views


def lease_views(fleet: Fleet) -> list[LeaseView]:
    """All leases."""
    state = fleet.kernel.state
    return [
        LeaseView(
            epoch=lease.epoch,
            state=lease.state,
            instance=fleet.readable(lease.incarnation),
            run=lease.run,
            stage=lease.stage,
            devices=lease.devices,
            expires_in_s=fleet.desk.expires_in(lease.epoch),
        )
        for lease in state.table.leases.values()
    ]


def device_views(fleet: Fleet) -> list[DeviceView]:
    """All devices that any instance may be given."""
    table = fleet.kernel.state.table
    names = {device for i in fleet.kernel.state.instances.values() for device in i.devices} | set(
        table.quarantined
    )
    return [_device(fleet, table, name) for name in sorted(names)]


def _device(fleet: Fleet, table: LeaseTable, name: str) -> DeviceView:
    if quarantine := table.quarantined.get(name):
        return DeviceView(
            name=name, state="QUARANTINED", holder=quarantine.incarnation, reason=quarantine.reason
        )
    if lease := table.holder_of(name):
        return DeviceView(
            name=name,
            state="LEASED",
            holder=fleet.readable(lease.incarnation),
            reason=f"{lease.run} {lease.stage}",
        )
    return DeviceView(name=name, state="FREE", holder="", reason="")
