"""Warm containers and the broker's server, with a provider that counts in place of an engine."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import pytest
from headrace_containers.broker.warm import Warm
from headrace_containers.provider import EngineLost, Network, Spec

SPEC = Spec("image")


class Counting:
    """Makes containers that do nothing, when it is let."""

    def __init__(self):
        self.made, self.let, self.fails = [], threading.Event(), False
        self.let.set()

    def start_ahead(self, spec):
        assert self.let.wait(30)
        if self.fails:
            raise EngineLost("no engine")
        made = Idle(spec)
        self.made.append(made)
        return made


class Idle:
    def __init__(self, spec):
        self.kind, self.spec, self.alive, self.closed = spec, None, True, False

    def begin(self, spec):
        self.spec = spec

    def is_alive(self):
        return self.alive

    def close(self):
        self.closed = True


def until(look):
    ends = time.monotonic() + 30
    while not look():
        assert time.monotonic() < ends
        time.sleep(0.005)


@pytest.fixture
def counting():
    return Counting()


@pytest.fixture
def warm(counting):
    return Warm(counting, lambda: True)


def test_what_is_ready_is_handed_over_and_made_again(warm, counting):
    warm.fill(SPEC, 2)
    until(lambda: len(counting.made) == 2)
    taken = warm.start(replace(SPEC, env={"A": "1"}, network=Network()), 2)
    assert taken in counting.made[:2] and taken.spec.env == {"A": "1"}
    until(lambda: warm.count() == 2 and len(counting.made) == 3)


def test_another_kind_and_another_network_are_not_the_same(warm, counting):
    warm.fill(SPEC, 1)
    until(lambda: len(counting.made) == 1)
    for other in (
        replace(SPEC, user="root"),
        replace(SPEC, network=Network(endpoint="h:1")),
        replace(SPEC, image="b"),
    ):
        assert warm.start(other, 0) is not counting.made[0]
    one, two = (replace(SPEC, network=Network(allow=(name,))) for name in ("a", "b"))
    warm.fill(one, 1)
    until(lambda: len(counting.made) == 5)
    taken = warm.start(two, 0)
    assert taken is counting.made[4] and taken.spec.network.allow == ("b",), (
        "what it reaches is told as it begins"
    )


def test_one_that_is_being_made_is_waited_for(warm, counting):
    counting.let.clear()
    warm.fill(SPEC, 1)
    taken = []
    thread = threading.Thread(target=lambda: taken.append(warm.start(SPEC, 0)))
    thread.start()
    counting.let.set()
    thread.join(30)
    assert taken == counting.made, "and no other was made for it"
    counting.fails = True
    warm.fill(SPEC, 1)
    with pytest.raises(EngineLost):
        warm.start(SPEC, 0)


def test_dead_ones_idle_ones_and_all_at_the_end_are_closed(warm, counting):
    warm.fill(SPEC, 2)
    until(lambda: warm.count() == 2 and len(counting.made) == 2)
    counting.made[0].alive = False
    assert warm.start(SPEC, 0) is counting.made[1] and counting.made[0].closed
    warm.fill(SPEC, 1)
    until(lambda: len(counting.made) == 3)
    warm.drop(1000.0)
    assert not counting.made[2].closed
    warm.drop(0.0)
    assert counting.made[2].closed
    counting.let.clear()
    warm.fill(SPEC, 1)
    warm.close()
    counting.let.set()
    until(lambda: len(counting.made) == 4 and counting.made[3].closed)
    warm.fill(SPEC, 1)
    assert warm.count() == 0


def test_without_room_nothing_is_made_ahead(counting):
    warm = Warm(counting, lambda: False)
    warm.fill(SPEC, 3)
    until(lambda: warm.count() == 0)
    assert not counting.made and warm.start(SPEC, 0) is counting.made[0]
