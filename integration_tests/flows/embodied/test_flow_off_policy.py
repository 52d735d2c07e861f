"""Learning off policy with real services: a pendulum's episodes are stored, used, counted, and outlive a kill."""

from __future__ import annotations

from typing import Any

import pytest
from harness.fleet import Fleet
from harness.ledger import audit
from headrace_robots.trainer.replay.records import read_uses

pytestmark = pytest.mark.usefixtures("one_simulator")
STEPS, BATCH, LENGTH = 6, 4, 16


def spec(**more: Any) -> dict[str, Any]:
    """A short run of SAC, which saves every other step."""
    options = {"batch_size": 32, "critic_hidden": [16], "updates_per_action": 0.5, "learning_starts": 64}
    return {
        "name": "pendulum-sac",
        "workflow": "embodied",
        "steps": STEPS,
        "model": {"policy": {"kind": "mlp", "head": "squashed", "activation": "relu", "hidden": [16]}},
        "environment": {"tasks": ["Pendulum-v1"], "count": 4, "max_episode_steps": LENGTH},
        "data": {"heldout": 4, "options": {"starts": 64}},
        "algorithm": {"name": "sac", "group_size": 1, "prompts_per_step": BATCH, "options": options},
        "optimizer": {"lr": 1e-3, "beta2": 0.999},
        "evaluation": {"every": STEPS},
        "checkpoint": {"interval_steps": 2},
        **more,
    }


def test_a_killed_trainer_costs_no_episode_and_no_use_is_counted_twice(fleet: Fleet):
    run = fleet.submit(spec())
    fleet.reach(run, 3)
    killed = fleet.kill("trainer-0")
    fleet.replaced("trainer-0", killed)
    run = fleet.succeed(run)
    found = audit(fleet, run)
    assert len(found.trained) == STEPS * BATCH
    (path,) = (fleet.data_dir / "runs" / run.id / "replay").glob("*.sqlite")
    uses = read_uses(path)
    # The store has the ledger's episodes, once each, and the ratio has held over the kill.
    assert sorted(use.slot for use in uses) == sorted(found.trained)
    updates = (STEPS * BATCH * LENGTH - 64) // 2
    assert sum(use.uses for use in uses) == 32 * updates
    last = fleet.client.metrics(run.id)[-1].figures
    assert (last["replay_updates"], last["updates_per_action"]) == (updates, 0.5)
    assert (last["replay_chunks"], last["replay_episodes"]) == (STEPS * BATCH * LENGTH, STEPS * BATCH)
    assert run.evaluations[-1].measure == "return"


@pytest.mark.nightly  # quick: the kill above, of one rank
def test_two_ranks_store_and_draw_their_own_episodes_over_a_kill(own_fleet):
    with own_fleet("--simulator", "1", "--trainer", "2") as fleet:
        fleet.ready("simulator-0", "trainer-0", "trainer-1")
        run = fleet.submit(spec(trainer={"ranks": 2}))
        fleet.reach(run, 3)
        killed = fleet.kill("trainer-1")
        fleet.replaced("trainer-1", killed)
        run = fleet.succeed(run)
        trained = audit(fleet, run).trained
        paths = sorted((fleet.data_dir / "runs" / run.id / "replay").glob("*.sqlite"))
        assert [path.name for path in paths] == ["000-of-002.sqlite", "001-of-002.sqlite"]
        uses = [read_uses(path) for path in paths]
        assert sorted(use.slot for own in uses for use in own) == sorted(trained)
        updates = (STEPS * BATCH * LENGTH - 64) // 2
        assert [sum(use.uses for use in own) for own in uses] == [16 * updates] * 2, "half of each batch"
        last = fleet.client.metrics(run.id)[-1].figures
        assert (last["replay_updates"], last["replay_episodes"]) == (updates, STEPS * BATCH)


@pytest.mark.nightly  # quick: the kill above; staleness: test_robots_off_policy.py
def test_actors_that_run_ahead_are_as_stale_as_they_may_be_and_it_is_told(fleet: Fleet):
    given = spec(placement={"mode": "disaggregated"}, checkpoint={"enabled": False})
    given["algorithm"]["max_staleness"] = 2
    run = fleet.succeed(fleet.submit(given))
    found = audit(fleet, run)
    assert len(found.trained) == STEPS * BATCH
    figures = [step.figures for step in fleet.client.metrics(run.id)]
    assert 0 < max(each["staleness_max"] for each in figures) <= 2
    assert figures[-1]["replay_age_mean"] > 1, "what is learned from is older than what is added"


def test_what_off_policy_runs_lack_is_refused_by_key(fleet: Fleet):
    """As the run opens, before anything is made."""
    given = spec()
    given["model"]["policy"]["head"] = "gaussian"
    run = fleet.submit(given)
    found = fleet.state(run, "FAILED")
    assert "model.policy.head: sac needs squashed" in found.reason
