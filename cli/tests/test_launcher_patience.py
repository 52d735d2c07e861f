"""A start goes on while it progresses: something has come up, or what is missing works."""

import os

from headrace_cli.launcher.start import STANDSTILL_S, Patience, cpu_seconds_of


class World:
    """A clock and CPU time that a test sets."""

    def __init__(self, timeout_s: float = 600.0) -> None:
        self.now = self.used = 0.0
        self.patience = Patience(timeout_s, lambda: self.now, lambda pids: self.used)

    def after(self, seconds: float, work: float, missing: str = "rollout-0") -> str:
        self.now += seconds
        self.used += work
        return self.patience.over(missing, [1])


def test_a_slow_start_that_works_is_waited_for_up_to_the_limit():
    world = World(timeout_s=600)
    assert [world.after(50, work=2) for _ in range(11)] == [""] * 11
    assert world.after(50, work=2) == "not ready after 600 s (--timeout): rollout-0"


def test_a_start_without_progress_is_stopped():
    world = World()
    assert world.after(1, work=5) == ""
    assert world.after(STANDSTILL_S - 1, work=0.5) == ""
    assert world.after(1, work=0) == "not ready, and no progress for 60 s: rollout-0"


def test_one_more_instance_is_progress_and_so_is_a_process_that_was_started_again():
    world = World()
    assert world.after(59, work=0, missing="rollout-0, rollout-1") == ""
    assert world.after(59, work=0, missing="rollout-1") == ""
    world.used = -1  # Another process has used less.
    assert world.after(59, work=0, missing="rollout-1") == ""
    assert world.after(60, work=0, missing="rollout-1") != ""


def test_cpu_seconds_are_those_of_living_processes():
    assert cpu_seconds_of([os.getpid(), 2**22 + 1]) > 0
