"""Evaluations of other data than the run's, each set with a figure of its own."""

from __future__ import annotations

import json

import pytest
from headrace_coordinator.data.dataset import open_dataset
from headrace_coordinator.domain import events as ev
from headrace_coordinator.domain.totals import EVALUATIONS_SHOWN, Totals
from headrace_schema.problems import Impossible, explain
from headrace_schema.spec import RunSpec
from pydantic import ValidationError
from scene import Scene, ends


@pytest.fixture
def spec_of(tmp_path):
    """A spec that trains on copied digits and is evaluated on rows of its own too."""
    path = tmp_path / "other.jsonl"
    path.write_text("".join(json.dumps({"question": f"q{n}", "answer": f"a{n}"}) + "\n" for n in range(9)))

    def make(**more):
        sets = {
            "easy": {"source": "jsonl", "options": {"path": str(path)}, "limit": 4},
            "digits-3": {
                "source": "copy_digits",
                "options": {"digits": 1},
                "prompt": {"template": "Say {question}!", "chat": False},
            },
        }
        return RunSpec.model_validate(
            {
                "steps": 2,
                "model": {"path": "m"},
                "reward": {"scorers": [{"name": "exact"}]},
                "data": {"source": "copy_digits", "options": {"digits": 1}, "heldout": 2},
                "evaluation": {"every": 1, "data": sets} | more,
            }
        )

    return make


class Sets(Scene):
    """A run whose spec is given."""

    def __init__(self, spec):
        super().__init__(self.nothing, steps=2)
        fields = self.specs[0].model_dump(mode="json")
        fields |= {"data": spec.data.model_dump(), "evaluation": spec.evaluation.model_dump()}
        self.specs = [RunSpec.model_validate(fields)]

    async def nothing(self, _):
        return None

    async def _dataset(self, spec):
        return await open_dataset(spec)


def test_each_set_has_a_figure_of_each_version(spec_of):
    scene = Sets(spec_of())
    ends(scene)
    found = [
        (view["kind"], view["step"], view["answers"]) for view in (e.view for e in scene.log(ev.Evaluated))
    ]
    kinds = (("heldout", 2), ("easy", 4), ("digits-3", 10))
    assert found == [(kind, step, answers) for step in (0, 1, 2) for kind, answers in kinds]


def test_without_heldout_items_the_sets_alone_are_evaluated(spec_of):
    spec = spec_of()
    scene = Sets(spec.model_copy(update={"data": spec.data.model_copy(update={"heldout": 0})}))
    ends(scene)
    assert [event.view["kind"] for event in scene.log(ev.Evaluated)] == ["easy", "digits-3"] * 3


async def test_a_set_has_its_own_prompt_or_the_runs(spec_of):
    data = await open_dataset(spec_of())
    digits, items = data.of_kind("digits-3")
    assert digits.prompt(items[0]).text == f"Say {items[0].question}!"
    rows, items = data.of_kind("easy")
    assert rows.prompt(items[0]).chat == [{"role": "user", "content": items[0].question}]
    assert data.of_kind("heldout") == (data, data.heldout_items())


async def test_what_is_wrong_with_a_set_is_named_by_its_key(spec_of):
    sets = {"mine": {"source": "jsonl", "options": {"path": "/nowhere.jsonl"}}}
    with pytest.raises(Impossible) as caught:
        await open_dataset(spec_of(data=sets))
    assert [each.key for each in caught.value.problems] == ["evaluation.data.mine.options.path"]
    with pytest.raises(ValidationError) as wrong:
        spec_of(data={"heldout": {"source": "copy_digits"}})
    assert "evaluation.data.heldout" in explain(wrong.value, RunSpec)[0].key


async def test_other_sets_are_other_data(spec_of):
    with_sets, without = await open_dataset(spec_of()), await open_dataset(spec_of(data={}))
    assert with_sets.digest != without.digest


def test_a_runs_view_keeps_the_newest_of_each_kind():
    totals = Totals()
    for step in range(EVALUATIONS_SHOWN + 5):
        for kind in ("heldout", "easy"):
            totals._evaluated({"kind": kind, "step": step, "score": 0.5})
    for kind in ("heldout", "easy"):
        steps = [view["step"] for view in totals.evaluations if view["kind"] == kind]
        assert steps[0] == 0 and steps[1:] == list(range(6, EVALUATIONS_SHOWN + 5))
