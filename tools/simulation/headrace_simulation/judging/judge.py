"""The guarantees of one run, checked at the end of a world: certificates against weights, slots, versions."""

from __future__ import annotations

from collections.abc import Sequence

from headrace_coordinator.domain import events as ev
from headrace_coordinator.domain import run_states, runs
from headrace_coordinator.domain.ledger.slot_index import FILTERED
from headrace_coordinator.domain.totals import Tally, step_dropped, step_index, step_refilled, step_trained
from headrace_coordinator.store.run_files import Item

from headrace_simulation.fleet.disk import StoredCheckpoint, Weights
from headrace_simulation.fleet.reward import all_equal
from headrace_simulation.judging.audit import Step, audit, live_steps

REPLACED = (FILTERED, "GROUP_INCOMPLETE", "PROMPT_TOO_LONG")
"""Why groups are dropped before they settle: the trainer drops others, which are not replaced."""


class Violation(AssertionError):
    """A guarantee does not hold; the message names it."""


def judge(
    run: runs.RunState,
    history: Sequence[Item],
    weights: Weights | None,
    origin: StoredCheckpoint | None = None,
) -> Tally:
    """The run's counts; raises `Violation` when a guarantee does not hold. `origin`: what a fork began with."""
    counts = audit(run, history)
    if counts.duplicates or counts.missing:
        raise Violation(f"G1: {counts.duplicates} slots terminal twice, {counts.missing} never")
    _check_staleness(run, history)
    if run.totals.tally != counts:
        raise Violation(f"G6: the run shows {run.totals.tally}, its history says {counts}")
    if run.lineage.head and not (weights is None and _ended_unsaved(run)):
        _check_weights(history, weights, origin)
    _check_membership(run, history)
    _check_versions(run, history)
    return counts


def _ended_unsaved(run: runs.RunState) -> bool:
    """Whether the run was cancelled or failed with a head that was never saved: its trainer alone had it."""
    return run.state in (run_states.CANCELLED, run_states.FAILED) and run.last_checkpoint != run.lineage.head


def _check_weights(history: Sequence[Item], weights: Weights | None, origin: StoredCheckpoint | None) -> None:
    """The final weights hold exactly what the live certificates say, in step order, behind a fork's origin."""
    certified = [
        (prompt, sample)
        for step in live_steps(history)
        if isinstance(step, ev.StepCommitted)
        for prompt, sample, _ in sorted(step_trained(step))
    ]
    expected = [*(origin.weights if origin else ()), *certified]
    if weights is None or list(weights) != expected:
        raise Violation(f"G1: the weights hold {weights}, the certificates say {expected}")


def _check_membership(run: runs.RunState, history: Sequence[Item]) -> None:
    """Each step holds the slots that follow the last one's, whichever answers came first; steps follow each other."""
    steps, (end, slots_per_step, group_size) = live_steps(history), run.ledger.shape
    for step in steps:
        slots = (*step_trained(step), *step_dropped(step))
        ordinals = sorted(run.ledger.ordinal(prompt, sample) for prompt, sample, _ in slots)
        first, end = end, end + slots_per_step + step_refilled(step) * group_size
        if ordinals != list(range(first, end)):
            raise Violation(f"G5: step {step_index(step)} holds other slots than its own: {ordinals}")
        _check_refill(run, step)
    indices = [step_index(step) for step in steps]
    if indices != list(range(run.ledger.first_step, run.ledger.step)):
        raise Violation(f"G5: steps {indices} of {run.ledger.first_step} to {run.ledger.step}")


def _check_refill(run: runs.RunState, step: Step) -> None:
    """Checks the groups that a step keeps and takes in addition against what became of each group."""
    options = run.spec["algorithm"]["options"]
    filtered = {prompt for prompt, _, reason in step_dropped(step) if reason == FILTERED}
    kept = {prompt for prompt, _, _ in step_trained(step)}
    if wrong := [prompt for prompt in filtered if not (options.get("drop_equal") and all_equal(prompt))]:
        raise Violation(f"refill: step {step_index(step)} drops groups {wrong} as FILTERED")
    if wrong := [prompt for prompt in kept if options.get("drop_equal") and all_equal(prompt)]:
        raise Violation(f"refill: step {step_index(step)} keeps groups {wrong}, whose rewards are equal")
    replaced = {prompt for prompt, _, reason in step_dropped(step) if reason in REPLACED}
    limit = options.get("max_refill", 0) * run.ledger.prompts_per_step
    if step_refilled(step) != min(len(replaced), limit):
        raise Violation(
            f"refill: step {step_index(step)} takes {step_refilled(step)} groups in place of {len(replaced)}, "
            f"at most {limit}"
        )


def _check_staleness(run: runs.RunState, history: Sequence[Item]) -> None:
    """Every token was sampled by its step's base, or by an ancestor that is at most max_staleness older."""
    most = run.spec["algorithm"].get("max_staleness", 0)
    made: dict[int, tuple[int, int]] = {}  # number -> (parent, ordinal)
    for _, event in history:
        if isinstance(event, ev.VersionRestored):
            made[event.number] = (event.parent, event.ordinal)
        if not isinstance(event, ev.StepCommitted):
            continue
        certificate = event.certificate
        number, lags = certificate.parent, dict[int, int]()
        while number in made and certificate.ordinal - 1 - made[number][1] <= most:
            lags[number] = certificate.ordinal - 1 - made[number][1]
            number = made[number][0]
        made[certificate.number] = (certificate.parent, certificate.ordinal)
        tokens = certificate.tokens_by_version
        if strange := tokens.keys() - lags.keys():
            raise Violation(f"G3: step {certificate.step} trains tokens of {strange}, its base allows {lags}")
        worst = max(lags[number] for number in tokens)
        mean = sum(lags[number] * count for number, count in tokens.items()) / sum(tokens.values())
        if (worst, mean) != (certificate.max_staleness, certificate.mean_staleness):
            raise Violation(f"G3: step {certificate.step} says other staleness than {worst}, {mean}")


def _check_versions(run: runs.RunState, history: Sequence[Item]) -> None:
    numbers = [
        event.certificate.number if isinstance(event, ev.StepCommitted) else event.number
        for _, event in history
        if isinstance(event, ev.StepCommitted | ev.VersionRestored)
    ]
    if numbers != sorted(set(numbers)):
        raise Violation(f"G2: version numbers {numbers} do not only rise")
    chain = [run.lineage.versions[number] for number in run.lineage.chain(run.lineage.head)]
    if not all(version.live for version in chain):
        raise Violation("G2: the head has an abandoned ancestor")
