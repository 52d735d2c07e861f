"""What a fork must agree on with its origin: the run, its checkpoints, the shape of a batch, steps that are left."""

import pytest
from headrace_coordinator.api.submission.fleet_view import FleetView
from headrace_coordinator.api.submission.local_rules import fork
from headrace_coordinator.api.submission.submission import Origin, Submission
from headrace_schema.problems import sentence
from headrace_schema.resources.views import CheckpointView, PolicyView, RunView
from headrace_schema.spec import RunSpec


def spec_of(**changes):
    made = {
        "steps": 9,
        "model": {"path": "owner/model"},
        "data": {"source": "copy_digits"},
        "reward": {"scorers": [{"name": "exact"}]},
        "algorithm": {"group_size": 4, "prompts_per_step": 2},
        "from_checkpoint": {"run": "sums-1", "step": 4},
    }
    return RunSpec.model_validate(made | changes)


def problems(saved=(8, 4), ended=False, **changes):
    spec = spec_of(from_checkpoint=None).model_dump(mode="json")
    state = "SUCCEEDED" if ended else "RUNNING"
    origin = RunView.from_json({"id": "sums-1", "state": state, "spec": spec})
    return {item.key: sentence(item) for item in check_fork(spec_of(**changes), origin, saved)}


def check_fork(spec, run, steps, saving=False):
    """Problems of a fork of a run that has checkpoints of these steps, the newest first."""
    policy = PolicyView(number=1, parent=0, ordinal=1, digest="d")
    checkpoints = [CheckpointView(name=f"c-{s}", version=policy, step=s, size_bytes=1) for s in steps]
    origin = Origin(run.id, run, [run.id], checkpoints, saving)
    return list(fork(Submission(spec, FleetView({}, {}, []), origin=origin)))


def test_what_differs_in_other_ways_is_free():
    assert problems() == {}
    assert problems(seed=5, data={"source": "copy_digits", "options": {"digits": 2}}) == {}
    assert problems(from_checkpoint={"run": "sums-1"}) == {}


@pytest.mark.parametrize(
    ("changes", "key", "words"),
    [
        (
            {"from_checkpoint": {"run": "sums-1", "step": 5}},
            "from_checkpoint.step",
            "the nearest is 4; it has",
        ),
        ({"steps": 4}, "steps", "the nearest valid value is 5"),
        ({"steps": 8, "from_checkpoint": {"run": "sums-1"}}, "steps", "9, or an earlier checkpoint: 4"),
        ({"algorithm": {"group_size": 2, "prompts_per_step": 4}}, "algorithm.group_size", "set it to 4"),
        (
            {"algorithm": {"group_size": 4, "prompts_per_step": 4}},
            "algorithm.prompts_per_step",
            "would have other prompts; set it to 2",
        ),
        ({"steps": 4, "ended": True, "saved": ()}, "from_checkpoint.run", "name a run that has one"),
        ({"saved": ()}, "from_checkpoint.run", "make one with: headrace run pause sums-1"),
    ],
)
def test_what_cannot_be_is_named_by_its_key(changes, key, words):
    given = changes.pop("saved", (8, 4))
    found = problems(given, **changes)
    assert words in found[key]


def test_a_fork_may_wait_for_the_checkpoint_that_is_being_written():
    """Beyond `checkpoint.keep: 1` the known one is deleted, and the next one is not known yet."""
    origin = RunView.from_json(
        {"id": "sums-1", "state": "RUNNING", "spec": spec_of().model_dump(mode="json")}
    )
    newest = spec_of(from_checkpoint={"run": "sums-1"})
    assert check_fork(newest, origin, (), saving=True) == []
    assert check_fork(newest, origin, ()) and check_fork(spec_of(), origin, (), saving=True)
    other = spec_of(from_checkpoint={"run": "sums-1"}, algorithm={"group_size": 2, "prompts_per_step": 4})
    assert check_fork(other, origin, (), saving=True)


def test_an_unknown_origin_names_the_nearest():
    fixes = []
    for known in (["sums-1", "other"], []):
        spec = spec_of(from_checkpoint={"run": "sums-2"})
        submission = Submission(spec, FleetView({}, {}, []), origin=Origin("sums-2", None, known))
        (problem,) = fork(submission)
        assert problem.key == "from_checkpoint.run"
        fixes.append(problem.fix)
    assert "did you mean sums-1?" in fixes[0] and "headrace run list" in fixes[1]
