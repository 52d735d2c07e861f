"""How many lives of trajectories a step's trace shows: what they cost stays a hundredth of the step."""

from types import SimpleNamespace

import pytest
from headrace_coordinator.projections import spans
from headrace_coordinator.projections.spans import MOST_SPANS, TrajectorySpans


@pytest.mark.parametrize(("seconds", "shown"), [(0.1, 6), (2.0, 101), (60.0, MOST_SPANS)])
def test_the_longest_lives_are_shown_as_far_as_the_steps_time_allows(monkeypatch, seconds, shown):
    found = []
    monkeypatch.setattr(spans, "record", lambda name, start, end, times, **more: found.append((start, more)))
    watching = TrajectorySpans()
    for prompt in range(100):
        watching._learned["r"][prompt] = seconds
        for sample in range(4):
            begun = seconds * (prompt * 4 + sample) / 400
            watching._runs["r"][prompt][sample] = spans._Life("rollout-0", begun, tokens=3)
    watching._record(SimpleNamespace(run="r", at=seconds))
    assert len(found) == shown and [start for start, _ in found] == sorted(start for start, _ in found)
    assert found[0][1] == {"slot": "0/0", "tokens": 3, "holder": "rollout-0"}
    assert not watching._learned and not any(watching._runs["r"].values())


def test_a_step_without_any_life_has_none(monkeypatch):
    monkeypatch.setattr(spans, "record", lambda *given, **more: pytest.fail("there is none"))
    TrajectorySpans()._record(SimpleNamespace(run="r", at=1.0))
