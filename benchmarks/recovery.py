"""How long a run stands still after a kill -9, by role, and what it keeps of its steps: `benchmarks/recovery.py`.

The tiny model on a fleet of one instance of each kind; for simulators an embodied run. Roles are killed in turns, so
that none waits long to be started again for its earlier ends. Prints one JSON line: `ROLE_p50_s` and `ROLE_max_s`, the
longest time without a commit from the kill on, where `fleet` is the launcher and `headrace up` after it;
`trainer_caught_up_p50_s`, from the kill to the first step beyond the one that was reached; `effective_share`, new
steps a second while a role is killed every 30 s, over those undisturbed.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from _harness import Fleet, emit, machine, say
from headrace.client import Client, Event, HeadraceError, load_spec

TINY = Path(__file__).resolve().parents[1] / "examples" / "tiny.yaml"
ROLES = ("rollout", "reward", "trainer", "coordinator", "store")
EVERY_S = 30.0
SETTLED_COMMITS = 10
"""A kill is over so many commits after the one that ended the standstill."""
PATIENCE_S = 60.0
WITHOUT_END = 1_000_000
CALM: Mapping[str, Any] = {"steps": WITHOUT_END, "evaluation.every": 0, "export": False}
TOLD = {"instance_lost", "run_recovering", "trainer_group_formed", "version_restored", "step_opened"}
Commit = tuple[float, int]
"""When, in seconds since the Unix epoch, and which step."""


class Follower:
    """The commits of a run as they happen, by the coordinator's own clock."""

    def __init__(self, client: Client, run: str) -> None:
        self.commits: list[Commit] = []
        self.events: list[Event] = []
        self._client, self._run = client, run
        threading.Thread(target=self._follow, daemon=True).start()

    def _follow(self) -> None:
        seen = 0
        while True:
            try:
                for event in self._client.events(self._run, seen):
                    seen = event.id
                    self.events.append(event)
                    if event.type == "step_committed":
                        self.commits.append((event.time, event.data["view"]["step"]))
            except HeadraceError:
                pass  # The fleet is down: it goes on where it was.
            except RuntimeError:
                return  # The client is closed.
            time.sleep(0.1)

    def after(self, moment: float) -> list[Commit]:
        """Commits later than a moment."""
        return [commit for commit in self.commits if commit[0] > moment]

    def wait(self, done: Callable[[], bool], what: str) -> None:
        """Returns once `done` holds; RuntimeError after PATIENCE_S without."""
        deadline = time.monotonic() + PATIENCE_S
        while not done():
            if time.monotonic() > deadline:
                raise RuntimeError(f"no {what} for {PATIENCE_S:.0f} s: {self._client.get(self._run)}")
            time.sleep(0.02)


def standstill(moment: float, commits: Sequence[Commit]) -> float:
    """The longest time without a commit from a moment on."""
    return max(later - earlier for earlier, later in pairwise([moment, *(at for at, _ in commits)]))


def caught_up(moment: float, reached: int, commits: Sequence[Commit]) -> float:
    """Seconds from a moment to the first step beyond the one that was reached."""
    return next(at for at, step in commits if step > reached) - moment


def kill(fleet: Fleet, follower: Follower, role: str) -> tuple[float, float]:
    """(seconds of the standstill, seconds until the run is beyond where it was) of a kill."""
    follower.wait(lambda: bool(follower.commits), "first step")
    pid = fleet.process(role)
    moment, reached = time.time(), max(step for _, step in follower.commits)
    os.kill(pid, signal.SIGKILL)

    def over() -> bool:
        later = follower.after(moment)
        replaced = fleet.process(role) not in (0, pid)
        return replaced and sum(step > reached for _, step in later) > SETTLED_COMMITS

    follower.wait(over, f"recovery of {role}")
    later = follower.after(moment)
    found = standstill(moment, later), caught_up(moment, reached, later)
    told = [f"{e.time - moment:.1f} {e.type}" for e in follower.events if e.time > moment and e.type in TOLD]
    say(f"{role}: {found[0]:.2f} s, beyond where it was after {found[1]:.2f} s; {', '.join(told[:8])}")
    return found


def kill_fleet(fleet: Fleet, follower: Follower) -> float:
    """Seconds of the standstill of a kill of the launcher, with all its processes, and `headrace up` after it."""
    moment = time.time()
    os.kill(fleet.launcher, signal.SIGKILL)
    fleet.up()
    follower.wait(lambda: len(follower.after(moment)) > SETTLED_COMMITS, "recovery of the fleet")
    found = standstill(moment, follower.after(moment))
    say(f"fleet: {found:.2f} s")
    return found


def pace(follower: Follower, seconds: float) -> float:
    """New steps a second in so many seconds."""
    follower.wait(lambda: bool(follower.commits), "first step")
    begin, before = time.time(), max(step for _, step in follower.commits)
    time.sleep(seconds)
    return (max(step for _, step in follower.commits) - before) / (time.time() - begin)


def disturbed_pace(fleet: Fleet, follower: Follower, seconds: float, seed: int) -> float:
    """The same while a role, by the seed, is killed every 30 s, the first one after 15."""
    draw, stop = random.Random(seed), threading.Event()

    def disturb() -> None:
        wait_s = EVERY_S / 2
        while not stop.wait(wait_s):
            role, wait_s = draw.choice(ROLES), EVERY_S
            say(f"kill of {role} at step {max(step for _, step in follower.commits)}")
            os.kill(fleet.process(role), signal.SIGKILL)

    thread = threading.Thread(target=disturb, daemon=True)
    thread.start()
    try:
        return pace(follower, seconds)
    finally:
        stop.set()
        thread.join()


def robots() -> dict[str, Any]:
    """An embodied run of small steps."""
    return {
        "name": "recovery",
        "workflow": "embodied",
        "steps": WITHOUT_END,
        "model": {"policy": {"kind": "mlp", "hidden": [16], "log_std": 0.0}},
        "environment": {"tasks": ["Pendulum-v1"], "count": 4, "max_episode_steps": 16},
        "data": {"options": {"starts": 64}},
        "algorithm": {"name": "ppo", "group_size": 1, "prompts_per_step": 8},
        "evaluation": {"every": 0},
        "export": False,
    }


def measure(options: argparse.Namespace) -> dict[str, float]:
    """All figures."""
    seconds: dict[str, list[float]] = {role: [] for role in (*ROLES, "simulator", "fleet")}
    beyond: list[float] = []
    with tempfile.TemporaryDirectory(prefix="headrace-recovery-") as folder:
        model = Path(folder) / "tiny"
        subprocess.run([sys.executable, "-m", "headrace_modelkit.presets.tiny", str(model)], check=True)
        with Fleet() as fleet, Client(fleet.url, fleet.token, patience_s=PATIENCE_S) as client:
            run = client.submit(load_spec(TINY, {**CALM, "model.path": str(model)}))
            follower = Follower(client, run.id)
            follower.wait(lambda: len(follower.commits) > SETTLED_COMMITS, "first steps")
            for _ in range(options.kills):
                for role in ROLES:
                    stood, back = kill(fleet, follower, role)
                    seconds[role].append(stood)
                    beyond += [back] if role == "trainer" else []
            calm = pace(follower, options.calm_s)
            disturbed = disturbed_pace(fleet, follower, options.disturbed_s, options.seed)
            say(f"steps a second: {calm:.2f} undisturbed, {disturbed:.2f} disturbed")
            follower.wait(lambda: bool(follower.after(time.time() - 1.0)), "steps after the last kill")
            for _ in range(2 if options.kills else 0):
                seconds["fleet"].append(kill_fleet(fleet, follower))
            client.cancel(run.id)
            client.wait(run.id, PATIENCE_S)
            follower = Follower(client, client.submit(robots()).id)
            follower.wait(lambda: len(follower.commits) > SETTLED_COMMITS, "first embodied steps")
            seconds["simulator"] += [kill(fleet, follower, "simulator")[0] for _ in range(options.kills)]
    return figures(seconds, beyond, calm, disturbed)


def figures(
    seconds: Mapping[str, Sequence[float]], beyond: Sequence[float], calm: float, disturbed: float
) -> dict[str, float]:
    """What is printed."""
    found: dict[str, float] = {}
    for role, each in seconds.items():
        if each:
            found |= {f"{role}_p50_s": median(each), f"{role}_max_s": max(each)}
    if beyond:
        found["trainer_caught_up_p50_s"] = median(beyond)
    return found | {"effective_share": disturbed / calm, "calm_steps_per_s": calm}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=3, help="of each role")
    parser.add_argument("--calm-s", type=float, default=30.0, help="seconds without a kill")
    parser.add_argument("--disturbed-s", type=float, default=150.0, help="seconds with a kill every 30")
    parser.add_argument("--seed", type=int, default=0, help="of the roles that are killed then")
    options = parser.parse_args()
    say(machine())
    found = measure(options)
    say(f"at the end: {machine()}")
    emit("recovery", found)


if __name__ == "__main__":
    main()
