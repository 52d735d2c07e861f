"""`headrace data` and `headrace reward`: what a run would see and pay, without a fleet."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "tiny"
    subprocess.run(
        [sys.executable, "-m", "headrace_modelkit.presets.tiny", str(path)], check=True, timeout=300
    )
    return path


@pytest.mark.parametrize("peer", ["verl", "trl"])
def test_data_shows_the_rows_of_a_peer_as_the_model_reads_them(headrace, tiny_model, peer):
    spec = str(EXAMPLES / f"from_{peer}" / "run.yaml")
    done = headrace("data", spec, "--set", f"model.path={tiny_model}", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["train"], found["heldout"], found["unanswered"]) == (128, 32, 0)
    assert found["lengths"] == {"unit": "tokens", "shortest": 4, "median": 4, "p99": 4, "longest": 4}
    assert all(len(text) == 4 and text.endswith("=") for text in found["prompts"])


def test_data_says_what_is_left_out_and_why(headrace, tmp_path):
    rows = [
        {"question": "a", "answer": "1", "pass_rate": 0.5},
        {"question": "a", "answer": "2", "pass_rate": 0.5},
        {"question": "much longer", "answer": "1", "pass_rate": 0.5},
        {"question": "b", "answer": "1", "pass_rate": 1.0},
        {"question": "c", "pass_rate": 0.5},
        {"question": "d", "answer": "1", "pass_rate": 0.5},
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "run.yaml").write_text(
        "model: {path: none/such}\nreward: {scorers: [{name: exact}]}\n"
        "data: {source: jsonl, exclude: [d], options: {path: rows.jsonl, longest_question: 5, "
        "pass_rate: {at_most: 0.9}}}\n"
    )
    shown = headrace("data", "run.yaml").stdout
    assert "2 items: 2 to train on, 0 held out" in shown
    assert "1 repeat an earlier one" in shown and "1 are answered in more than one way" in shown
    assert "1 left out: longer than longest_question = 5" in shown
    assert "1 left out: pass_rate outside 0 to 0.9" in shown and "1 left out: named by data.exclude" in shown
    assert "1 of those to train on have no answer" in shown and "prompts, characters: shortest 7" in shown


def test_data_reads_what_is_evaluated_beside_the_run(headrace, tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"question": "a", "answer": "1"}\n')
    (tmp_path / "other.jsonl").write_text('{"question": "a"}\n{"question": "b"}\n')
    text = (
        "model: {path: none/such}\nreward: {scorers: [{name: exact}]}\n"
        "data: {source: jsonl, options: {path: rows.jsonl}}\n"
        "evaluation: {data: {other: {source: jsonl, options: {path: other.jsonl}}}}\n"
    )
    (tmp_path / "run.yaml").write_text(text)
    done = headrace("data", "run.yaml")
    assert "evaluation.data.other: 2 items" in done.stdout, done.stderr
    (tmp_path / "other.jsonl").write_text("no rows")
    done = headrace("data", "run.yaml")
    assert done.returncode == 2 and "evaluation.data.other.options.path" in done.stderr


def test_data_names_the_row_that_is_wrong(headrace, tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"question": "a", "answer": "1"}\n{"qestion": "b"}\n')
    (tmp_path / "run.yaml").write_text(
        "model: {path: none/such}\nreward: {scorers: [{name: exact}]}\n"
        "data: {source: jsonl, options: {path: rows.jsonl}}\n"
    )
    done = headrace("data", "run.yaml")
    assert done.returncode == 2 and "line 2 of" in done.stderr and "did you mean qestion?" in done.stderr


def test_reward_scores_a_file_as_a_run_would(headrace, tmp_path):
    answers = [
        {"completion": text, "reference": "123", "metadata": {"solution": "123"}}
        for text in ("123", "129", "9")
    ]
    lines = (json.dumps({**row, "prompt": "of two\u2028lines"}, ensure_ascii=False) for row in answers)
    (tmp_path / "answers.jsonl").write_text("\n".join(lines))
    spec = str(EXAMPLES / "own_reward.yaml")
    found = json.loads(headrace("reward", spec, "--on", "answers.jsonl", "--json").stdout)
    assert [row["reward"] for row in found["answers"]] == pytest.approx([1.2, 2 / 3 + 0.2, 0.0])
    shown = headrace("reward", spec, "--on", "answers.jsonl", "--evaluation")
    assert "3 answers: mean reward 0.3333" in shown.stdout, shown.stderr


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "holds no answer"),
        ("{", "line 1"),
        ('{"prompt": "?"}', "no text under 'completion'"),
        ('{"completion": "1", "tokens": "many"}', "'many' as 'token_count'"),
    ],
)
def test_reward_names_the_line_that_is_wrong(headrace, tmp_path, text, words):
    (tmp_path / "answers.jsonl").write_text(text)
    done = headrace("reward", str(EXAMPLES / "own_reward.yaml"), "--on", "answers.jsonl")
    assert done.returncode == 2 and words in done.stderr and "Traceback" not in done.stderr
