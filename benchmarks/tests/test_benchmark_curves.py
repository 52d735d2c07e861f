"""Learning curves: what counts as a run that could learn, the drawing, and that recorded runs are not repeated."""

import json
from xml.etree import ElementTree

import algorithms
import pytest
from _curves import HEIGHT, WIDTH, draw, smoothed

SVG = "{http://www.w3.org/2000/svg}"


def events(rewards, clip=0.1, optimizer_steps=4):
    yield {"type": "evaluated", "view": {"score": 0.1}}
    for reward in rewards:
        view = {"reward_mean": reward, "optimizer_steps": optimizer_steps, "clip_fraction": clip}
        counts = {"tokens": 30, "trained": 10, "filtered": 2, "refilled": 1}
        yield {"type": "step_committed", "view": {"figures": view, **counts}}
    yield {"type": "evaluated", "view": {"score": 0.9}}


def test_a_runs_figures_are_of_its_first_and_last_steps():
    found = algorithms.figures(events([0.0] * 10 + [0.5] * 5 + [1.0] * 10))
    assert (found["reward_first"], found["reward_last"], found["optimizer_steps"]) == (0.0, 1.0, 100)
    assert (found["heldout_before"], found["heldout_after"]) == (0.1, 0.9) and len(found["rewards"]) == 25
    assert (found["tokens_a_slot_last"], found["filtered_slots"], found["refilled_groups"]) == (3.0, 50, 25)
    algorithms.check("some", found)


@pytest.mark.parametrize(
    ("change", "words"),
    [({"clip": 0.0}, "clipped nothing"), ({"optimizer_steps": 1}, "epochs and minibatches")],
)
def test_a_run_at_ratio_one_is_refused(change, words):
    with pytest.raises(RuntimeError, match=words):
        algorithms.check("some", algorithms.figures(events([0.5] * 3, **change)))


def test_the_drawing_has_a_panel_an_algorithm_and_a_line_a_seed():
    root = ElementTree.fromstring(draw({"a<b": {0: [0.0, 1.0], 1: [0.5]}, "other": {0: [0.25] * 4}}))
    titles = [text.text for text in root.iter(f"{SVG}text")]
    assert "a<b" in titles and "other" in titles and "seed 1" in titles
    lines = [
        [tuple(map(float, p.split(","))) for p in line.get("points").split()]
        for line in root.iter(f"{SVG}polyline")
    ]
    assert lines[0] == [(WIDTH / 2, HEIGHT), (WIDTH, HEIGHT / 2)] and len(lines) == 3
    assert lines[2][-1] == (WIDTH, 0.75 * HEIGHT), "a panel goes to the steps of its own runs"


def test_smoothing_looks_back_only():
    assert smoothed([0.0, 1.0, 1.0, 1.0], window=2) == [0.0, 0.5, 1.0, 1.0]


def test_recorded_runs_are_drawn_and_not_repeated(tmp_path, monkeypatch, capsys):
    record, picture, asked = tmp_path / "runs.json", tmp_path / "curves.svg", []
    record.write_text(json.dumps({"grpo": {"0": algorithms.figures(events([0.5] * 20))}}))

    def run(name, seed, steps, model, overrides):
        asked.append((name, seed))
        return algorithms.figures(events([0.25] * 20))

    monkeypatch.setattr(algorithms.subprocess, "run", lambda *_, **__: None)  # makes the model
    arguments = [
        "--algorithms",
        "rloo",
        "grpo",
        "--seeds",
        "0",
        "1",
        "--record",
        str(record),
        "--draw",
        str(picture),
    ]
    algorithms.main(arguments, run)
    assert sorted(asked) == [("grpo", 1), ("rloo", 0), ("rloo", 1)]
    assert set(json.loads(record.read_text())["rloo"]) == {"0", "1"}
    said = capsys.readouterr()
    assert json.loads(said.out)["figures"]["rloo_reward_last_seed_1"] == 0.25
    assert "| `grpo` | 0 | 0.500 | 0.500 | 0.100 | 0.900 | 0.100 |" in said.err
    assert picture.read_text().count("<polyline") == 4
