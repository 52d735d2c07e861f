"""Which runs an instance has open, and when it closes them: one suite for real services and simulated instances."""

from __future__ import annotations

import itertools

import pytest
from harness.services.openings import Refused, real, simulated
from harness.waiting import wait_for

SIDES = {"real": real, "simulated": simulated}
KINDS = ("rollout", "trainer", "reward")
_ids = itertools.count(1)


@pytest.fixture(
    scope="module",
    params=[(side, kind) for kind in KINDS for side in SIDES],
    ids=lambda param: f"{param[0]}-{param[1]}",
)
def shared(request, tiny_model, tmp_path_factory):
    side, kind = request.param
    with SIDES[side](kind, tiny_model, tmp_path_factory.mktemp(kind)) as subject:
        yield subject


@pytest.fixture
def subject(shared):
    """The instance, with nothing open before and after."""
    reported(shared)
    yield shared
    for run in shared.opened:  # the reports may not name yet what the test opened last
        shared.close(run)
    shared.opened.clear()
    reported(shared)


@pytest.fixture
def opening():
    """A run's name, and ids for its openings in rising order."""
    number = next(_ids)
    return f"runs/{number}", 10 * number, 10 * number + 1, 10 * number + 2


def refused(reason, call, *arguments, **fields):
    with pytest.raises(Refused) as caught:
        call(*arguments, **fields)
    assert caught.value.reason == reason, str(caught.value)
    return str(caught.value)


def reported(subject, *expected):
    """Waits for a report of (run, open_id, phase)s."""
    wait_for(
        lambda: [report[:3] for report in subject.reports()] == list(expected), f"a report of {expected}"
    )


def test_a_repetition_gets_the_same_answer_and_another_config_is_a_conflict(subject, opening):
    run, _, first, _ = opening
    assert subject.open(run, first) == subject.open(run, first)
    refused("CONFLICT", subject.open, run, first, seed=2)
    subject.command(run, first)
    reported(subject, (run, first, "OPEN"))


def test_a_higher_open_id_replaces_the_opening_and_a_lower_one_is_stale(subject, opening):
    run, lower, first, second = opening
    subject.open(run, first)
    subject.open(run, second, seed=2)
    reported(subject, (run, second, "OPEN"))
    for stale in (lower, first):
        message = refused("OPENING_STALE", subject.open, run, stale)
        assert str(stale) in message and str(second) in message
    subject.command(run, second)


def test_commands_belong_to_an_opening(subject, opening):
    run, lower, first, second = opening
    refused("OPENING_STALE", subject.command, run, first)
    subject.open(run, first)
    for other in (lower, second):
        assert str(first) in refused("OPENING_STALE", subject.command, run, other)
    subject.command(run, first)
    subject.command(run, 0)  # whichever is open
    subject.close(run, first)
    refused("OPENING_STALE", subject.command, run, first)


def test_close_is_idempotent_needs_no_lease_and_spares_a_newer_opening(subject, opening):
    run, lower, first, second = opening
    subject.close(run, lower)
    subject.open(run, first)
    subject.close(run, lower)
    subject.command(run, first)
    for _ in range(2):
        subject.close(run, second)  # a close that overtook its opening ends what was open before
    reported(subject)
    refused("OPENING_STALE", subject.open, run, first)
    refused("OPENING_STALE", subject.open, run, second)
    subject.open(run, second + 1)


def test_a_second_run_is_busy_or_served_beside_the_first(subject, opening):
    run, _, first, _ = opening
    other = f"{run}-other"
    subject.open(run, first)
    if subject.limit == 0:
        subject.open(other, first + 1, seed=2)
        subject.command(run, first)
        subject.command(other, first + 1)
        reported(subject, (run, first, "OPEN"), (other, first + 1, "OPEN"))
        subject.close(run, first)
        refused("OPENING_STALE", subject.command, run, first)
        subject.command(other, first + 1)
        return
    assert run in refused("BUSY", subject.open, other, first + 1)
    subject.command(run, first)
    subject.close(run, first)
    subject.open(other, first + 1)
    reported(subject, (other, first + 1, "OPEN"))


def test_reports_name_the_last_command_that_was_applied(subject, opening):
    run, _, first, second = opening
    subject.open(run, first)
    subject.command(run, first)
    applied = subject.sequence
    refused("OPENING_STALE", subject.command, run, second)
    refused("CONFLICT", subject.open, run, first, seed=2)
    wait_for(lambda: subject.reports() == [(run, first, "OPEN", applied)], "the last command")


def test_callers_without_open_ids_work_as_before(subject, opening):
    run = opening[0]
    subject.open(run, 0)
    subject.open(run, 0)
    refused("CONFLICT", subject.open, run, 0, seed=2)
    subject.close(run)
    subject.close(run)
    subject.open(run, 0, seed=2)
    reported(subject, (run, 0, "OPEN"))
