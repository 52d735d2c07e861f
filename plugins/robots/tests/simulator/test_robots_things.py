"""What is put on a plate: primitives, or models of a folder whose absence is said in a sentence."""

from __future__ import annotations

import json

import pytest
from headrace_robots.simulator.maniskill.things import TRAINED, from_assets, primitives
from headrace_simulator.backends.base import BackendError


@pytest.fixture
def assets(tmp_path):
    """A folder with one thing and one plate, as the published ones are laid out."""
    bbox = {"min": [-0.02, -0.03, 0.0], "max": [0.02, 0.03, 0.05]}
    for group, name in (("more_carrot", "carrot"), ("more_plate", "plate")):
        folder = tmp_path / group / name
        folder.mkdir(parents=True)
        (folder / "collision.obj").write_text("v 0 0 0\n")
        (folder / "textured.glb").touch()
        entry = {name: {"name": f"the {name}", "bbox": bbox, "scale": [0.5], "density": 800}}
        (tmp_path / group / "model_db.json").write_text(json.dumps(entry))
    return tmp_path


def test_primitives_are_twenty_five_different_things_of_which_some_are_unseen():
    things = primitives().things
    assert len(things) == 25 > TRAINED
    assert len({thing.name for thing in things}) == 25


def test_models_of_a_folder_are_read_with_their_sizes(assets):
    found = from_assets(str(assets))
    (thing,) = found.things
    assert (thing.name, thing.shape, thing.density) == ("the carrot", "model", 800.0)
    assert thing.size == pytest.approx((0.02, 0.03, 0.025))
    assert thing.visual.endswith("carrot/textured.glb")
    assert found.plate.name == "the plate"


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (lambda folder: "", "give the folder that holds more_carrot and more_plate"),
        (lambda folder: str(folder / "elsewhere"), "there is no "),
        (lambda folder: (folder / "more_plate/model_db.json").write_text("{"), "is no list of models"),
        (lambda folder: (folder / "more_plate/model_db.json").write_text('{"a": 1}'), "is no list of models"),
        (lambda folder: (folder / "more_plate/model_db.json").write_text("{}"), "lists no model"),
        (lambda folder: (folder / "more_carrot/carrot/collision.obj").unlink(), "carrot/collision.obj"),
        (lambda folder: (folder / "more_carrot/carrot/textured.glb").unlink(), "textured.obj, .dae or .glb"),
    ],
)
def test_what_is_missing_is_said(assets, harm, words):
    changed = harm(assets)
    with pytest.raises(BackendError) as raised:
        from_assets(changed if isinstance(changed, str) else str(assets))
    assert raised.value.field == "options_json.assets_dir" and words in raised.value.message
