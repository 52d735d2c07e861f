"""The number of threads that work is faster with."""

from __future__ import annotations

import itertools

import pytest
import torch
from headrace_modelkit.threads import KEPT, MOST, Choice, Threads


@pytest.fixture(autouse=True)
def _one_thread_again():
    yield
    torch.set_num_threads(1)


class Clock:
    """Time passes as the work says, by the number of threads that torch then has."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now

    def do(self, threads, kind, size, seconds):
        """One piece of work: seconds by the number of threads; with how many it was done."""
        with threads.work(kind, size):
            used = torch.get_num_threads()
            self.now += seconds[used]
        return used


def test_work_that_threads_slow_is_done_in_one_and_the_rest_in_all():
    clock = Clock()
    threads = Threads(clock)
    threads.lease(2)
    small, large = {1: 0.001, 2: 0.002}, {1: 1.0, 2: 0.6}
    used = [
        (clock.do(threads, "decode", 4, small), clock.do(threads, "decode", 256, large)) for _ in range(12)
    ]
    assert used[-1] == (1, 2) and used[-3:] == [(1, 2)] * 3
    assert torch.get_num_threads() == 2, "what is not measured has all"


def test_a_machine_that_slows_meanwhile_favours_neither():
    for several in (0.8, 1.25):
        choice, slow = Choice(), 1.0
        for _ in range(40):
            choice.took(slow * (several if choice.several else 1.0))
            slow *= 1.08
        assert choice.several == (several < 1)


def test_no_gain_is_worth_one_thread_alone():
    choice, noise = Choice(), itertools.cycle([1.0, 1.3, 0.9, 1.1, 1.2])
    for _ in range(2 + 2 * MOST):
        choice.took(next(noise))
    assert not choice.several


def test_it_looks_again_after_a_while():
    choice = Choice()
    for _ in range(8):
        choice.took(2.0 if choice.several else 1.0)
    assert not choice.several
    found = set()
    for _ in range(KEPT + 4):
        choice.took(1.0)
        found.add(choice.several)
    assert found == {True, False}


def test_a_deterministic_run_computes_in_one_thread_whatever_is_leased():
    clock = Clock()
    threads = Threads(clock)
    threads.single = True
    threads.lease(2)
    assert {clock.do(threads, "micro", 8, {1: 9.0, 2: 1.0}) for _ in range(20)} == {1}


def test_what_is_beside_a_gpu_and_one_core_keep_their_number():
    clock = Clock()
    threads = Threads(clock)
    threads.fixed = True
    threads.lease(2)
    assert {clock.do(threads, "micro", 8, {1: 1.0, 2: 9.0}) for _ in range(20)} == {2}
    threads.fixed = False
    threads.lease(1)
    assert {clock.do(threads, "micro", 8, {1: 9.0, 2: 1.0}) for _ in range(20)} == {1}


def test_what_is_known_of_a_lease_holds_when_its_cores_come_back():
    clock = Clock()
    threads = Threads(clock)
    threads.lease(2)
    seconds = {1: 0.001, 2: 0.002, 3: 0.003}
    for _ in range(12):
        clock.do(threads, "micro", 8, seconds)
    threads.lease(1), threads.lease(3)
    assert clock.do(threads, "micro", 8, seconds) == 3, "nothing is known of three cores"
    threads.lease(2)
    assert clock.do(threads, "micro", 8, seconds) == 1


@pytest.mark.parametrize(("several", "long"), [(0.6, True), (1.7, True), (0.6, False)])
def test_of_long_pieces_that_differ_plainly_one_in_one_thread_is_enough(several, long):
    clock = Clock()
    threads = Threads(clock)
    threads.lease(2)
    unit = 1.0 if long else 0.01
    used = [clock.do(threads, "micro", 800, {1: unit, 2: several * unit}) for _ in range(8)]
    chosen = 2 if several < 1 else 1
    assert used == ([2, 2, 1] if long else [2, 2, 1, 1, 2]) + [chosen] * (5 if long else 3)
