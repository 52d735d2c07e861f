"""Start states of robot tasks as data items."""

import pytest
from headrace_coordinator.data.contract import check_source
from headrace_coordinator.data.dataset import Dataset
from headrace_schema.problems import Impossible
from headrace_schema.sections.generating import DataSection


def section(heldout: int = 0, **options: object) -> DataSection:
    return DataSection.model_validate({"source": "episodes", "options": options, "heldout": heldout})


def test_it_holds_the_contract():
    check_source("episodes", {"tasks": ["a", "b"], "starts": 3})


def test_seeds_that_are_held_out_are_never_trained_on():
    data = Dataset.open(section(48, tasks=["reach", "push"], starts=200), seed=3)
    heldout = {(item.metadata["task"], item.metadata["seed"]) for item in data.heldout_items()}
    trained = {tuple(data.train_item(n).metadata.values()) for n in range(3 * data.train_size)}
    assert len(heldout) == 48
    assert len(trained) == 352
    assert not heldout & trained


def test_other_seeds_of_a_run_are_judged_on_the_same_start_states():
    options = section(8, tasks=["reach"], starts=64)
    first, second = Dataset.open(options, seed=0), Dataset.open(options, seed=1)
    assert first.heldout_items() == second.heldout_items()
    assert [first.train_item(n) for n in range(20)] != [second.train_item(n) for n in range(20)]


def test_initial_states_are_numbered():
    data = Dataset.open(section(10, tasks=["libero_spatial/0"], init_states=50), seed=0)
    found = {item.metadata["init_state"] for item in data.asked()} | {
        data.train_item(n).metadata["init_state"] for n in range(data.train_size)
    }
    assert found == set(range(50))


@pytest.mark.parametrize(
    ("options", "key"),
    [({}, "data.options.tasks"), ({"tasks": ["a"], "starts": 10**7}, "data.options.starts")],
)
def test_what_cannot_be_is_refused_by_its_key(options: dict, key: str):
    with pytest.raises(Impossible) as caught:
        Dataset.open(section(0, **options), seed=0)
    assert [each.key for each in caught.value.problems] == [key]
