"""Data sources: what they yield, and how they name a wrong option."""

import json
import sys
from importlib.metadata import EntryPoint, EntryPoints
from types import SimpleNamespace

import pytest
from data_parts import items_of, refusal
from headrace_coordinator.data import SOURCES, DataItem, DataSource
from headrace_coordinator.data.contract import check_source
from headrace_coordinator.data.sources import open_source
from headrace_servicekit import registry

SUMS = {"dataset": "chain_sum", "config": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}}


def test_chain_sum_with_two_one_digit_terms_has_200_questions():
    items = items_of("reasoning_gym", **SUMS)
    assert len({item.key for item in items}) == len(items) == 200
    assert len({item.fields["expression"] for item in items}) == 200
    assert items == items_of("reasoning_gym", **SUMS, limit=5000)


def test_a_reasoning_gym_item_carries_what_its_scorer_needs():
    import reasoning_gym

    item = next(open_source("reasoning_gym", SUMS).items())
    metadata = json.loads(json.dumps(item.metadata))
    judge = reasoning_gym.create_dataset(metadata["dataset"])
    assert judge.score_answer(item.answer, metadata["item"]) == 1.0
    assert judge.score_answer("nonsense", metadata["item"]) < 1.0


def test_parameters_may_stand_beside_the_generator():
    flat = {"dataset": "chain_sum", **SUMS["config"]}
    assert items_of("reasoning_gym", **flat) == items_of("reasoning_gym", **SUMS)


def test_a_large_space_is_cut_at_the_limit():
    assert len(items_of("reasoning_gym", dataset="chain_sum", limit=321)) == 321


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "data.options.dataset: required key is missing"),
        ({"dataset": "chain_sums"}, "did you mean chain_sum?"),
        (
            {"dataset": "chain_sum", "min_term": 2},
            "data.options.config.min_term: chain_sum has no such parameter",
        ),
        ({"dataset": "chain_sum", "min_terms": 5, "max_terms": 2}, "max_terms must be >= min_terms"),
        ({"dataset": "chain_sum", "min_terms": "x"}, "data.options.config"),
        ({"dataset": "chain_sum", "limit": 0}, "data.options.limit: must be at least 1"),
        ({"dataset": "chain_sum", "size": 10}, "data.options.config.size"),
    ],
)
def test_a_wrong_reasoning_gym_option_is_named(options, words):
    assert words in refusal("reasoning_gym", **options)


def test_a_missing_extra_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    assert "headrace-coordinator[reasoning-gym]" in refusal("reasoning_gym", **SUMS)


def test_copy_digits_are_all_strings():
    items = items_of("copy_digits")
    assert len(items) == 1000
    assert (items[7].question, items[7].answer) == ("007=", "007")
    assert len(items_of("copy_digits", digits=2)) == 100
    assert "data.options.digits: must be at most 5" in refusal("copy_digits", digits=6)
    assert "did you mean digits?" in refusal("copy_digits", digit=3)


def write(tmp_path, *lines: bytes) -> str:
    path = tmp_path / "items.jsonl"
    path.write_bytes(b"\n".join(lines))
    return str(path)


def test_jsonl_reads_questions_answers_and_fields(tmp_path):
    path = write(
        tmp_path, b'{"q": "1+1", "a": 2, "level": "easy", "tags": ["x"]}', b"", b'{"q": "\\u00e9", "a": "e"}'
    )
    items = items_of("jsonl", path=path, question="q", answer="a")
    assert items[0] == DataItem("1+1", "2", {"level": "easy"}, {"a": 2, "level": "easy", "tags": ["x"]})
    assert items[1].question == "é"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b"{", "line 2 of"),
        (b"[1]", "is [1], not a JSON object"),
        (b"\xff", "is not valid Unicode"),
        (b'{"question": "\\ud800", "answer": "x"}', "is not valid Unicode"),
        (b'{"question": "x", "answer": NaN}', "NaN is no JSON number"),
        (b'{"qestion": "x", "answer": "y"}', "has no key 'question'; did you mean qestion?"),
        (b'{"question": "x", "answer": {}}', "has {} as 'answer'"),
        (b'{"question": "x", "Answer": "y"}', "has no key 'answer'; did you mean Answer?"),
        (b'{"question": "x", "answer": "y", "at": [1, {"far": 1e400}]}', "has inf under 'at[1].far'"),
        (b'{"question": true, "answer": "x"}', "has True as 'question'"),
        (b'{"question": " ", "answer": "x"}', "has an empty 'question'"),
        (b"[" * 100_000, "is not JSON"),
        (b'"' + b"x" * 1_100_000 + b'"', "is longer than"),
    ],
)
def test_an_ill_formed_line_is_named_by_its_number(tmp_path, line, words):
    path = write(tmp_path, b'{"question": "1", "answer": "2"}', line)
    found = refusal("jsonl", path=path)
    assert words in found
    assert "data.options.path: line 2 of" in found


def test_an_unreadable_file_names_its_neighbour(tmp_path):
    write(tmp_path)
    assert "did you mean items.jsonl?" in refusal("jsonl", path=str(tmp_path / "item.jsonl"))
    assert "items.jsonl" not in refusal("jsonl", path=str(tmp_path / "x")), "a folder is not listed"
    assert "cannot be read" in refusal("jsonl", path=str(tmp_path))


def test_an_unknown_source_names_the_nearest():
    shipped = ["copy_digits", "episodes", "huggingface", "jsonl", "mixture", "parquet", "reasoning_gym"]
    assert {*shipped} <= {*SOURCES.names()}, "and those of plug-ins"
    assert "data.source: there is no data source 'reasoning-gym'; did you mean 'reasoning_gym'?" in refusal(
        "reasoning-gym"
    )


class Squares(DataSource):
    """A source as another package would publish it."""

    count: int = 3

    def items(self):
        for number in range(self.count):
            yield DataItem(f"{number}²", str(number**2))


def test_another_package_can_publish_a_source(monkeypatch):
    monkeypatch.setitem(sys.modules, "published_sources", SimpleNamespace(Squares=Squares))
    entries = EntryPoints(
        [
            EntryPoint("squares", "published_sources:Squares", SOURCES.group),
            EntryPoint("broken", "no_such_module:X", SOURCES.group),
            EntryPoint("wrong", "json:loads", SOURCES.group),
        ]
    )
    monkeypatch.setattr(registry, "_published", lambda group, installed: entries.select(group=group))
    assert "squares" in SOURCES.names()
    assert [item.answer for item in items_of("squares", count=4)] == ["0", "1", "4", "9"]
    assert "cannot be imported" in refusal("broken")
    assert "is no subclass" in refusal("wrong")


def test_a_source_gets_what_its_options_refer_to(monkeypatch, tmp_path):
    (tmp_path / "rows").write_text(f"{tmp_path}/rows.jsonl\n")
    (tmp_path / "rows.jsonl").write_text('{"question": "1 + 1", "answer": "2"}\n')
    options = {"parts": [{"source": "jsonl", "options": {"path": f"file:{tmp_path}/rows"}}]}
    assert [item.answer for item in items_of("mixture", **options)] == ["2"]
    options["parts"][0]["options"]["path"] = "env:NO_SUCH_VARIABLE"
    told = refusal("mixture", **options)
    assert told.startswith("data.options.parts[0].options.path: ") and "no variable NO_SUCH_VARIABLE" in told
    monkeypatch.setenv("LIMIT", "secret-number")
    told = refusal("reasoning_gym", **SUMS, limit="env:LIMIT")
    assert "secret" not in told


def test_a_source_holds_the_contract():
    assert check_source("copy_digits", {"digits": 2}).fingerprint() == ""


def test_the_contract_finds_a_source_that_changes(monkeypatch):
    turns = iter(range(9))

    class Moody(DataSource):
        """Other items each time."""

        def items(self):
            yield DataItem("?", str(next(turns)))

    monkeypatch.setattr("headrace_coordinator.data.builtin.copy_digits.CopyDigits", Moody)
    with pytest.raises(AssertionError, match="other items the second time"):
        check_source("copy_digits", {})
