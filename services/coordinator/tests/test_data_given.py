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


CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
CALLS = {"role": "assistant", "content": None, "tool_calls": [CALL]}


@pytest.mark.parametrize("form", ["trl", "openai", "verl"])
def test_a_conversation_may_end_with_calls_of_tools(tmp_path, form):
    told = {"function": {**CALL["function"], "arguments": '{"a": 2}'}, "type": "function"}
    row = {"messages": [*SAID, {**CALLS, "tool_calls": [told]}], "tools": [{"type": "function"}]}
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row))
    section = DataSection(source="jsonl", options={"path": str(path), "form": form})
    data = Dataset.open(section, 0, given=SUPERVISED)
    item = data.train_item(0)
    assert SUPERVISED.turns(item)[0] == CALLS and item.arguments == {"tools": [{"type": "function"}]}
    assert json.loads(SUPERVISED.answers(item, item)[0][0]) == [CALL]
    with pytest.raises(Impossible, match="no text that could be the answer"):
        Dataset.open(section, 0)


def test_of_a_completion_of_several_turns_the_prompts_own_turns_are_not_learned_from(tmp_path):
    said = [{"role": "assistant", "content": "?"}, *SAID]
    row = {
        "prompt": [*SAID, *said],
        "completion": [CALLS, {"role": "tool", "content": "4"}, PAIR["chosen"][1]],
    }
    ((chat, found),) = answers(tmp_path, "trl", SUPERVISED, row)
    assert found == [("4", 1.0)] and [turn.get("weight") for turn in chat] == [None, 0, None, None, None]
    assert chat[3]["tool_calls"] == [CALL] and chat[4]["role"] == "tool"


@pytest.mark.parametrize("form", ["trl", "text"])
def test_a_text_has_no_question(tmp_path, form):
    assert answers(tmp_path, form, SUPERVISED, {"text": "a b"})[0][1] == [("a b", 1.0)]
    with pytest.raises(Impossible, match="a text without a prompt"):
        answers(tmp_path, form, PAIRS, {"text": "a b"})
    with pytest.raises(Impossible, match="a text without a question"):
        answers(tmp_path, form, None, {"text": "a b"})


def test_forms_of_trl_are_told_apart_by_their_keys(tmp_path):
    pair = PAIR | {"rejected": [*SAID, {"role": "assistant", "content": "5"}]}
    ((chat, found),) = answers(tmp_path, "trl", PAIRS, pair)
    assert chat == SAID and found == [("4", 1.0), ("5", 0.0)]
    labelled = [found[0] for _, found in answers(tmp_path, "trl", LABELS, pair)]
    assert sorted(labelled) == [("4", 1.0), ("5", -1.0)], "a pair is two answers with labels"
    ((chat, found),) = answers(tmp_path, "trl", SUPERVISED, {"messages": PAIR["chosen"]})
    assert chat == SAID and found == [("4", 1.0)]


def test_a_chosen_answer_may_be_told_with_its_prompt(tmp_path):
    """As ultrafeedback writes pairs."""
    row = {"prompt": "2+2", **PAIR, "rejected": [*SAID, {"role": "assistant", "content": "5"}]}
    ((chat, found),) = answers(tmp_path, "dpo", PAIRS, row)
    assert chat == SAID and found == [("4", 1.0), ("5", 0.0)]


def test_steps_have_labels(tmp_path):
    row = {"prompt": "2+2", "completions": ["2", "4"], "labels": [True, False]}
    assert answers(tmp_path, "trl", GivenForm("steps"), row)[0][1] == [("2\n\n4", 0.5)]
    for wrong in ({"labels": [True]}, {"completions": "2"}, {"labels": [1, 7]}):
        with pytest.raises(Impossible, match=r"row 1 .'2.2'. has .* under '(labels|completions)'"):
            answers(tmp_path, "trl", GivenForm("steps"), row | wrong)
