"""A run continues from a checkpoint of another one: with its ledger, its prompts and the remaining steps only."""

from __future__ import annotations

import pytest
from harness.gate import Gate
from harness.ledger import audit
from harness.specs import BATCH, GROUPS
from headrace.client import HeadraceError


@pytest.fixture(scope="module")
def origin(fleet, spec_of, tmp_path_factory):
    """A run of 3 steps that has ended, with checkpoints of steps 2 and 3: a pause makes one, and the end."""
    gate = Gate(tmp_path_factory.mktemp("origin") / "gate")
    gate.hold_after(BATCH + 3)
    run = fleet.submit(spec_of(name="origin", steps=3, reward=gate.reward, checkpoint__interval_steps=100))
    gate.wait_until_held()
    fleet.client.pause(run.id)
    gate.open()
    fleet.state(run, "PAUSED")
    fleet.client.resume(run.id)
    run = fleet.succeed(run)
    assert [item.step for item in fleet.client.checkpoints(run.id)] == [3, 2]
    return run


def test_a_fork_makes_the_remaining_steps_with_its_own_settings(fleet, origin):
    done = fleet.headrace(
        *("run", "fork", origin.id, "--at", "2", "--set", "optimizer.lr=1e-4", "--set", "steps=4", "--watch"),
        timeout_s=400,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    listed = next(run for run in fleet.client.list() if run.forked_from == origin.id)
    made = fleet.client.get(listed.id)
    assert made.id.startswith("origin-") and (made.first_step, made.step) == (2, 4)
    assert made.spec["optimizer"]["lr"] == 1e-4 and origin.spec["optimizer"]["lr"] == 5e-4
    found = audit(fleet, made)
    assert len(found.trained) == 2 * BATCH
    assert {prompt for prompt, _ in found.trained} == set(range(2 * GROUPS, 4 * GROUPS))
    assert [step.figures["learning_rate"] for step in fleet.client.metrics(made.id)] == pytest.approx(
        [1e-4] * 2
    )
    restored = [event.data for event in fleet.events(made) if event.type == "version_restored"]
    assert [(each["source_run"], each["frontier_step"]) for each in restored] == [(origin.id, 2)]
    same = {item.version.ordinal: item.version.digest for item in fleet.client.checkpoints(origin.id)}
    assert restored[0]["digest"] == same[2], "the fork begins with the origin's weights"
    assert f"{origin.id} at step 2" in fleet.headrace("run", "get", made.id).stdout


def test_a_fork_of_a_fork_names_its_own_origin(fleet, origin):
    first = fleet.succeed(fleet.client.fork(origin.id, 3, {"steps": 4}))
    second = fleet.succeed(fleet.client.fork(first.id, overrides={"steps": 5}))
    assert (second.forked_from, second.first_step, second.counts.trained) == (first.id, 4, BATCH)


@pytest.mark.parametrize(
    ("at", "changes", "key", "words"),
    [
        (None, {"from_checkpoint.run": "origin-nope"}, "from_checkpoint.run", "did you mean origin-"),
        (1, {}, "from_checkpoint.step", "the nearest is 2; it has checkpoints of steps 2, 3"),
        (None, {}, "steps", "the nearest valid value is 4"),
        (2, {"steps": 2}, "steps", "the nearest valid value is 3"),
        (2, {"algorithm.group_size": 8}, "algorithm.group_size", "set it to 4"),
        (2, {"algorithm.prompts_per_step": 2}, "algorithm.prompts_per_step", "set it to 4"),
    ],
)
def test_a_fork_that_cannot_be_is_refused_by_its_key(fleet, origin, at, changes, key, words):
    runs = len(fleet.client.list())
    with pytest.raises(HeadraceError) as refused:
        fleet.client.fork(origin.id, at, changes)
    (problem,) = refused.value.problems
    assert problem.key == key and words.format(id=origin.id) in problem.fix
    assert len(fleet.client.list()) == runs


def test_the_command_refuses_an_unknown_run(fleet, origin):
    done = fleet.headrace("run", "fork", origin.id + "x")
    assert done.returncode == 2 and f"did you mean {origin.id}?" in done.stderr


def test_a_running_run_without_a_checkpoint_is_told_how_to_get_one(fleet, spec_of, gate):
    gate.hold_after(3)
    run = fleet.submit(spec_of(name="young", reward=gate.reward))
    gate.wait_until_held()
    with pytest.raises(HeadraceError) as refused:
        fleet.client.fork(run.id)
    assert f"headrace run pause {run.id}" in refused.value.problems[0].fix
    fleet.client.cancel(run.id)
    gate.open()
    assert "it has no checkpoint" in fleet.state(run, "CANCELLED").reason


def test_a_fork_saves_what_it_began_with_and_goes_back_to_that(fleet, origin, tmp_path):
    gate = Gate(tmp_path / "gate")
    gate.hold_after(BATCH + 3)
    changes = {"steps": 5, "reward": gate.reward, "checkpoint.interval_steps": 100}
    run = fleet.client.fork(origin.id, 2, changes)
    gate.wait_until_held()
    fleet.reach(run, 3)
    fleet.replaced("trainer-0", fleet.kill("trainer-0"))
    gate.open()
    run = fleet.succeed(run)
    found = audit(fleet, run)
    assert len(found.trained) == 3 * BATCH and found.rewinds == 1 and len(found.abandoned) == 1
    restored = [event.data for event in fleet.events(run) if event.type == "version_restored"]
    # Its origin may prune its own checkpoint: the fork's first is saved before its first step.
    assert [(each.get("source_run", ""), each["frontier_step"]) for each in restored] == [
        (origin.id, 2),
        ("", 2),
    ]
