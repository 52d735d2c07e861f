"""Conversations in rows: each role, last and in the middle, with all keys that chat templates read."""

from __future__ import annotations

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from headrace_coordinator.data.dataset import Dataset
from headrace_schema.problems import Impossible
from headrace_schema.sections.generating import DataSection

CALL = {"id": "call00100", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "1 + 1?"}
CALLS = {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "hm"}
TOOL = {"role": "tool", "content": "2", "tool_call_id": "call00100", "name": "add"}
TALKS = {
    "a tool's answer last": [SYSTEM, USER, CALLS, TOOL],
    "two answers last": [USER, CALLS, TOOL, {**TOOL, "content": "3"}],
    "a user's turn behind tools": [
        USER,
        CALLS,
        TOOL,
        {"role": "assistant", "content": "2"},
        {**USER, "name": "Ann"},
    ],
    "other roles": [{**SYSTEM, "role": "developer"}, USER, CALLS, {**TOOL, "role": "ipython"}],
    "a function's answer": [USER, CALLS, {**TOOL, "role": "function"}],
    "a system message in the middle": [
        USER,
        {"role": "assistant", "content": "2", "thinking": "t"},
        SYSTEM,
        USER,
    ],
}
FORMS = {
    "verl": lambda talk: {"prompt": talk, "reward_model": {"ground_truth": "2"}},
    "trl": lambda talk: {"prompt": talk, "solution": "2"},
    "openai": lambda talk: {"messages": [*talk, {"role": "assistant", "content": "2"}]},
    "dpo": lambda talk: {"prompt": talk, "chosen": "2", "rejected": "3"},
    "plain": lambda talk: {"question": talk, "answer": "2"},
}


def prompt_of(path, form, source="jsonl"):
    section = DataSection(source=source, options={"path": str(path), "form": form}, heldout=0)
    dataset = Dataset.open(section, 0)
    item = dataset.train_item(0)
    return dataset.prompt(item), item


@pytest.mark.parametrize("table", [False, True])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("talk", TALKS)
def test_a_conversation_reaches_the_template_as_the_row_has_it(tmp_path, talk, form, table):
    row, path = FORMS[form](TALKS[talk]), tmp_path / "rows"
    if table:  # whose columns have nulls where a message has no key
        pq.write_table(pa.Table.from_pylist([row]), path.with_suffix(".parquet"))
        content, item = prompt_of(path.with_suffix(".parquet"), form, "parquet")
    else:
        path.with_suffix(".jsonl").write_text(json.dumps(row) + "\n")
        content, item = prompt_of(path.with_suffix(".jsonl"), form)
    assert content.chat == TALKS[talk]
    assert item.answer == "2" and content.prefill == ""


@pytest.mark.parametrize("form", ["verl", "trl", "dpo", "plain"])
def test_a_prompt_that_ends_with_the_assistants_turn_is_refused_by_name(tmp_path, form):
    row = FORMS[form]([USER, {"role": "assistant", "content": "The sum"}])
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(Impossible, match="with a turn of the assistant"):
        prompt_of(tmp_path / "rows.jsonl", form)


@pytest.mark.parametrize(
    ("last", "words"),
    [
        (CALLS, "with calls of tools"),
        (SYSTEM, "nor a tool's answer"),
        ({"role": "tool", "content": [{"type": "smell", "smell": "x"}]}, "a part of type 'smell'"),
    ],
)
def test_what_no_model_answers_is_refused_by_name(tmp_path, last, words):
    (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": [USER, last]}) + "\n")
    with pytest.raises(Impossible, match=words):
        prompt_of(tmp_path / "rows.jsonl", "openai")


def test_arguments_of_openais_rows_are_objects_and_tools_reach_the_template(tmp_path):
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    written = {**CALL, "function": {"name": "add", "arguments": '{"a": 1}'}}
    row = {"messages": [USER, {**CALLS, "tool_calls": [written]}, TOOL], "tools": tools}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    content, _ = prompt_of(tmp_path / "rows.jsonl", "openai")
    assert content.chat == [USER, CALLS, TOOL] and content.arguments == {"tools": tools}
    row = {"prompt": [USER], "tools": json.dumps(tools), "chat_template_kwargs": {"enable_thinking": False}}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    content, _ = prompt_of(tmp_path / "rows.jsonl", "trl")
    assert content.arguments == {"tools": tools, "enable_thinking": False}


def test_rows_that_differ_in_calls_alone_are_not_the_same(tmp_path):
    other = {**CALLS, "tool_calls": [{**CALL, "function": {"name": "sub", "arguments": {}}}]}
    rows = [FORMS["trl"]([USER, calls, TOOL]) for calls in (CALLS, other)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    section = DataSection(
        source="jsonl", options={"path": str(tmp_path / "rows.jsonl"), "form": "trl"}, heldout=0
    )
    assert Dataset.open(section, 0).train_size == 2


def test_a_last_turn_of_weight_0_is_no_answer(tmp_path):
    said = [{"role": "assistant", "content": text, "weight": weight} for text, weight in (("2", 1), ("3", 0))]
    row = {"messages": [USER, said[0], USER, said[1], USER]}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    content, item = prompt_of(tmp_path / "rows.jsonl", "openai")
    assert content.chat == [USER] and item.answer == "2"
    row = {"messages": [USER, said[1]]}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(Impossible, match="no turn in 'messages' that is learned from"):
        prompt_of(tmp_path / "rows.jsonl", "openai")
