"""Suites and their examples: every example is a spec, every suite reads a file of its form and is judged as it says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from headrace.client.specs import load_spec
from headrace_coordinator.api.submission import local_rules
from headrace_coordinator.api.submission.evaluations import (
    in_users_keys,
    resolve_evaluation,
    suite_evaluation,
)
from headrace_coordinator.api.submission.fleet_view import FleetView
from headrace_coordinator.api.submission.rules import problems_of
from headrace_coordinator.api.submission.submission import Submission
from headrace_coordinator.data import Dataset
from headrace_coordinator.suites import SUITES, open_suite
from headrace_coordinator.suites.contract import check_suite
from headrace_coordinator.suites.extracting import plain_math
from headrace_reward.scorers import SCORERS, choose
from headrace_reward.scorers.base import Answer
from headrace_schema.evaluating import EvaluationSpec
from headrace_schema.problems import Impossible

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "eval"
EXAMPLES = sorted(path.stem for path in FOLDER.glob("*.yaml"))
GPQA = {f"Incorrect Answer {n}": f"wrong {n}" for n in (1, 2, 3)}
ROWS = {
    "gsm8k": [
        {"question": "1 + 2?", "answer": "It is 3.\n#### 3"},
        {"question": "2 + 2?", "answer": "#### 4"},
    ],
    "math500": [{"problem": "Half of one?", "answer": "\\frac{1}{2}"}, {"problem": "x?", "answer": "x"}],
    "aime24": [{"problem": "How many?", "answer": "033"}, {"problem": "And now?", "answer": "204"}],
    "aime25": [{"problem": "How many?", "answer": "70"}, {"problem": "And now?", "answer": "588"}],
    "gpqa_diamond": [{"Question": "Which?", "Correct Answer": "right", **GPQA}],
}
RIGHT = {
    "gsm8k": "First 1, then 2: the answer is {}.",
    "math500": "So we get \\boxed{{{}}}.",
    "aime24": "Therefore \\boxed{{{}}}",
    "aime25": "Therefore \\boxed{{{}}}",
    "gpqa_diamond": "Not A, so…\nAnswer: {}",
}


def asked(spec):
    """The run that carries the evaluation out, once its items are known; raises `Impossible`."""
    run, evaluated = resolve_evaluation(EvaluationSpec.model_validate(spec), None)
    try:
        data = Dataset.open(run.data, run.seed)
    except Impossible as error:
        data = error
    submission = Submission(run, FleetView({}, {}, []), data, evaluated=evaluated)
    if problems := problems_of(submission, (local_rules.data, local_rules.answers)):
        raise Impossible(in_users_keys(problems, evaluated.suite))
    return submission


@pytest.fixture
def rows_of(tmp_path):
    """A local file in a suite's form."""

    def write(name):
        file = tmp_path / f"{name}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in ROWS[name]))
        return str(file)

    return write


def test_every_suite_has_an_example():
    named = {load_spec(FOLDER / f"{name}.yaml")["suite"]["name"] for name in EXAMPLES}
    assert named == set(SUITES.names())


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_example_is_an_evaluation_whose_scorers_exist(name):
    spec = EvaluationSpec.model_validate(load_spec(FOLDER / f"{name}.yaml"))
    suite = open_suite(spec.suite.name, spec.suite.options)
    assert {scorer.name for scorer in suite.reward().scorers} <= set(SCORERS.names())


@pytest.mark.parametrize("name", ["tiny", "tiny_sums", "smollm2"])
def test_the_example_without_files_opens(name):
    made = asked(load_spec(FOLDER / f"{name}.yaml"))
    assert suite_evaluation(made).items == {"tiny": 128, "tiny_sums": 200, "smollm2": 100}[name]


@pytest.mark.parametrize("name", sorted(ROWS))
def test_a_local_file_is_asked_and_judged(name, rows_of):
    spec = load_spec(FOLDER / f"{name}.yaml", {"suite.options.path": rows_of(name)})
    made = asked(spec)
    assert suite_evaluation(made).items == len(ROWS[name])
    suite = check_suite(name, spec["suite"]["options"])
    data = Dataset.open(made.spec.data, made.spec.seed)
    for item in data.asked():
        assert item.question in data.prompt(item).chat[-1]["content"]
        (scorer,) = suite.reward().scorers
        judge = choose(scorer.name, scorer.options).build()
        for reference, reward in ((item.answer, 1.0), ("999", 0.0)):
            completion = RIGHT[name].format(reference)
            answer = Answer(item.question, completion, item.answer)
            assert judge.score(answer) == reward, completion
        chosen = suite.extract(RIGHT[name].format(item.answer))
        assert chosen == plain_math(item.answer), "the majority votes on what is judged"


def test_a_missing_file_and_a_limit_beyond_the_items_are_named_in_the_users_keys(rows_of, tmp_path):
    model = {"model": {"path": "owner/model"}}
    with pytest.raises(Impossible, match=r"suite\.options\.path"):
        asked({**model, "suite": {"name": "aime24", "options": {"path": str(tmp_path / "gone.jsonl")}}})
    with pytest.raises(Impossible, match=r"suite\.limit: the suite has 2 items"):
        asked({**model, "suite": {"name": "gsm8k", "options": {"path": rows_of("gsm8k")}, "limit": 3}})
    with pytest.raises(Impossible, match=r"suite\.options\.dataset: .*did you mean chain_sum"):
        asked({**model, "suite": {"name": "reasoning_gym", "options": {"dataset": "chain_sums"}}})
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(Impossible, match=r"suite\.name: the source jsonl has no item"):
        asked({**model, "suite": {"name": "gsm8k", "options": {"path": str(tmp_path / "empty.jsonl")}}})
