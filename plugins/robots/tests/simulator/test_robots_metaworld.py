"""Meta-World's tasks show the same bits with the work that `metaworld.speed` spares and without.

Runs in .envs/metaworld (`make test-simulators SIM=metaworld`); `-m nightly` plays all 50 tasks.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

if importlib.util.find_spec("metaworld") is None:
    pytest.skip("Meta-World is not installed here", allow_module_level=True)

from headrace_robots.simulator.metaworld import speed
from headrace_simulator import backends

pytestmark = [pytest.mark.timeout(900), pytest.mark.filterwarnings("ignore")]
# A goal alone, an object that turns, a body that moves with the goal, a _reset_hand of its own, a goal that is a view.
SOME = ["reach-v3", "push-v3", "drawer-open-v3", "faucet-open-v3", "basketball-v3"]
GRAVITY = "execution.gravity"


def made(backend: Any, task: str) -> Any:
    return backend.make(task, {}, own_time_limit=False, dense=False)


def played(environment: Any) -> Iterator[tuple[bytes, float, str]]:
    """What five episodes show: seeds given, gone on with and given again, and another gravity for the last."""
    random = np.random.default_rng(0)
    for episode, seed in enumerate((5, None, 5, None, 9)):
        if episode == 4:
            environment.knobs[GRAVITY](0.3)
        observation, info = environment.reset(seed, {}, None)
        yield observation[""].tobytes(), 0.0, repr(info)
        for action in random.uniform(-1, 1, (25, 4)).astype(np.float32):
            seen = environment.step(action)
            yield seen.observation[""].tobytes(), seen.reward, repr(seen.info)


def check(task: str) -> None:
    quick = backends.create("metaworld")
    slow = backends.create("metaworld")
    slow._hasten = lambda environment: False
    pairs = zip(played(made(quick, task)), played(made(slow, task)), strict=True)
    for moment, (with_it, without_it) in enumerate(pairs):
        assert with_it == without_it, f"{task}, moment {moment}"


@pytest.mark.parametrize("task", SOME)
def test_a_task_shows_the_same_bits_in_less_time(task):
    check(task)


@pytest.mark.nightly
def test_every_task_shows_the_same_bits_in_less_time():
    for task in backends.create("metaworld").environments():
        check(task)


def test_a_reset_takes_no_simulation_step_where_the_last_one_began_alike():
    environment = made(backends.create("metaworld"), "reach-v3")
    steps = []
    own = environment._environment.do_simulation
    environment._environment.do_simulation = lambda *given: steps.append(1) or own(*given)
    counted = []
    for seed in (1, 2, 3):
        environment.reset(seed, {}, None)
        counted.append(len(steps))
    assert counted == [50, 50, 50]
    environment.knobs[GRAVITY](0.5)
    environment.reset(4, {}, None)
    assert len(steps) == 100


def test_another_version_is_left_as_it_is(monkeypatch):
    monkeypatch.setattr(speed, "version", lambda name: "9.9.9")
    environment = made(backends.create("metaworld"), "reach-v3")._environment
    assert "_reset_hand" not in vars(environment)
