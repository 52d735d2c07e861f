"""A Learn stream under its lease: one suite for the real trainer and the simulation's."""

from __future__ import annotations

import pytest
from harness.services.openings import Refused, real, simulated
from harness.waiting import wait_for
from headrace.trainer.v1 import trainer_pb2 as pb

SIDES = {"real": real, "simulated": simulated}
RUN = "runs/leased"
TTL_S = 6


@pytest.fixture(scope="module", params=SIDES)
def trainer(request, tiny_model, tmp_path_factory):
    """A trainer with a step attempt open, under lease 1."""
    folder = tmp_path_factory.mktemp("trainer")
    with SIDES[request.param]("trainer", tiny_model, folder, lease_ttl_s=TTL_S) as subject:
        subject.open(RUN, 1)
        subject.grant(1)
        subject.call(
            "JoinTrainerGroup",
            pb.JoinTrainerGroupRequest(header=subject.header(RUN, 1), generation=1, world_size=1),
        )
        subject.call("Restore", pb.RestoreRequest(header=subject.header(RUN, 1, 1), number=1))
        begin = pb.BeginStepRequest(
            header=subject.header(RUN, 1, 1), step=0, attempt=1, base_number=1, next_number=2
        )
        subject.call("BeginStep", begin)
        yield subject


def learn(subject, lease):
    return pb.LearnRequest(header=subject.header(RUN, 1, lease), step=0, attempt=1)


def still_open(subject):
    """The attempt goes on, whatever became of the stream."""
    state = subject.call("GetStepState", pb.GetStepStateRequest(header=subject.header(RUN, 1)))
    return (state.phase, state.step, state.attempt) == (pb.STEP_PHASE_ACCUMULATING, 0, 1)


def reason(subject, lease):
    try:
        responses = subject.stream("Learn", learn(subject, lease))
    except Refused as refused:
        return refused.reason
    assert not any(response.revoked for response in responses)
    return ""


def test_a_lease_that_lapses_is_tried_again_and_one_that_is_revoked_ends_the_stream(trainer):
    trainer.renew(1, renewed=False)
    wait_for(lambda: reason(trainer, 1) == "LEASE_QUIESCED", "the lease to lapse")
    trainer.renew(1, renewed=True)
    wait_for(lambda: reason(trainer, 1) == "", "the lease to be renewed")
    assert still_open(trainer)
    *before, last = trainer.revoked_while("Learn", learn(trainer, 1), 1)
    assert last.revoked and before and not any(response.revoked for response in before)
    assert reason(trainer, 1) == "EPOCH_STALE"
    trainer.grant(2)
    assert reason(trainer, 2) == "" and still_open(trainer)
