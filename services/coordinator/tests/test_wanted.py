"""How many instances the runs of now could use."""

import pytest
from admission_parts import admit_all, fleet, submit
from headrace_coordinator.domain.devices.demand import instances_wanted


def last_step(run, **shares):
    run.totals.last_step = {"wall_s": 10.0, "stage_s": {name: 10.0 * share for name, share in shares.items()}}


def test_runs_that_wait_are_counted_and_none_wants_nothing():
    state = fleet()
    assert instances_wanted(state) == {"rollout": 0, "trainer": 0, "reward": 0, "simulator": 0}
    submit(state, "a", rollouts=2, trainers=1)
    submit(state, "b", rollouts=1, trainers=2, helpers=1)
    wanted = instances_wanted(state)
    assert (wanted["rollout"], wanted["trainer"], wanted["reward"]) == (3, 4, 1)


@pytest.mark.parametrize(("share", "wanted"), [(0.9, 4), (0.3, 3), (0.05, 2)])
def test_scoring_that_takes_most_of_a_step_wants_one_more_reward_instance(share, wanted):
    state = fleet(rewards=3)
    run = submit(state, "a")
    admit_all(state, 0.0)
    last_step(run, score=share, learn=0.05)
    assert instances_wanted(state)["reward"] == wanted
