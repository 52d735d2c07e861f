"""Sources of rows: the forms of well-known data sets, filters, Parquet, Hugging Face data sets, mixtures."""

import json
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_parts import items_of, refusal
from headrace_coordinator.data.contract import check_source
from headrace_coordinator.data.dataset import open_dataset
from headrace_coordinator.data.sources import open_source
from headrace_schema.progress import counting
from headrace_schema.spec import RunSpec

GPQA = {
    "Question": "Which is a noble gas?",
    "Correct Answer": "neon ",
    **{f"Incorrect Answer {number}": name for number, name in enumerate(("iron", "oxygen", "sodium"), 1)},
}


async def test_reading_says_how_many_rows_it_has_read(lines):
    path = lines(*({"question": f"{n}+{n}", "answer": str(2 * n)} for n in range(30)))
    spec = RunSpec.model_validate(
        {
            "model": {"path": "m"},
            "data": {"source": "jsonl", "options": {"path": path}},
            "reward": {"scorers": [{"name": "exact"}]},
        }
    )
    with counting() as far:
        await open_dataset(spec)
        assert far.read() == (30, 0, "rows", "")


@pytest.mark.parametrize(
    ("form", "row", "question", "answer"),
    [
        ("gsm8k", {"question": "How many?", "answer": "3 * 24 = 72\n#### 1,072"}, "How many?", "1072"),
        ("math", {"problem": "Find $x$.", "answer": "\\frac{1}{2}"}, "Find $x$.", "\\frac{1}{2}"),
        (
            "math",
            {"problem": "Find $x$.", "solution": "No \\boxed{1}, but \\boxed{\\frac{1}{2}}."},
            "Find $x$.",
            "\\frac{1}{2}",
        ),
        ("aime", {"problem": "Find n.", "answer": "033"}, "Find n.", "33"),
        ("aime", {"Problem": "Find n.", "Answer": 204}, "Find n.", "204"),
        ("aime", {"question": "Find n.", "answer": "70.0"}, "Find n.", "70"),
        ("plain", {"question": "Find n.", "answer": ["\\boxed{7}"]}, "Find n.", "\\boxed{7}"),
    ],
)
def test_rows_of_well_known_forms_become_items(lines, form, row, question, answer):
    (item,) = items_of("jsonl", path=lines(row), form=form)
    assert (item.question, item.answer) == (question, answer)


def test_gpqa_has_four_choices_in_an_order_of_the_question(lines):
    rows = [{**GPQA, "Question": f"Which is noble, {number}?"} for number in range(40)]
    items = items_of("jsonl", path=lines(*rows), form="gpqa")
    assert {item.answer for item in items} == set("ABCD"), "the right choice is not always at one place"
    for item in items:
        assert item.fields[item.answer] == "neon" and f"{item.answer}) neon" in item.question
    assert items == items_of("jsonl", path=lines(*rows), form="gpqa")


@pytest.mark.parametrize(
    ("form", "row", "words"),
    [
        ("gsm8k", {"question": "?", "answer": "72"}, "has no '####'"),
        ("math", {"problem": "?", "solution": "It is 2."}, "has no \\boxed{…}"),
        ("math", {"problem": "?", "solution": "\\boxed{2"}, "has no \\boxed{…}"),
        ("math", {"question": "?", "answer": "2"}, "has no key 'problem'"),
        ("aime", {"problem": "?", "answer": "1000"}, "integers from 0 to 999"),
        ("gpqa", {**GPQA, "Incorrect Answer 2": "neon"}, "two equal choices"),
        ("gpqa", {"Question": "?"}, "has no key 'Correct Answer'"),
        ("gsm", {"question": "?", "answer": "2"}, "data.options.form"),
    ],
)
def test_a_row_that_lacks_its_form_is_named(lines, form, row, words):
    found = refusal("jsonl", path=lines(row), form=form)
    assert words in found and (form == "gsm" or "line 1 of" in found)


CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 1?"}]
VERL = {
    "data_source": "sums",
    "prompt": CHAT,
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "2"},
    "extra_info": {"split": "train", "index": 7},
}


@pytest.mark.parametrize(
    ("form", "row", "messages"),
    [
        ("verl", VERL, CHAT),
        ("trl", {"prompt": CHAT, "solution": 2}, CHAT),
        ("trl", {"prompt": "1 + 1?", "answer": "2"}, []),
        ("openai", {"messages": [*CHAT, {"role": "assistant", "content": "2"}]}, CHAT),
        ("dpo", {"prompt": "1 + 1?", "chosen": "2", "rejected": "3"}, []),
        (
            "dpo",
            {
                "chosen": [*CHAT, {"role": "assistant", "content": "2"}],
                "rejected": [*CHAT, {"role": "assistant", "content": "3"}],
            },
            CHAT,
        ),
        (
            "dpo",
            {"prompt": CHAT, "chosen": [{"role": "assistant", "content": "2"}], "rejected": []},
            CHAT,
        ),
    ],
)
def test_rows_of_other_trainers_become_items(lines, form, row, messages):
    (item,) = items_of("jsonl", path=lines(row), form=form)
    assert (item.question, item.answer, list(item.messages)) == ("1 + 1?", "2", messages)


def test_what_a_row_of_verl_holds_reaches_templates_and_scorers(tmp_path):
    path = tmp_path / "rows.parquet"
    row = {**VERL, "extra_info": {**VERL["extra_info"], "score": float("nan")}}
    pq.write_table(pa.Table.from_pylist([row]), path)
    (item,) = items_of("parquet", path=str(path), form="verl")
    assert item.fields["extra_info.index"] == 7 and "extra_info.score" not in item.fields
    assert item.metadata["reward_model"] == {"ground_truth": "2", "style": "rule"}
    assert json.loads(item.metadata_json)["extra_info"]["score"] is None, "a table's missing number"


def test_keys_may_be_paths_and_a_row_without_an_answer_is_an_item(lines):
    row = {"task": {"text": "1 + 1?", "id": "t1"}, "meta": {"gold": "2"}}
    (item,) = items_of("jsonl", path=lines(row), question="task.text", answer="meta.gold", id="task.id")
    assert (item.question, item.answer, item.id) == ("1 + 1?", "2", "t1")
    assert [each.answer for each in items_of("jsonl", path=lines({"question": "?"}))] == [""]
    assert "has no key 'meta.gold'" in refusal(
        "jsonl", path=lines({"question": "?", "meta": {}}), answer="meta.gold"
    )


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([{"role": "human", "content": "?"}], "has 'human' as role of messages[0]"),
        ([{"role": "user", "content": None}], "has None as content of messages[0]"),
        ([{"role": "assistant", "content": "!"}], "has no user's turn"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "has parts of type image, and no image"),
        ([], "as 'messages'"),
    ],
)
def test_an_ill_formed_conversation_is_named(lines, messages, words):
    assert words in refusal("jsonl", path=lines({"messages": messages}), form="openai")


def test_long_questions_and_rows_beyond_a_pass_rate_are_left_out(lines):
    path = lines(
        *({"question": f"{rate}?", "answer": "x", "pass_rate": rate} for rate in (0, 0.2, 0.9, 1.0)),
        {"question": "long" * 9, "answer": "x", "pass_rate": 0.5},
    )
    kept = items_of("jsonl", path=path, longest_question=10, pass_rate={"at_least": 0.1, "at_most": 0.9})
    assert [item.question for item in kept] == ["0.2?", "0.9?"]
    bad = lines({"question": "?", "answer": "x", "pass_rate": "often"}, name="bad.jsonl")
    assert "line 1" in (found := refusal("jsonl", path=bad, pass_rate={})) and "from 0 to 1" in found
    assert "above at_most" in refusal("jsonl", path=path, pass_rate={"at_least": 0.9, "at_most": 0.1})


@pytest.fixture
def tables(tmp_path):
    """A folder of two Parquet files, three rows in all."""
    folder = tmp_path / "tables"
    folder.mkdir()
    for name, rows in (
        ("b", [{"question": "3", "answer": "c"}]),
        ("a", [{"question": q, "answer": q} for q in "12"]),
    ):
        pq.write_table(pa.Table.from_pylist(rows), folder / f"{name}.parquet")
    return folder


def test_parquet_reads_a_file_or_a_folder_in_the_order_of_names(tables):
    assert [item.question for item in items_of("parquet", path=str(tables))] == ["1", "2", "3"]
    assert [item.answer for item in items_of("parquet", path=str(tables / "b.parquet"))] == ["c"]
    before = check_source("parquet", {"path": str(tables)}).fingerprint()
    pq.write_table(pa.Table.from_pylist([{"question": "9", "answer": "9"}]), tables / "b.parquet")
    assert open_source("parquet", {"path": str(tables)}).fingerprint() != before


def test_a_wrong_parquet_file_is_named(tables, tmp_path, monkeypatch):
    (tables / "c.parquet").write_bytes(b"PAR1 no")
    assert "c.parquet is no Parquet file" in refusal("parquet", path=str(tables))
    assert "no .parquet file" in refusal("parquet", path=str(tmp_path))
    assert "data.options.path" in refusal("parquet", path=str(tmp_path / "none.parquet"))
    assert "row 1 of" in refusal("parquet", path=str(tables / "a.parquet"), question="q")
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    assert "headrace-coordinator[datasets]" in refusal("parquet", path=str(tables))


@pytest.mark.parametrize(
    "column",
    [
        pa.Array.from_buffers(pa.string(), 2, pa.array([b"ok", b"\xff\xfe"]).buffers()),
        pa.array([1, 2**62], pa.timestamp("us")),
        pa.array([1, 2**30], pa.date32()),
        pa.array([[{"at": 1}], [{"at": 2**62}]], pa.list_(pa.struct([("at", pa.timestamp("us"))]))),
    ],
    ids=["no utf-8", "timestamp", "date", "nested"],
)
def test_a_value_that_python_cannot_hold_is_named(tmp_path, column):
    table = pa.table({"question": ["1", "2"], "answer": ["1", "2"], "odd": column})
    pq.write_table(table, path := tmp_path / "odd.parquet")
    assert f"row 2 of {path} has no readable 'odd'" in refusal("parquet", path=str(path))


def test_columns_of_each_type_reach_scorers_as_json(tmp_path):
    columns = {
        "whole": pa.array([1, None]),
        "share": pa.array([0.5, float("nan")]),
        "half": pa.array([1.5, 2.5], pa.float32()),
        "big": pa.array([2**63, 1], pa.uint64()),
        "flag": pa.array([True, None]),
        "word": pa.array(["u", None]).dictionary_encode(),
        "pairs": pa.array([[("a", 1.5)], None], pa.map_(pa.string(), pa.float64())),
        "day": pa.array([18262, None], pa.date32()),
    }
    table = pa.table({"question": ["1", "2"], "answer": ["a", None], **columns})
    pq.write_table(table, path := tmp_path / "types.parquet")
    first, second = items_of("parquet", path=str(path))
    assert json.loads(first.metadata_json) == {
        "answer": "a",
        "whole": 1,
        "share": 0.5,
        "half": 1.5,
        "big": 2**63,
        "flag": True,
        "word": "u",
        "pairs": [["a", 1.5]],
        "day": "2020-01-01",
    }
    assert second.answer == "" and json.loads(second.metadata_json) == dict.fromkeys(
        table.column_names[1:]
    ) | {
        "half": 2.5,
        "big": 1,
    }


def test_rows_nested_too_deep_and_long_lists_of_numbers_are_named(lines, tmp_path):
    deep = json.loads("[" * 150 + "]" * 150)
    assert "line 1 of" in (found := refusal("jsonl", path=lines({"question": "1", "answer": "1", "x": deep})))
    assert "more than 100 objects and lists in each other" in found
    pq.write_table(
        pa.table({"question": ["1"], "x": [list(range(2_000_000))]}), path := tmp_path / "n.parquet"
    )
    assert "of text and numbers, and 8,388,608 travel" in refusal("parquet", path=str(path))


@pytest.mark.parametrize("truth", [{"target": 4, "numbers": [2, 2]}, ["2", "two"], 2, "2", ["2"]])
def test_a_ground_truth_of_verl_may_be_an_object(lines, truth):
    row = {**VERL, "reward_model": {"style": "rule", "ground_truth": truth}}
    (item,) = items_of("jsonl", path=lines(row), form="verl")
    assert item.answer == ("2" if truth in (2, "2", ["2"]) else json.dumps(truth))
    assert item.metadata["reward_model"]["ground_truth"] == truth


@pytest.mark.parametrize("long", ["x" * 70_000_000, {"inside": ["é" * 5_000_000]}, b"x" * 9_000_000])
def test_a_row_that_fits_no_message_is_named(tmp_path, long):
    rows = [{"question": "1", "note": None}, {"question": "2", "note": long}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "long.parquet")
    words = refusal("parquet", path=str(tmp_path / "long.parquet"))
    assert f"row 2 of {tmp_path / 'long.parquet'} has" in words and "8,388,608 travel" in words


@pytest.fixture
def cached(tmp_path, monkeypatch):
    """The `datasets` package with a cache of the test's own."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    return datasets


def test_a_local_data_set_is_read_by_split(tmp_path, cached):
    folder = tmp_path / "mine"
    folder.mkdir()
    for split, count in (("train", 3), ("test", 2)):
        rows = [{"question": f"{split} {n}", "answer": f"#### {n}"} for n in range(count)]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = items_of("huggingface", dataset=str(folder), split="test", form="gsm8k")
    assert [(item.question, item.answer) for item in found] == [("test 0", "0"), ("test 1", "1")]
    assert len(items_of("huggingface", dataset=str(folder), split="train[:2]")) == 2
    unknown = refusal("huggingface", dataset=str(folder), split="tset")
    assert "data.options.split" in unknown and "did you mean test?" in unknown
    assert "data.options.name" in refusal("huggingface", dataset=str(folder), name="other")
    assert "row 0 of" in refusal("huggingface", dataset=str(folder), question="q")


def test_a_mixture_has_the_items_of_its_parts_in_their_shares(lines):
    path = lines(*({"question": f"q{n}", "answer": "x"} for n in range(5)))
    parts = [
        {"source": "copy_digits", "options": {"digits": 2}, "items": 7},
        {"source": "jsonl", "options": {"path": path}},
    ]
    items = items_of("mixture", parts=parts)
    assert [item.fields["part"] for item in items] == [0] * 7 + [1] * 5
    assert items[0].fields["digits"] == "00"
    check_source("mixture", {"parts": parts})


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ({"source": "jsonl", "options": {"path": "/none"}}, "data.options.parts[0].options.path"),
        ({"source": "jsonk", "options": {}}, "data.options.parts[0].source"),
        ({"source": "copy_digits", "options": {"digit": 1}}, "data.options.parts[0].options.digit"),
        ({"source": "copy_digits", "options": {"digits": 1}, "items": 11}, "the nearest valid value is 10"),
        ({"source": "mixture", "options": {"parts": []}}, "cannot hold a mixture"),
    ],
)
def test_a_wrong_part_is_named_by_its_place(part, words):
    assert words in refusal("mixture", parts=[part])
    assert "data.options.parts" in refusal("mixture", parts=[])


def test_a_mixture_keeps_conversations_and_ids(lines):
    turns = [{"role": r, "content": c} for r, c in (("user", "a"), ("assistant", "b"), ("user", "c"))]
    path = lines({"messages": turns, "uid": "x"})
    part = {"source": "jsonl", "options": {"path": path, "form": "openai", "id": "uid"}}
    (item,) = items_of("mixture", parts=[part])
    assert (len(item.messages), item.id, item.fields["part"]) == (3, "x", 0)
