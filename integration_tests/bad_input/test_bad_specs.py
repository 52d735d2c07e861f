"""Specs that cannot work: refused before anything starts, with the key, the reason and what to write instead."""

from __future__ import annotations

import pytest
import yaml
from harness.processes import ROOT
from harness.waiting import wait_for
from headrace.client import HeadraceError, load_spec, load_specs
from headrace_cli.dry_run import check_offline
from headrace_cli.errors import CommandError

EXAMPLES = ROOT / "examples"


def unreadable(tmp_path):
    (tmp_path / "empty").mkdir()
    return str(tmp_path / "empty")


def placed(mode, device):
    return {"placement": {"mode": mode, "rollout": [device], "trainer": [device]}}


BAD = {
    "unknown section": ({"optimiser": {"lr": 1e-4}}, "optimiser", "optimizer"),
    "unknown key": ({"algorithm__group_sise": 4}, "algorithm.group_sise", "group_size"),
    "ill-typed": ({"steps": "many"}, "steps", ""),
    "a number as text": ({"optimizer__lr": "fast"}, "optimizer.lr", ""),
    "out of range": ({"data__heldout": -1}, "data.heldout", "0"),
    "groups of one": ({"algorithm__group_size": 1}, "algorithm.group_size", "2"),
    "indivisible": (
        {"algorithm__prompts_per_step": 3, "trainer__ranks": 2},
        "algorithm.prompts_per_step",
        "4",
    ),
    "truncated sampling": ({"sampling__top_p": 0.9}, "sampling.top_p", "1"),
    "a device twice": (placed("disaggregated", "cpu:0"), "placement.trainer", "collocated"),
    "a device that is not there": (placed("collocated", "cpu:7"), "placement.rollout[0]", "cpu:"),
    "more instances than there are": ({"rollout__instances": 9}, "rollout.instances", "headrace scale"),
    "unknown scorer": ({"reward": {"scorers": [{"name": "exakt"}]}}, "reward.scorers[0].name", "exact"),
    "a scorer without function": ({"reward": {"scorers": [{"name": "mine.py"}]}}, "reward.scorers[0].name", "mine.py:"),
    "an edge from nowhere": (
        {
            "workflow": {
                "stages": {
                    "generate": {"service": "rollout"},
                    "score": {"service": "reward"},
                    "learn": {"service": "trainer"},
                },
                "edges": [{"source": "generate", "target": "score"}, {"source": "scroe", "target": "learn"}],
            }
        },
        "workflow.edges[1].source",
        "did you mean score",
    ),
    "unknown engine": ({"rollout__engine": "transformer"}, "rollout.engine", "transformers"),
    "unknown algorithm": ({"algorithm__name": "grpoo"}, "algorithm.name", "grpo"),
    "unknown option of an algorithm": (
        {"algorithm__options": {"normalise_std": False}}, "algorithm.options.normalise_std", "normalize_std"
    ),
    "an option of no engine": (
        {"rollout__engine_options": {"paged": True}}, "rollout.engine_options.paged", "remove it"
    ),
    "an ill-typed option of a backend": (
        {"trainer__backend_options": {"shard": 3}},
        "trainer.backend_options.shard",
        "state",
    ),
    "unknown option of a scorer": (
        {"reward": {"scorers": [{"name": "exact", "options": {"case": True}}]}},
        "reward.scorers[0].options.case",
        "ignore_case",
    ),
    "unknown source": ({"data__source": "copy_digit"}, "data.source", "copy_digits"),
    "unknown option of a source": ({"data__options": {"digit": 3}}, "data.options.digit", "digits"),
    "too many held out": ({"data__heldout": 5000}, "data.heldout", ""),
    "a place that is no field": ({"data__prompt": {"template": "{questoin}"}}, "data.prompt.template", "question"),
    "no model there": ({"model__path": "/no/such/model"}, "model.path", "exists"),
    "no model inside": ({"model__path": unreadable}, "model.path", "Hugging Face"),
    "an answer without room": ({"model__max_context": 4}, "sampling.max_new_tokens", "less than 4"),
}  # fmt: skip


def spec_with(spec_of, overrides, tmp_path):
    values = {key: value(tmp_path) if callable(value) else value for key, value in overrides.items()}
    return spec_of(**values)


@pytest.mark.parametrize("name", BAD)
def test_over_http_it_is_422_with_key_and_fix(fleet, spec_of, tmp_path, name):
    overrides, key, fix = BAD[name]
    before = len(fleet.client.list())
    with pytest.raises(HeadraceError) as refused:
        fleet.submit(spec_with(spec_of, overrides, tmp_path))
    error = refused.value
    assert (error.status, error.reason) == (422, "INVALID")
    found = [problem for problem in error.problems if problem.key == key]
    assert found, f"{key} is not among {error.problems}"
    assert found[0].problem and fix in found[0].fix, found
    assert len(fleet.client.list()) == before, "nothing was queued"


@pytest.mark.parametrize("dry_run", [True, False])
@pytest.mark.parametrize("name", ["unknown key", "ill-typed", "unknown scorer"])
def test_on_the_command_line_it_is_exit_code_2(fleet, spec_of, tmp_path, name, dry_run):
    overrides, key, fix = BAD[name]
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(spec_with(spec_of, overrides, tmp_path)))
    done = fleet.headrace("run", "submit", file, *(["--dry-run"] if dry_run else []))
    assert done.returncode == 2
    assert key in done.stderr and fix in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("def score(prompt, completion, reference, metadata)\n    return 1.0\n", "SyntaxError"),
        ("def score(prompt, completion, reference, metadata):\n    return 'good'\n", "not a number"),
        ("def other(prompt, completion, reference, metadata):\n    return 1.0\n", "score"),
    ],
)
def test_a_users_scorer_that_cannot_work_is_refused_with_its_key(fleet, spec_of, tmp_path, source, said):
    (tmp_path / "mine.py").write_text(source)
    refused_scorer(fleet, spec_of, {"name": f"{tmp_path / 'mine.py'}:score"}, "reward.scorers[0].name", said)


@pytest.mark.parametrize(
    ("scorer", "key", "said"),
    [
        ({"name": "/no/such/mine.py:score"}, "reward.scorers[0].name", "mine.py"),
        ({"name": "regex", "options": {"patern": "1"}}, "reward.scorers[0].options.pattern", "missing"),
    ],
)
def test_a_scorer_that_cannot_be_opened_is_refused_with_its_key(fleet, spec_of, scorer, key, said):
    refused_scorer(fleet, spec_of, scorer, key, said)


def refused_scorer(fleet, spec_of, scorer, key, said):
    with pytest.raises(HeadraceError) as refused:
        fleet.submit(spec_of(reward={"scorers": [scorer]}))
    problems = {problem.key: problem.problem for problem in refused.value.problems}
    assert refused.value.status == 422 and said in problems[key], problems


def test_a_model_that_cannot_be_loaded_ends_the_run_with_a_sentence(fleet, spec_of, tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "no-such-architecture"}')
    (tmp_path / "model.safetensors").write_bytes(b"no tensors")
    try:
        run = fleet.submit(spec_of(model__path=str(tmp_path)))
    except HeadraceError as error:
        assert error.status == 422 and error.problems[0].key == "model.path"
        return
    ended = fleet.client.wait(run.id, 240)
    assert ended.state == "FAILED" and str(tmp_path) in ended.reason
    wait_for(lambda: not fleet.client.leases().leases, "its devices to be free again", 60)


OF_THE_FLEET = {"a device that is not there", "more instances than there are"}
"""What only instances can tell."""
OF_THE_ISSUE = {
    "an option of another algorithm": (
        {"algorithm__name": "dapo", "algorithm__options": {"loss_aggregation": "token-mean"}},
        "algorithm.options.loss_aggregation",
        "",
    ),
    "a scorer's file that is not there": (
        {"reward": {"scorers": [{"name": "/no/such/mine.py:score"}]}},
        "reward.scorers[0].name",
        "",
    ),
}


@pytest.mark.parametrize("name", [*(BAD.keys() - OF_THE_FLEET), *OF_THE_ISSUE])
def test_a_dry_run_says_the_same_with_a_fleet_and_without_one(fleet, spec_of, tmp_path, name):
    overrides, key, _ = {**BAD, **OF_THE_ISSUE}[name]
    spec = load_spec(spec_with(spec_of, overrides, tmp_path))
    with pytest.raises(HeadraceError) as refused:
        fleet.client.check(spec)
    by_fleet = {problem.key for problem in refused.value.problems}
    try:
        alone = {item["key"] for item in check_offline(spec) or ()}
    except CommandError as error:
        alone = {problem.key for problem in error.problems}
    assert key in by_fleet and alone == by_fleet, (alone, by_fleet)


@pytest.mark.parametrize(
    "file", sorted(EXAMPLES.rglob("*.yaml")), ids=lambda file: str(file.relative_to(EXAMPLES))
)
def test_an_example_is_judged_alike_with_a_fleet_and_without_one(fleet, tiny_model, file):
    """But for what instances have: devices, engines, simulators."""
    spec, *_ = load_specs(file)  # What comes after another run is judged once there is one.
    if not {"model", "data"} <= spec.keys():
        pytest.skip("a plan's profile, an evaluation")
    if "policy" not in spec["model"]:
        spec["model"]["path"] = str(tiny_model)
    spec.pop("from_checkpoint", None)
    by_fleet, alone = {}, {}
    try:
        fleet.client.check(spec)
    except HeadraceError as error:
        by_fleet = {problem.key: problem.problem for problem in error.problems}
    try:
        alone = {item["key"]: item["problem"] for item in check_offline(spec) or ()}
    except CommandError as error:
        alone = {problem.key: problem.problem for problem in error.problems}
    of_instances = (
        "placement.",
        "trainer.ranks",
        "trainer.backend",
        "rollout.",
        "environment",
        "reward.load",
    )
    # A fleet tries scorers, too: a judge that is away is refused there alone.
    left = {key for key in by_fleet if not key.startswith((*of_instances, "reward."))}
    assert left <= alone.keys(), (by_fleet, alone)
    assert alone.keys() <= by_fleet.keys(), (alone, by_fleet)
