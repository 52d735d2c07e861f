"""The fence: past coordinators and leases not held now are refused."""

import pytest
from headrace.common.v1 import common_pb2
from headrace_servicekit.lease.fence import Fence
from headrace_servicekit.rpc.errors import ServiceError
from headrace_servicekit.rpc.requests import HIGHEST_COMMAND, HIGHEST_EPOCH, admission


def header(coordinator=1, lease=0):
    return common_pb2.CommandHeader(coordinator_epoch=coordinator, lease_epoch=lease)


def test_a_coordinator_epoch_below_the_highest_seen_is_refused():
    fence = Fence()
    fence.check(header(4), lease=False)
    fence.check(header(4), lease=False)
    with pytest.raises(ServiceError, match="EPOCH_STALE") as caught:
        fence.check(header(3), lease=False)
    assert caught.value.metadata == {"coordinator_epoch": "4"}


def test_a_command_that_needs_a_lease_needs_that_lease():
    fence = Fence()
    for epoch in (0, 7):
        with pytest.raises(ServiceError, match="EPOCH_STALE"):
            fence.check(header(lease=epoch), lease=True)
    fence.grant(7)
    fence.check(header(lease=7), lease=True)
    with pytest.raises(ServiceError, match=r"holds \[7\]"):
        fence.check(header(lease=6), lease=True)
    fence.release(7)
    with pytest.raises(ServiceError, match="EPOCH_STALE"):
        fence.check(header(lease=7), lease=True)


def test_a_lease_ends_at_its_own_deadline_without_anybody_saying_so():
    now = [100.0]
    fence = Fence(lambda: now[0])
    fence.grant(7, deadline=125.0)
    now[0] = 124.9
    fence.check(header(lease=7), lease=True)
    now[0] = 125.0
    with pytest.raises(ServiceError, match="LEASE_QUIESCED"):
        fence.check(header(lease=7), lease=True)
    fence.grant(7, deadline=130.0)
    fence.check(header(lease=7), lease=True)


def test_the_epoch_of_a_command_is_believed_once_its_call_is_accepted():
    fence = Fence()
    fence.obey(4, "store")
    with pytest.raises(ServiceError, match="EPOCH_STALE"):
        fence.check(header(1000, lease=9), lease=True)
    with admission():
        fence.check(header(1000), lease=False)  # Refused later: its config cannot be read, say.
    fence.check(header(4), lease=False)
    with admission() as call:
        fence.check(header(5), lease=False)
        call.accept()
    with pytest.raises(ServiceError, match="EPOCH_STALE"):
        fence.check(header(4), lease=False)


def test_a_fence_remembers_whose_coordinator_it_obeys():
    fence = Fence()
    fence.obey(4, "store")
    fence.obey(5, "")
    assert (fence.coordinator_epoch, fence.store_id) == (5, "store")
    with pytest.raises(ServiceError, match="EPOCH_STALE"):
        fence.obey(4, "other")
    assert fence.store_id == "store"


@pytest.mark.parametrize(
    "wrong", [{"coordinator_epoch": 2**30}, {"open_id": 2**62}, {"command_sequence": 2**62}, {"open_id": -1}]
)
def test_a_number_that_no_coordinator_reaches_is_refused_and_not_believed(wrong):
    fence = Fence()
    with pytest.raises(ServiceError, match=f"INVALID: header.{next(iter(wrong))}: "):
        fence.check(common_pb2.CommandHeader(run="runs/a", **wrong), lease=False, opening=False)
    fence.check(header(1), lease=False)


def test_openings_and_sequences_of_the_highest_epoch_fit():
    highest = common_pb2.CommandHeader(
        run="runs/a",
        coordinator_epoch=HIGHEST_EPOCH,
        open_id=HIGHEST_COMMAND,
        command_sequence=HIGHEST_COMMAND,
    )
    Fence().check(highest, lease=False, opening=False)
