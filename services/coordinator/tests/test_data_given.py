"""Answers that rows give: which they are, what they are worth, and which rows are refused by their number."""

from __future__ import annotations

import json

import pytest
from headrace_coordinator.data.dataset import Dataset
from headrace_coordinator.data.given import GivenForm
from headrace_schema.problems import Impossible
from headrace_schema.sections.generating import DataSection

SAID = [{"role": "user", "content": "2+2"}]
PAIR = {"chosen": [*SAID, {"role": "assistant", "content": "4"}]}
SUPERVISED, PAIRS, LABELS = GivenForm("imitated"), GivenForm("pairs"), GivenForm("labels")


def answers(tmp_path, form, given, *rows, **options):
    """The answers of each row, in the order of the rows."""
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    section = DataSection(source="jsonl", options={"path": str(path), "form": form, **options})
    data = Dataset.open(section, 0, given=given)
    other = data.train_item(0)
    items = sorted((data.train_item(n) for n in range(data.train_size)), key=lambda item: str(item.metadata))
    return [(data.prompt(item).chat, given.answers(item, other)) for item in items]


def test_rows_with_one_prompt_and_other_answers_are_other_rows(tmp_path):
    found = answers(tmp_path, "trl", SUPERVISED, *({"prompt": "a", "completion": text} for text in "xyx"))
    assert [each for _, each in found] == [[("x", 1.0)], [("y", 1.0)]]


def test_a_row_counts_by_the_number_that_is_named(tmp_path):
    row = {"question": "a", "answer": "b", "w": 0.25}
    assert answers(tmp_path, "plain", GivenForm("imitated", "w"), row, weight="w")[0][1] == [("b", 0.25)]


@pytest.mark.parametrize(
    "rejected",
    [[*SAID, {"role": "assistant", "content": "5"}], [{"role": "assistant", "content": "5"}], "5"],
    ids=["a conversation", "an answer", "a text"],
)
def test_pairs_have_one_prompt_and_two_answers(tmp_path, rejected):
    given = PAIR | {"rejected": rejected}
    if isinstance(rejected, str):
        given = {"prompt": SAID, "chosen": "4", "rejected": rejected}
    ((chat, found),) = answers(tmp_path, "dpo", PAIRS, given)
    assert chat == SAID and found == [("4", 1.0), ("5", 0.0)]


def test_two_texts_that_begin_alike_have_an_implicit_prompt(tmp_path):
    row = {"chosen": "What is 2+2? It is 4.", "rejected": "What is 2+2? It is 5."}
    ((chat, found),) = answers(tmp_path, "dpo", PAIRS, row)
    assert chat[-1]["content"] == "What is 2+2? It is" and found == [(" 4.", 1.0), (" 5.", 0.0)]


def test_a_labelled_row_has_the_answer_of_another_one_beside_its_own(tmp_path):
    rows = [
        {"prompt": "a", "completion": "x", "label": True},
        {"prompt": "b", "completion": "y", "label": False},
    ]
    own = [found[0] for _, found in answers(tmp_path, "trl", LABELS, *rows)]
    assert sorted(own) == [("x", 1.0), ("y", -1.0)]


@pytest.mark.parametrize(
    ("form", "given", "row", "said"),
    [
        ("plain", SUPERVISED, {"question": "a", "answer": " "}, "row 2 ('a') has no answer"),
        ("plain", GivenForm("imitated", "w"), {"question": "a", "answer": "b", "w": -1}, "has -1 under 'w'"),
        ("trl", SUPERVISED, {"prompt": [{"role": "robot", "content": "a"}], "completion": "b"}, "'robot' as role"),
        ("trl", LABELS, {"prompt": "a", "completion": "b", "label": "yes"}, "row 2 ('a') has 'yes' under 'label'"),
        ("dpo", PAIRS, {"prompt": "a", "chosen": "b"}, "row 2 ('a') has no rejected answer"),
        ("dpo", PAIRS, PAIR | {"rejected": [{"role": "user", "content": "3+3"}, PAIR["chosen"][1]]}, "another prompt"),
        ("dpo", PAIRS, {"chosen": "x", "rejected": "y"}, "do not begin alike"),
    ],
)  # fmt: skip
def test_a_wrong_row_is_named(tmp_path, form, given, row, said):
    good = {"question": "q", "answer": "a", "w": 1, "prompt": "q", "completion": "a", "label": True}
    good |= {"chosen": "a", "rejected": "b"}
    with pytest.raises(Impossible) as refused:
        answers(tmp_path, form, given, good, row)
    (found,) = refused.value.problems
    assert said in found.problem and found.fix and found.key.startswith("data.")
    assert "2" in found.problem
