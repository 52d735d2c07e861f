"""The step's rules: what is a retry, what a conflict, what may follow what."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from headrace_trainer.errors import Refusal
from headrace_trainer.learning import step as steps
from headrace_trainer.learning.samples import Disposition, GroupRecord

BEGIN = steps.Begin(step=0, attempt=1, base_number=1, next_number=2)
COMMIT = steps.Commit(0, 1, 1, 2, "set", "manifest")


def idle() -> steps.StepState:
    return steps.restored(steps.StepState(), steps.Version(1, 0, 0, "a"), {})


def accumulating(state: steps.StepState | None = None) -> steps.StepState:
    opened, fresh = steps.begin(state or idle(), BEGIN)
    assert fresh
    return steps.learned(opened, record(0))


def committed() -> steps.StepState:
    state = accumulating()
    steps.check_commit(state, COMMIT)
    return steps.committed(state, COMMIT, replace(steps.totals(state), version=steps.Version(2, 1, 1, "b")))


def record(prompt: int, digest: str = "d") -> GroupRecord:
    return GroupRecord(
        prompt, digest, ((prompt, 0, 1, "x"),), Disposition.ACCUMULATED,
        sequences=2, trained_sequences=2, tokens=7, tokens_by_version=Counter({1: 7}), rewards=(0.0, 1.0),
    )  # fmt: skip


def reason(call, *arguments) -> str:
    with pytest.raises(Refusal) as caught:
        call(*arguments)
    return caught.value.reason


def test_nothing_begins_before_a_restore():
    assert reason(steps.begin, steps.StepState(), BEGIN) == "NOT_OPEN"


def test_begin_is_idempotent_by_its_key():
    state = accumulating()
    again, fresh = steps.begin(state, BEGIN)
    assert again is state and not fresh
    assert reason(steps.begin, state, replace(BEGIN, next_number=9)) == "CONFLICT"
    assert steps.begin(committed(), BEGIN)[1] is False


@pytest.mark.parametrize(
    ("change", "expected"),
    [({"base_number": 3}, "POLICY_MISMATCH"), ({"step": -1}, "INVALID"), ({"next_number": 1}, "INVALID")],
)
def test_begin_needs_the_held_base(change, expected):
    assert reason(steps.begin, idle(), replace(BEGIN, **change)) == expected


def test_a_skipped_step_makes_no_version():
    opened, fresh = steps.begin(idle(), replace(BEGIN, step=2))
    assert fresh and opened.version == idle().version
    assert reason(steps.begin, steps.aborted(opened, 2, 1), replace(BEGIN, step=1)) == "NOT_OPEN"


def test_a_later_attempt_replaces_the_open_one_and_an_earlier_is_over():
    second, fresh = steps.begin(accumulating(), replace(BEGIN, attempt=2))
    assert fresh and not second.groups
    assert reason(steps.begin, second, BEGIN) == "NOT_OPEN"
    assert reason(steps.check_open, second, 0, 1) == "NOT_OPEN"


def test_a_group_is_known_by_its_body(make_group):
    group = make_group(0)
    state = steps.learned(accumulating(), record(0, group.digest))
    assert steps.known(state, group) == record(0, group.digest)
    assert reason(steps.known, state, make_group(0, attempt=2)) == "CONFLICT"


def test_commit_is_idempotent_by_its_key():
    state = committed()
    reply = steps.retried(state, COMMIT)
    assert reply is not None and reply.version == steps.Version(2, 1, 1, "b")
    assert (reply.groups, reply.sequences, reply.tokens, dict(reply.tokens_by_version)) == (1, 2, 7, {1: 7})
    assert reason(steps.retried, state, replace(COMMIT, manifest_digest="other")) == "CONFLICT"
    recorded = steps.recorded(state, 0, 1, 2)
    assert steps.retried(recorded, COMMIT) == reply


def test_commit_fits_what_was_begun():
    assert reason(steps.check_commit, idle(), COMMIT) == "NOT_OPEN"
    assert reason(steps.check_commit, accumulating(), replace(COMMIT, next_number=5)) == "CONFLICT"
    empty, _ = steps.begin(idle(), BEGIN)
    assert reason(steps.check_commit, empty, COMMIT) == "EMPTY_STEP"


def test_nothing_follows_a_commit_before_it_is_recorded():
    state = committed()
    following = steps.Begin(step=1, attempt=1, base_number=2, next_number=3)
    assert reason(steps.begin, state, following) == "NOT_RECORDED"
    assert reason(steps.check_recorded, state, 2) == "NOT_RECORDED"
    assert reason(steps.aborted, state, 0, 1) == "COMMITTED"
    assert reason(steps.recorded, state, 0, 1, 3) == "NOT_OPEN"
    recorded = steps.recorded(state, 0, 1, 2)
    assert steps.recorded(recorded, 0, 1, 2) == recorded
    assert steps.check_recorded(recorded, 2).number == 2
    assert steps.begin(recorded, following)[1]


def test_abort_is_idempotent_and_final():
    state = steps.aborted(accumulating(), 0, 1)
    assert state.phase is steps.Phase.IDLE and not state.groups
    assert steps.aborted(state, 0, 1) == state
    assert reason(steps.begin, state, BEGIN) == "NOT_OPEN"
    assert steps.begin(state, replace(BEGIN, attempt=2))[1]


def test_a_refused_commit_ends_the_attempt_and_keeps_the_base():
    reply = steps.CommitReply(steps.Result.SET_MISMATCH)
    state = steps.refused(accumulating(), COMMIT, reply)
    assert steps.retried(state, COMMIT) == reply
    assert state.version is not None and state.version.number == 1
    assert steps.begin(state, replace(BEGIN, attempt=2))[1]


def test_numbers_only_rise():
    state = accumulating()
    assert reason(steps.check_restore, state, 2) == "INVALID"
    steps.check_restore(state, 3)
    assert reason(steps.check_restore, steps.lost(state), 2) == "INVALID"


def test_staleness_counts_ordinals_of_live_ancestors():
    state = steps.recorded(committed(), 0, 1, 2)
    assert steps.staleness(state, {2}) == 0
    assert steps.staleness(state, {1, 2}) == 1
    assert reason(steps.staleness, state, {7}) == "STALE"
