"""Audits a run from outside: certificates and events are all it looks at, and no counter is believed."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from headrace.client import Certificate, Event, Run

from harness.fleet import Fleet

DIGEST = re.compile(r"[0-9a-f]{32}")
Slot = tuple[int, int]


@dataclass(frozen=True)
class Audit:
    """What came of a run's slots. `rewinds` are restores after the first."""

    trained: set[Slot]
    dropped: dict[Slot, str]
    live: Sequence[Certificate]
    abandoned: Sequence[Certificate]
    rewinds: int


def audit(fleet: Fleet, run: Run) -> Audit:
    """Checks what every run promises, at any moment: G1, G2, G3. Fails the test that finds it broken."""
    certificates, events = fleet.client.certificates(run.id), fleet.events(run)
    live = [item for item in certificates if item.live]
    found = Audit(
        trained={(prompt, sample) for item in live for prompt, sample, _ in item.trained},
        dropped=_dropped(live, events),
        live=live,
        abandoned=[item for item in certificates if not item.live],
        rewinds=sum(event.type == "version_restored" for event in events) - 1,
    )
    _check_slots(run, found)
    _check_versions(certificates, live, events, run.first_step)
    ordinals = {item.version.number: item.version.ordinal for item in certificates}
    ordinals |= {e.data["number"]: e.data["ordinal"] for e in events if e.type == "version_restored"}
    for item in live:
        _check_certificate(item, run.spec["algorithm"]["max_staleness"], ordinals)
    assert len({item.set_digest for item in certificates}) == len(certificates)
    return found


def _dropped(live: Iterable[Certificate], events: Iterable[Event]) -> dict[Slot, str]:
    dropped = [(prompt, sample, reason) for item in live for prompt, sample, reason in item.dropped]
    skipped: dict[int, list[tuple[int, int, str]]] = {}
    for event in events:
        if event.type == "step_skipped":
            skipped[event.data["step"]] = event.data["dropped"]
        elif event.type == "version_restored":
            skipped = {step: slots for step, slots in skipped.items() if step <= event.data["frontier_step"]}
    every = [*dropped, *(slot for slots in skipped.values() for slot in slots)]
    found = {(prompt, sample): reason for prompt, sample, reason in every}
    assert len(found) == len(every), "a slot was dropped twice"
    return found


def _check_slots(run: Run, found: Audit) -> None:
    """G1: below the frontier each slot is terminal exactly once; a fork's begin with its first step."""
    times = Counter((prompt, sample) for item in found.live for prompt, sample, _ in item.trained)
    assert max(times.values(), default=0) <= 1, f"trained twice: {[s for s, n in times.items() if n > 1]}"
    assert not found.trained & found.dropped.keys(), "a slot was trained and dropped"
    samples = run.spec["algorithm"]["group_size"]
    groups = [step * run.spec["algorithm"]["prompts_per_step"] for step in (run.first_step, run.step)]
    groups[1] += sum(item.refilled for item in found.live)
    expected = {(prompt, sample) for prompt in range(*groups) for sample in range(samples)}
    terminal = found.trained | found.dropped.keys()
    assert terminal == expected, f"lost: {expected - terminal}; beyond the frontier: {terminal - expected}"
    counts = run.counts
    shown = (counts.trained, counts.dropped, counts.duplicates, counts.frontier)
    assert shown == (len(found.trained), len(found.dropped), 0, groups[1] * samples)


def _check_versions(
    every: Sequence[Certificate], live: Sequence[Certificate], events: Sequence[Event], first_step: int
) -> None:
    """G2: numbers only rise and are never used twice; the live versions form one chain by parent."""
    restored = {e.data["number"]: e.data["parent"] for e in events if e.type == "version_restored"}
    made = [item.version.number for item in every]
    assert made == sorted(set(made)) and not restored.keys() & set(made)
    ordinals = [item.version.ordinal for item in live]
    assert ordinals == [first_step + 1 + number for number in range(len(live))]
    parents = {item.version.number: item.version.parent for item in every} | restored
    chain, number = [], live[-1].version.number if live else 0
    while number:
        chain.append(number)
        assert parents[number] < number
        number = parents[number]
    assert {item.version.number for item in live} <= set(chain), "live versions are not one chain"


def _check_certificate(item: Certificate, most: int, ordinals: Mapping[int, int]) -> None:
    """G3: everything was sampled by versions that are at most so much older than what the update was made from."""
    base = ordinals[item.version.parent]
    if item.given:
        assert item.given == len(item.trained) and not item.tokens_by_version and item.tokens > 0
        return
    assert item.max_staleness is not None and item.mean_staleness is not None
    lags = {base - ordinals[int(number)]: count for number, count in item.tokens_by_version.items()}
    assert min(lags) >= 0 and max(lags) == item.max_staleness <= most
    mean = sum(lag * count for lag, count in lags.items()) / item.tokens
    assert abs(mean - item.mean_staleness) < 1e-9
    assert sum(item.tokens_by_version.values()) == item.tokens > 0
    assert DIGEST.fullmatch(item.set_digest) and DIGEST.fullmatch(item.version.digest)
