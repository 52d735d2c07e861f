"""Events of versions and steps, and a ledger of one open step, for tests of the pure rules."""

from headrace_coordinator.domain import events as ev
from headrace_coordinator.domain.ledger.compact import compact_drops
from headrace_coordinator.domain.ledger.dispatch import (
    plan_assign,
)
from headrace_coordinator.domain.ledger.slots import SlotLedger
from headrace_coordinator.domain.ledger.versions import Lineage
from headrace_coordinator.domain.runs import RunState


def restored(number, parent=0, ordinal=0, frontier=0):
    return ev.VersionRestored(
        at=0,
        run="r",
        number=number,
        parent=parent,
        ordinal=ordinal,
        digest=f"d{number}",
        checkpoint="",
        frontier_step=frontier,
    )


def certificate(number, parent, ordinal, step, trained=(), dropped=()):
    drops = dropped if isinstance(dropped, dict) else compact_drops(dropped)
    return ev.Certificate(
        number=number, parent=parent, ordinal=ordinal, digest=f"d{number}", step=step, attempt=1,
        trained=list(trained), dropped=drops, set_digest="", tokens=0, tokens_by_version={}, max_staleness=0,
        log_prob_mismatch_mean=0.0, drop_rate_by_length={}, drop_rate_by_pass_rate={},
    )  # fmt: skip


def committed(*args, **kwargs):
    return ev.StepCommitted(at=0, run="r", certificate=certificate(*args, **kwargs), view={})


def opened(step, attempt, number=9):
    return ev.StepOpened(at=0, run="r", step=step, attempt=attempt, base=1, number=number)


def open_ledger(groups=2, size=2):
    ledger = SlotLedger(size, groups)
    ledger.apply(opened(0, 1))
    return ledger


def assign(ledger, slots, holder="x"):
    ledger.apply(plan_assign(ledger, "r", slots, holder))


# --- run life, audit, snapshot, timer


def run_state(**fields):
    return RunState("r", {}, "", SlotLedger(2, 2), Lineage(), 0.0, **fields)
