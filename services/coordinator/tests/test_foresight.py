"""What a submission says of a run that would teach little, from its data and numbers alone."""

import json

import pytest
from headrace_coordinator.api.submission import submission
from submission_parts import FLEET, spec_of, submission_of

ROWS = [{"question": f"{n} + 1 =", "answer": str(n + 1)} for n in range(40)]


@pytest.fixture
def noted(tmp_path):
    """The note of a run on rows."""

    def note(rows=ROWS, **changes):
        path = tmp_path / "rows.jsonl"
        path.write_text("\n".join(map(json.dumps, rows)))
        data = {"source": "jsonl", "options": {"path": str(path)}}
        spec = spec_of(data=data, **{"algorithm": {"prompts_per_step": 4}, "steps": 8, **changes})
        return submission_of(spec, FLEET).note

    return note


@pytest.mark.parametrize(
    ("rows", "changes", "words"),
    [
        (ROWS, {}, ""),
        ([{**row, "answer": "yes"} for row in ROWS], {}, "every reference is 'yes'"),
        (
            [{**row, "answer": "word " * 40} for row in ROWS],
            {"sampling": {"max_new_tokens": 8}},
            "40 of 40 references",
        ),
        (ROWS, {"algorithm": {"prompts_per_step": 64}}, "64 prompts of 40 items"),
        (ROWS, {"steps": 2000}, "each of 40 items 200 times"),
        (
            [{**row, "question": row["question"] * 40} for row in ROWS],
            {"model": {"path": "owner/model", "max_context": 24}, "sampling": {"max_new_tokens": 8}},
            "every prompt has 280 characters or more, and the context 24 tokens: all would be dropped",
        ),
    ],
)
def test_what_is_foreseen_is_said(noted, rows, changes, words):
    assert words in noted(rows, **changes) if words else noted(rows, **changes) == ""


def test_a_look_at_a_large_set_is_a_look_at_some_items_of_all_of_it(noted, monkeypatch):
    monkeypatch.setattr(submission, "LOOKED_AT", 16)
    rows = [{"question": f"q{n}", "answer": "yes" if n else "no"} for n in range(400)]
    assert "every reference" in noted(rows), "one in four hundred is not looked at"


def test_answers_longer_than_a_local_models_context_are_foreseen(noted, tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "qwen3", "max_position_embeddings": 64}')
    model = {"path": str(tmp_path)}
    assert noted(model=model, sampling={"max_new_tokens": 32}) == ""
    assert "max_new_tokens is 64, and the model's context is 64 tokens" in noted(
        model=model, sampling={"max_new_tokens": 64}
    )
