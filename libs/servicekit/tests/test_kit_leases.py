"""The holder's lease reducer: its deadline is before the coordinator's, under any network."""

from dataclasses import dataclass, field

from google.protobuf import duration_pb2
from headrace.common.v1 import common_pb2
from headrace_servicekit.lease import leases
from headrace_servicekit.lease.leases import LeaseState, Phase, reduce
from hypothesis import given, settings
from hypothesis import strategies as st

TTL = 30.0


def lease(epoch, ttl=TTL):
    return common_pb2.Lease(epoch=epoch, ttl=duration_pb2.Duration(nanos=0, seconds=int(ttl)))


def run(*events, state=None):
    state, effects = state or LeaseState(), []
    for event in events:
        state, more = reduce(state, event)
        effects += more
    return state, effects


def held(epoch=7, opened=0.0):
    return run(leases.SessionOpened(opened, TTL), leases.Granted(lease(epoch)), leases.Acquired(epoch))[0]


def test_a_grant_is_acquired_then_held_then_told():
    state, effects = run(leases.SessionOpened(100.0, TTL), leases.Granted(lease(7)), leases.Acquired(7))
    assert effects == [leases.Acquire(lease(7)), leases.Hold(7, 125.0), leases.TellHeld(7)]
    assert state.holdings[7].phase is Phase.HELD


def test_a_refused_grant_is_told_with_its_reason_and_not_held():
    state, effects = run(
        leases.SessionOpened(0, TTL), leases.Granted(lease(7)), leases.Acquired(7, "no memory")
    )
    assert effects[1:] == [leases.Drop(7), leases.TellHeld(7, "no memory")]
    assert not state.holdings


def test_the_deadline_counts_from_sending_the_renewal_that_was_acknowledged():
    state, effects = run(
        leases.HeartbeatSent(1, 10.0),
        leases.HeartbeatSent(2, 15.0),
        leases.HeartbeatAcked(1, at=19.0, renewed=(7,)),
        state=held(),
    )
    assert effects == [leases.Hold(7, 35.0)]
    state, effects = run(leases.HeartbeatAcked(2, at=20.0, renewed=(7,)), state=state)
    assert effects == [leases.Hold(7, 40.0)]


def test_a_grants_deadline_counts_from_what_was_sent_before_it():
    """The grant may have waited in the stream; only the acknowledged heartbeat was surely sent earlier."""
    _, effects = run(
        leases.SessionOpened(0.0, TTL),
        leases.HeartbeatSent(1, 4.0),
        leases.HeartbeatAcked(1, at=10.0),
        leases.Granted(lease(7)),
        leases.Acquired(7),
    )
    assert leases.Hold(7, 29.0) in effects


def test_a_lease_past_its_deadline_is_quiesced_keeps_its_place_and_comes_back():
    state, effects = run(leases.HeartbeatSent(1, 20.0), leases.Tick(24.9), state=held())
    assert effects == []
    state, effects = run(leases.Tick(25.0), leases.Tick(26.0), state=state)
    assert effects == [leases.Quiesce(7)]
    assert state.held() == [lease(7)] and state.epochs() == [7]
    state, effects = run(leases.HeartbeatAcked(1, at=27.0, renewed=(7,)), state=state)
    assert effects == [leases.Hold(7, 45.0)] and state.holdings[7].phase is Phase.HELD


def test_a_stale_epoch_is_released_at_once():
    state, effects = run(
        leases.HeartbeatSent(1, 5.0), leases.HeartbeatAcked(1, at=6.0, stale=(7, 99)), state=held()
    )
    assert effects == [leases.Drop(7), leases.Release(7, 0.0)]
    state, effects = run(leases.Released(7, leases.Memory(1234, 99)), state=state)
    assert effects == [leases.Drop(7), leases.TellReleased(7, leases.Memory(1234, 99))] and not state.holdings


def test_a_stale_epoch_of_register_is_released():
    _, effects = run(leases.SessionOpened(9.0, TTL, stale_epochs=(7,)), state=held())
    assert effects == [leases.Drop(7), leases.Release(7, 0.0)]


def test_a_revoked_lease_stays_valid_and_renewed_until_it_is_released():
    state, effects = run(leases.Revoked(7, 3.0), leases.Revoked(7, 3.0), state=held())
    assert effects == [leases.Release(7, 3.0)] and state.epochs() == [7]
    _, effects = run(
        leases.HeartbeatSent(1, 9.0), leases.HeartbeatAcked(1, at=9.5, renewed=(7,)), state=state
    )
    assert effects == [leases.Hold(7, 34.0)]


def test_a_revoke_during_the_grant_waits_for_it_and_never_says_held():
    state, effects = run(leases.SessionOpened(0, TTL), leases.Granted(lease(7)), leases.Revoked(7, 2.0))
    assert effects == [leases.Acquire(lease(7))]
    _, effects = run(leases.Acquired(7), leases.Released(7, leases.Memory(5)), state=state)
    assert effects == [leases.Release(7, 2.0), leases.Drop(7), leases.TellReleased(7, leases.Memory(5))]


def test_repeated_commands_get_the_same_answers():
    state, effects = run(leases.Granted(lease(7)), state=held())
    assert effects == [leases.TellHeld(7)]
    state, _ = run(leases.Revoked(7, 0), leases.Released(7, leases.Memory(42)), state=state)
    _, effects = run(leases.Revoked(7, 0), leases.Granted(lease(7)), state=state)
    assert effects == [
        leases.TellReleased(7, leases.Memory(42)),
        leases.TellHeld(7, "this lease was already released"),
    ]


def test_acks_of_an_earlier_stream_renew_nothing():
    state, effects = run(
        leases.HeartbeatSent(1, 5.0),
        leases.SessionOpened(8.0, TTL),
        leases.HeartbeatAcked(1, at=9.0, renewed=(7,)),
        state=held(),
    )
    assert effects == [] and state.holdings[7].deadline == 25.0


def test_short_ttls_keep_a_sixth_as_margin():
    assert leases.margin(30) == 5 and leases.margin(3) == 0.5


@dataclass
class World:
    """A coordinator with exact timers behind a network that delays and drops, and a holder."""

    now: float = 0.0
    expiry: dict[int, float] = field(default_factory=dict)
    deadlines: dict[int, float] = field(default_factory=dict)
    state: LeaseState = field(default_factory=LeaseState)
    up: list = field(default_factory=list)
    down: list = field(default_factory=list)
    sequence: int = 0
    epoch: int = 0

    def feed(self, event):
        self.state, effects = reduce(self.state, event)
        for effect in effects:
            match effect:
                case leases.Hold(epoch, deadline):
                    self.deadlines[epoch] = deadline
                case leases.Drop(epoch):
                    self.deadlines.pop(epoch, None)
                case leases.Acquire(granted):
                    self.feed(leases.Acquired(granted.epoch))
                case leases.Release(epoch, _):
                    self.feed(leases.Released(epoch, leases.Memory()))

    def reconnect(self):
        self.up.clear()
        self.down.clear()
        stale = tuple(e for e in self.state.epochs() if self.expiry.get(e, -1) <= self.now)
        self.feed(leases.SessionOpened(self.now, TTL, stale))
        self.sequence = 0

    def beat(self):
        self.sequence += 1
        self.feed(leases.HeartbeatSent(self.sequence, self.now))
        self.up.append((self.sequence, self.state.epochs()))

    def coordinator_reads(self):
        if self.up:
            sequence, epochs = self.up.pop(0)
            live = tuple(e for e in epochs if self.expiry.get(e, -1) > self.now)
            self.expiry.update(dict.fromkeys(live, self.now + TTL))
            stale = tuple(e for e in epochs if e not in live)
            self.down.append(lambda at: leases.HeartbeatAcked(sequence, at, live, stale))

    def grant(self):
        self.epoch += 1
        self.expiry[self.epoch] = self.now + TTL
        granted = lease(self.epoch)
        self.down.append(lambda at: leases.Granted(granted))

    def holder_reads(self):
        if self.down:
            self.feed(self.down.pop(0)(self.now))


steps = st.lists(
    st.one_of(
        st.sampled_from(["beat", "coordinator_reads", "grant", "holder_reads", "holder_reads", "reconnect"]),
        st.floats(0.01, 12.0),
    ),
    max_size=60,
)


@settings(max_examples=400, deadline=None)
@given(steps)
def test_no_lease_is_usable_after_the_coordinators_timer(script):
    world = World()
    world.reconnect()
    for step in script:
        if isinstance(step, float):
            world.now += step
            world.feed(leases.Tick(world.now))
        else:
            getattr(world, step)()
        for epoch, deadline in world.deadlines.items():
            assert deadline + leases.margin(TTL) <= world.expiry[epoch] + 1e-9
        for holding in world.state.holdings.values():
            if holding.phase is Phase.HELD and isinstance(step, float):
                assert holding.deadline > world.now
