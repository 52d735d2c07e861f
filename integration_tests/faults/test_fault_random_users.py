"""Users of a real fleet act at random: what they left to run succeeds, with each slot trained once.

The seeded simulation plays this for thousands of seeds with imaginary instances; here the processes are real.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable
from typing import Any

import pytest
from harness.fleet import Fleet
from harness.ledger import audit
from headrace.client import HeadraceError, Run

ACTIONS = 50
LONGEST_GAP_S = 3.0
MOST_RUNS = 8
END_S = 500.0
INSTANCES = ("rollout-0", "rollout-1", "trainer-0", "trainer-1", "reward-0", "coordinator")


class Users:
    """Submits, steers and forks runs and kills processes; remembers which runs were cancelled."""

    def __init__(self, fleet: Fleet, spec_of: Callable[..., dict[str, Any]], seed: int) -> None:
        self._fleet, self._spec_of, self._random = fleet, spec_of, random.Random(seed)
        self.runs: list[str] = []
        self.cancelled: set[str] = set()
        self.said: list[str] = []

    def act(self) -> None:
        """One action. A refusal is an answer too: users press what does not apply."""
        actions: list[tuple[float, Callable[[], object]]] = [
            (3.0 if len(self.runs) < MOST_RUNS else 0.0, self._submit),
            (3.0, lambda: self._steer("pause")),
            (2.0, lambda: self._steer("pause", now=True)),
            (5.0, lambda: self._steer("resume")),
            (0.7, self._cancel),
            (1.0 if len(self.runs) < MOST_RUNS else 0.0, self._fork),
            (1.5, self._kill),
        ]
        weights = [weight for weight, _ in actions]
        (chosen,) = self._random.choices([action for _, action in actions], weights)
        try:
            chosen()
        except HeadraceError as refused:
            self._say(f"refused: {refused} {[str(item) for item in refused.problems]}")
        time.sleep(self._random.uniform(0, LONGEST_GAP_S) ** 2 / LONGEST_GAP_S)

    def _submit(self) -> None:
        spec = self._spec_of(
            name="random",
            steps=self._random.randint(5, 25),
            seed=self._random.randint(0, 99),
            scheduling__quantum_s=self._random.choice([0.3, 5.0]),
            scheduling__priority=self._random.choice([0, 0, 3]),
            limits__recoveries=50,
        )
        self._remember(self._fleet.submit(spec))

    def _fork(self) -> None:
        if self.runs:
            origin = self._random.choice(self.runs)
            self._remember(self._fleet.client.fork(origin, None, {"steps": 40}))

    def _remember(self, run: Run) -> None:
        self.runs.append(run.id)
        self._say(f"submitted {run.id}")

    def _steer(self, how: str, **options: bool) -> None:
        if self.runs:
            run = self._any()
            self._say(f"{how} {run} {options or ''}")
            getattr(self._fleet.client, how)(run, **options)

    def _cancel(self) -> None:
        if self.runs:
            run = self._any()
            self._say(f"cancel {run}")
            self._fleet.client.cancel(run)
            self.cancelled.add(run)

    def _any(self) -> str:
        """Any run, rather one that goes on."""
        living = [run for run in self.runs if not self._fleet.client.get(run).ended]
        return self._random.choice(living or self.runs)

    def _kill(self) -> None:
        name = self._random.choice(INSTANCES)
        self._say(f"kill {name}")
        self._fleet.kill(name)

    def _say(self, text: str) -> None:
        self.said.append(text)
        print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


def finish(fleet: Fleet, users: Users) -> list[Run]:
    """All runs at their end; paused ones are resumed."""
    deadline = time.monotonic() + END_S
    while time.monotonic() < deadline:
        runs = [fleet.client.get(run) for run in users.runs]
        if all(run.ended for run in runs):
            return runs
        for run in runs:
            if run.state == "PAUSED" or run.intent in ("PAUSE", "PAUSE_NOW"):
                with contextlib.suppress(HeadraceError):  # It may have ended since the look.
                    fleet.client.resume(run.id)
        time.sleep(0.5)
    raise AssertionError(
        f"still going: {[(r.id, r.state, r.intent, r.waiting_for) for r in runs if not r.ended]}"
    )


@pytest.mark.nightly
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", range(6))
def test_what_random_users_leave_to_run_succeeds(own_fleet, spec_of, seed):
    with own_fleet("--rollout", "2", "--trainer", "2") as fleet:
        users = Users(fleet, spec_of, seed)
        for _ in range(ACTIONS):
            users.act()
        for run in finish(fleet, users):
            if run.id not in users.cancelled:
                assert run.state == "SUCCEEDED", f"{run.id} {run.state}: {run.reason}"
            if run.step > run.first_step:
                audit(fleet, run)
        held = fleet.client.leases().leases
        assert not held, f"runs that have ended hold leases: {held}"
        assert fleet.succeed(fleet.submit(spec_of(name="next", steps=1))).step == 1
