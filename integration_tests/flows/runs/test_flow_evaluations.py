"""Evaluations of models and checkpoints on suites: the same figures as a run's own, over kills, beside runs."""

from __future__ import annotations

import pytest
from harness.waiting import wait_for
from headrace.client import HeadraceError

HELDOUT = 8
SUITE = {"name": "items", "options": {"source": "copy_digits", "options": {"digits": 3}, "heldout": HELDOUT}}
PROMPT = {"template": "{question}", "chat": False}


def evaluation(**sections):
    spec = {
        "suite": SUITE,
        "prompt": PROMPT,
        "sampling": {"max_new_tokens": 4},
        "rollout": {"max_concurrency": 4},
    }
    return {**spec, **sections}


def ended(fleet, made, state="SUCCEEDED"):
    found = wait_for(
        lambda: now if (now := fleet.client.evaluation(made.id)).ended else None, f"{made.id} to end", 240.0
    )
    assert found.state == state, f"{found.id} {found.state}: {found.reason}"
    return found


@pytest.fixture(scope="module")
def trained(fleet, spec_of):
    """A run of two steps with a checkpoint of each."""
    return fleet.succeed(fleet.submit(spec_of(steps=2, checkpoint={"interval_steps": 1, "keep": 5})))


def test_a_checkpoint_has_the_score_that_its_run_measured(fleet, trained):
    checkpoint = evaluation(checkpoint={"run": trained.id}, reward=trained.spec["reward"])
    found = ended(fleet, fleet.client.evaluate(checkpoint))
    own = trained.evaluations[-1]
    assert own.step == found.checkpoint_step == 2 and found.checkpoint_run == trained.id
    (greedy,) = found.result.modes
    assert (greedy.mode, found.answers) == ("greedy", HELDOUT)
    assert greedy.score == pytest.approx(own.score) and found.result.parts == pytest.approx(own.parts)
    assert found.weights_digest == fleet.client.checkpoints(trained.id)[0].version.digest
    assert found.data_digest and found.versions and found.spec["seed"] == 0
    transcripts = fleet.client.trajectories(found.id)
    assert {line.prompt_ordinal for line in transcripts} == set(range(HELDOUT))
    assert fleet.client.evaluations()[0].id == found.id
    assert not [lease for lease in fleet.client.leases().leases if lease.run == found.id]


def test_two_checkpoints_are_compared_item_by_item(fleet, trained):
    first, second = (
        ended(fleet, fleet.client.evaluate(evaluation(checkpoint={"run": trained.id, "step": step})))
        for step in (1, 2)
    )
    found = fleet.client.compare(first.id, second.id)
    (difference,) = found.differences
    scores = [each.result.modes[0].score for each in (first, second)]
    assert found.items == HELDOUT and [difference.first, difference.second] == pytest.approx(scores)
    assert difference.wins + difference.losses + difference.ties == HELDOUT
    assert 0 <= difference.p_value <= 1 and difference.low <= difference.difference <= difference.high
    other = evaluation(checkpoint={"run": trained.id}, suite={**SUITE, "limit": 3})
    others = ended(fleet, fleet.client.evaluate(other))
    with pytest.raises(HeadraceError, match="asked other items") as refusal:
        fleet.client.compare(first.id, others.id)
    assert [each.key for each in refusal.value.problems] == ["second"]
    with pytest.raises(HeadraceError, match="no evaluation"):
        fleet.client.compare(trained.id, first.id)


def test_the_example_runs_from_the_command_line(fleet, tiny_model):
    found = fleet.json(
        *("eval", "examples/eval/tiny.yaml", "--set", f"model.path={tiny_model}", "--set", "suite.limit=4")
    )
    assert (found["state"], found["answers"]) == ("SUCCEEDED", 16)
    assert [each["mode"] for each in found["result"]["modes"]] == ["avg@4", "pass@4", "maj@4"]
    assert found["id"] in {each["id"] for each in fleet.json("eval", "list")["evaluations"]}
    same = fleet.json("eval", "compare", found["id"], found["id"])["differences"]
    assert all((each["difference"], each["wins"], each["losses"]) == (0.0, 0, 0) for each in same)


@pytest.mark.nightly  # quick: the seeded simulation kills both while suites are evaluated
def test_it_survives_a_killed_rollout_and_coordinator_with_the_same_answers(fleet, tiny_model, gate):
    sampled = evaluation(
        model={"path": str(tiny_model), "dtype": "float32"},
        samples=4,
        sampling={"temperature": 1.0, "max_new_tokens": 4},
        deterministic=True,
        seed=5,
        reward={"scorers": gate.reward["scorers"], "timeout_s": 900.0},
    )
    calm = ended(fleet, fleet.client.evaluate(sampled))
    gate.hold_after(20)  # A block is 4 items of 4 answers: the second one of two is being scored.
    made = fleet.client.evaluate(sampled)
    gate.wait_until_held()
    pids = {name: fleet.kill(name) for name in ("rollout-0", "coordinator")}
    for name, pid in pids.items():
        fleet.replaced(name, pid)
    gate.open()
    found = ended(fleet, made)
    progress = [e.data["answers"] for e in fleet.client.events(found.id) if e.type == "evaluation_progressed"]
    assert progress == [0, 16, 32], "what was scored before the kills was not made again"
    assert [each.mode for each in found.result.modes] == ["avg@4", "pass@4", "maj@4"]
    assert found.result == calm.result and found.answers == 4 * HELDOUT

    def answers(each):
        lines = fleet.client.trajectories(each.id)
        assert len(lines) == 4 * HELDOUT
        return {(line.prompt_ordinal, line.sample_index): (line.completion, line.reward) for line in lines}

    assert answers(found) == answers(calm)


def test_a_queued_one_says_its_place_and_can_be_cancelled(fleet, spec_of, gate, tiny_model):
    gate.hold_after(4)
    run = fleet.submit(spec_of(reward=gate.reward, data__heldout=0))
    gate.wait_until_held()
    model = {"path": str(tiny_model), "dtype": "float32"}
    made = fleet.client.evaluate(evaluation(model=model))
    queued = wait_for(
        lambda: now if (now := fleet.client.evaluation(made.id)).place else None, "its place in the queue"
    )
    assert queued.place == 1 and any(run.id in reason for reason in queued.waiting_for)
    fleet.client.cancel(made.id)
    assert "0 answers" in ended(fleet, made, "CANCELLED").reason
    gate.open()
    fleet.succeed(run)


@pytest.mark.parametrize(
    ("sections", "key", "words"),
    [
        ({"checkpoint": {"run": "no-such-run"}}, "checkpoint.run", "there is no run"),
        ({"checkpoint": {"run": "TRAINED", "step": 7}}, "checkpoint.step", "the nearest is 2"),
        ({"model": {"path": "/no/such/model"}}, "model.path", "does not exist"),
        ({"suite": {"name": "gms8k"}}, "suite.name", "did you mean 'gsm8k'"),
        ({"suite": {"name": "gsm8k", "options": {"path": "/no/file.jsonl"}}}, "suite.options.path", "cannot"),
        ({"suite": {"name": "gsm8k", "options": {"paths": "x"}}}, "suite.options.paths", "did you mean path"),
        ({"suite": {**SUITE, "limit": 9}}, "suite.limit", "nearest valid value is 8"),
        ({"modes": ["pass@4"]}, "modes[0]", "set samples: 4"),
        ({"samples": 2}, "samples", "would be the same"),
        ({"smaples": 2}, "smaples", "did you mean samples"),
    ],
)
def test_bad_input_is_named(fleet, trained, sections, key, words):
    base = {} if "model" in sections else {"checkpoint": {"run": "TRAINED"}}
    spec = evaluation(**{**base, **sections})
    if spec.get("checkpoint", {}).get("run") == "TRAINED":
        spec["checkpoint"] = {**spec["checkpoint"], "run": trained.id}
    with pytest.raises(HeadraceError) as refusal:
        fleet.client.evaluate(spec)
    problems = {each.key: f"{each.problem}; {each.fix}" for each in refusal.value.problems}
    assert words in problems[key], problems
