"""The split, the order and the prompts of a run's items."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from headrace_coordinator.data import DataItem, Dataset
from headrace_schema.problems import Impossible
from headrace_schema.sections.generating import DataSection, PromptSection
from headrace_schema.spec import RunSpec
from headrace_schema.yaml_text import read_yaml
from hypothesis import given, settings
from hypothesis import strategies as st

FEW_SHOT = ["4 + 4", "9 - 3", "5 + 6"]
SUMS = DataSection(
    source="reasoning_gym",
    options={"dataset": "chain_sum", "min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
    heldout=80,
    exclude=FEW_SHOT,
    prompt=PromptSection(
        template=(
            "Calculate {expression}. Reply with only the number.\n"
            "Examples: 4 + 4 = 8, 9 - 3 = 6, 5 + 6 = 11\n{expression} ="
        )
    ),
)
DIGITS = DataSection(source="copy_digits", options={"digits": 2}, heldout=20)


def changed(section: DataSection, **values) -> DataSection:
    return section.model_copy(update=values)


def refusal(section: DataSection) -> str:
    with pytest.raises(Impossible) as caught:
        Dataset.open(section, 0)
    return str(caught.value)


def expressions(items) -> set[str]:
    return {item.fields["expression"] for item in items}


def epoch(data: Dataset, number: int) -> list[DataItem]:
    return [data.train_item(number * data.train_size + index) for index in range(data.train_size)]


def test_chain_sum_holds_out_80_and_excludes_the_examples():
    data = Dataset.open(SUMS, seed=3)
    held, train = expressions(data.heldout_items()), expressions(epoch(data, 0))
    assert (len(held), len(train)) == (80, 117)
    assert not held & train
    assert not (held | train) & set(FEW_SHOT)


def test_the_chain_sum_prompt_is_the_recipes():
    data = Dataset.open(SUMS, seed=0)
    item = data.heldout_items()[0]
    e = item.fields["expression"]
    assert item.question.endswith(f"problem: {e} =")
    content = data.prompt(item)
    assert content.chat == [
        {
            "role": "user",
            "content": f"Calculate {e}. Reply with only the number.\n"
            f"Examples: 4 + 4 = 8, 9 - 3 = 6, 5 + 6 = 11\n{e} =",
        }
    ]
    assert (content.text, content.prefill) == (None, "")
    assert data.prompt(item, prefill="{expression} =").prefill == f"{e} ="


def test_exclude_matches_questions_and_expressions_whatever_their_spaces():
    question = "State the final answer to the following arithmetic problem:  4 + 4 ="
    for excluded in ("4+4", " 4  + 4 ", question):
        data = Dataset.open(changed(SUMS, exclude=[excluded], heldout=0), 0)
        assert data.train_size == 199
        assert "4 + 4" not in expressions(epoch(data, 0))


def test_held_out_items_do_not_depend_on_the_runs_seed():
    first, second = Dataset.open(SUMS, seed=1), Dataset.open(SUMS, seed=2)
    assert first.heldout_items() == second.heldout_items()
    assert first.digest == second.digest
    assert epoch(first, 0) != epoch(second, 0)
    other = Dataset.open(changed(SUMS, heldout_seed=2), seed=1)
    assert other.heldout_items() != first.heldout_items()
    assert other.digest != first.digest


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**63 - 1),
    heldout_seed=st.integers(0, 2**63 - 1),
    heldout=st.integers(0, 90),
    excluded=st.sets(st.integers(0, 99), max_size=9),
    number=st.integers(0, 10_000),
)
def test_parts_are_disjoint_and_every_epoch_is_a_permutation(seed, heldout_seed, heldout, excluded, number):
    exclude = [f"{value:02d}=" for value in excluded]
    section = changed(DIGITS, heldout=heldout, heldout_seed=heldout_seed, exclude=exclude)
    data = Dataset.open(section, seed)
    held, train = {item.key for item in data.heldout_items()}, [item.key for item in epoch(data, number)]
    assert len(held) == heldout
    assert len(set(train)) == len(train) == 100 - heldout - len(excluded)
    assert not held & set(train)
    assert held | set(train) | set(exclude) == {f"{value:02d}=" for value in range(100)}
    assert [item.key for item in epoch(Dataset.open(section, seed), number)] == train


def test_epochs_differ():
    data = Dataset.open(DIGITS, 0)
    assert len({tuple(item.key for item in epoch(data, number)) for number in range(5)}) == 5


def test_an_ordinal_means_the_same_item_in_another_process_and_for_ever():
    program = (
        "import json, sys\n"
        "from headrace_coordinator.data import Dataset\n"
        "from headrace_schema.sections.generating import DataSection\n"
        "data = Dataset.open(DataSection.model_validate_json(sys.argv[1]), 7)\n"
        "print(json.dumps([data.digest, [data.train_item(n).answer for n in (0, 1, 79, 80, 4000)]]))"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "5"}
    output = subprocess.run(
        [sys.executable, "-c", program, DIGITS.model_dump_json()],
        env=environment,
        capture_output=True,
        check=True,
    )
    digest, answers = json.loads(output.stdout)
    data = Dataset.open(DIGITS, 7)
    assert digest == data.digest
    assert answers == [data.train_item(n).answer for n in (0, 1, 79, 80, 4000)]
    # A golden value: runs of yesterday are resumed tomorrow.
    assert answers == GOLDEN


GOLDEN = ["25", "41", "59", "32", "75"]


@pytest.mark.parametrize(
    ("section", "words"),
    [
        (changed(SUMS, heldout=197), "data.heldout: 197 held-out items leave none to train on"),
        (changed(SUMS, heldout=500), "the nearest valid value is 196"),
        (
            changed(DIGITS, exclude=[f"{n:02d}=" for n in range(100)]),
            "data.exclude: the source copy_digits has no item",
        ),
        (
            changed(DIGITS, prompt=PromptSection(template="{qestion}")),
            "data.prompt.template: items have no field",
        ),
        (
            changed(DIGITS, prompt=PromptSection(prefill="{x}")),
            "data.prompt.prefill: items have no field 'x'",
        ),
        (changed(DIGITS, prompt=PromptSection(system="{answer}")), "data.prompt.system"),
        (changed(DIGITS, prompt=PromptSection(template="{")), "write a brace that is meant as text twice"),
        (changed(DIGITS, prompt=PromptSection(template="{}")), "is not the plain name of a field"),
        (changed(DIGITS, prompt=PromptSection(template="{question.__class__}")), "is not the plain name"),
        (changed(DIGITS, prompt=PromptSection(template="{question!r:>99999999}")), "is not the plain name"),
    ],
)
def test_what_cannot_work_is_refused_when_opened(section, words):
    assert words in refusal(section)


def test_prompts_as_chat_and_as_text():
    item = DataItem("2 {a}", "3", {"b": 4})
    chat = changed(
        DIGITS, heldout=0, prompt=PromptSection(template="{{x}} {question} {b}", system="s {b}", prefill="p")
    )
    content = Dataset(chat, [item], 0).prompt(item)
    assert content.chat == [{"role": "system", "content": "s 4"}, {"role": "user", "content": "{x} 2 {a} 4"}]
    assert (content.text, content.prefill) == (None, "p")
    plain = changed(DIGITS, heldout=0, prompt=PromptSection(template="{question}", chat=False, prefill="p"))
    content = Dataset(plain, [item], 0).prompt(item)
    assert (content.chat, content.text, content.prefill) == (None, "2 {a}p", "")


def test_a_field_that_some_item_lacks_is_unknown():
    items = [DataItem("1", "1", {"b": 4}), DataItem("2", "2")]
    section = changed(DIGITS, heldout=0, prompt=PromptSection(template="{b}"))
    with pytest.raises(Impossible, match="1 of 2 items have no field 'b'"):
        Dataset(section, items, 0)
    data = Dataset(changed(section, prompt=PromptSection()), items, 0)
    with pytest.raises(Impossible, match=r"evaluation\.baseline_prefill: 1 of 2 items have no field"):
        data.check_template("{b}", "evaluation.baseline_prefill")


def test_the_first_of_equal_questions_counts_and_answers_may_be_missing():
    items = [DataItem("a  b", "1"), DataItem("a b ", "2"), DataItem("c", "")]
    data = Dataset(changed(DIGITS, heldout=0), items, 0)
    assert sorted(item.answer for item in epoch(data, 0)) == ["", "1"]
    assert data.unanswered() == 1


ASKED = {"role": "user", "content": "And?"}


def test_items_differ_by_what_their_prompts_show():
    contexts = [DataItem("Who?", "1", {"context": context}) for context in ("a", "b", "b ")]
    alone = changed(DIGITS, heldout=0)
    assert Dataset(alone, contexts, 0).train_size == 1
    shown = Dataset(changed(alone, prompt=PromptSection(template="{context}: {question}")), contexts, 0)
    assert (shown.train_size, shown.repeated) == (2, 1)
    assert {shown.place(item) for item in epoch(shown, 0)} == {0, 1}
    turns = [
        DataItem("And?", "1", messages=({"role": "user", "content": text}, ASKED))
        for text in ("Hi", "Ho", "Hi")
    ]
    assert Dataset(alone, turns, 0).train_size == 2
    assert Dataset(alone, [DataItem("Who?", "1", id=name) for name in "aab"], 0).train_size == 2


def test_other_items_keep_their_order_when_a_question_is_asked_twice():
    """So an item that is added moves no other one between the held-out and the training part."""
    section = changed(DIGITS, heldout=3, prompt=PromptSection(template="{digits} {question}"))
    items = [DataItem(f"{n}?", "1", {"digits": str(n)}) for n in range(12)]
    before = [item.question for item in Dataset(section, items, 0).heldout_items()]
    also = [*items, DataItem("100?", "1", {"digits": "1"}), DataItem("100?", "1", {"digits": "2"})]
    after = [item.question for item in Dataset(section, also, 0).heldout_items()]
    assert [question for question in after if question != "100?"] == before[: 3 - after.count("100?")]


def test_a_conversation_is_rendered_as_it_is_and_its_last_turn_by_the_template():
    before = ({"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"})
    item = DataItem("And?", "1", messages=(*before, {"role": "assistant", "content": "Ho"}, ASKED))
    section = changed(
        DIGITS, heldout=0, prompt=PromptSection(template="{question}!", template_arguments={"tools": []})
    )
    content = Dataset(section, [item], 0).prompt(item)
    assert content.chat == [*item.messages[:-1], {"role": "user", "content": "And?!"}]
    assert content.arguments == {"tools": []}
    for prompt, key in ((PromptSection(system="Be."), "system"), (PromptSection(chat=False), "chat")):
        with pytest.raises(Impossible, match=rf"data\.prompt\.{key}: "):
            Dataset(changed(section, prompt=prompt), [item], 0)


def test_a_changed_file_changes_the_digest(tmp_path):
    path = tmp_path / "items.jsonl"
    section = DataSection(source="jsonl", options={"path": str(path)})
    path.write_text('{"question": "1", "answer": "2"}\n')
    first = Dataset.open(section, 0)
    path.write_text('{"question": "1", "answer": "22"}\n')
    second = Dataset.open(section, 0)
    assert second.train_item(0).answer == "22"
    assert first.digest != second.digest


def test_the_example_of_two_tasks_trains_and_judges_both():
    file = Path(__file__).resolve().parents[3] / "examples" / "smollm2_mixture.yaml"
    spec = RunSpec.model_validate(read_yaml(file.read_text(encoding="utf-8")))
    data = Dataset.open(spec.data, spec.seed)
    train, held = epoch(data, 0), data.heldout_items()
    assert (len(train), len(held)) == (207, 90)
    for items in (train, held):
        shares = Counter("*" in item.fields["expression"] for item in items)
        assert 0.2 < shares[True] / len(items) < 0.5 and {item.fields["part"] for item in items} == {0, 1}
    assert not expressions([*train, *held]) & set(spec.data.exclude)
    prompt = data.prompt(held[0]).chat[0]["content"]
    assert prompt.endswith(f"\n{held[0].fields['expression']} =")


def mixture(*weights: int | None) -> DataSection:
    parts = [
        {"source": "copy_digits", "options": {"digits": place + 1}, **({"weight": weight} if weight else {})}
        for place, weight in enumerate(weights)
    ]
    return DataSection(source="mixture", options={"parts": parts}, heldout=20)


def drawn(data: Dataset, count: int, first: int = 0) -> list[DataItem]:
    return [data.train_item(ordinal) for ordinal in range(first, first + count)]


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 7), st.integers(1, 7), st.integers(0, 500), st.integers(0, 2**63 - 1))
def test_weights_set_the_parts_shares_in_every_block_whatever_their_sizes(one, two, block, seed):
    data, size = Dataset.open(mixture(one, two), seed), one + two
    parts = [item.fields["part"] for item in drawn(data, size, block * size)]
    assert (parts.count(0), parts.count(1)) == (one, two)


def test_each_part_goes_through_its_items_before_one_comes_again():
    data = Dataset.open(mixture(1, 3), 5)
    own = {
        part: [i.key for i in epoch(data, 0) + epoch(data, 1) if i.fields["part"] == part] for part in (0, 1)
    }
    small = len(set(own[0]))
    assert small <= 10 and len(set(own[0][:small])) == small == len(set(own[0][small : 2 * small]))
    assert len(set(own[1])) > 70 and len(set(own[1][:70])) == 70


def test_a_weighted_mixture_goes_on_where_it_was_in_another_process():
    """A new data set knows nothing of what was drawn: the ordinal alone says which item comes."""
    first = drawn(Dataset.open(mixture(2, 3), 9), 200)
    assert drawn(Dataset.open(mixture(2, 3), 9), 63, 137) == first[137:]
    assert len({tuple(i.fields["part"] for i in first[n : n + 5]) for n in range(0, 200, 5)}) > 5


def test_weights_are_for_every_part_or_none():
    assert "data.options: parts[1].weight: give every part a weight, or none" in refusal(mixture(2, None))


def test_questions_with_two_answers_are_counted_and_the_first_one_holds():
    pairs = [("1 + 1", "2"), ("1 + 1", "3"), ("1 + 1", "2"), ("2 + 2", "4"), ("2 + 2", "4"), ("3 + 3", "6")]
    items = [DataItem(question=question, answer=answer) for question, answer in pairs]
    dataset = Dataset(changed(DIGITS, heldout=0), items, seed=0)
    assert (dataset.repeated, dataset.contradicting, dataset.train_size) == (3, 1, 3)
    assert {dataset.train_item(n).question: dataset.train_item(n).answer for n in range(3)}["1 + 1"] == "2"
