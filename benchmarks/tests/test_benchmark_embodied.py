"""What a run of a robot policy is said to have learned, from its events; recorded runs are not made again."""

import json
from types import SimpleNamespace

import embodied
from headrace.client import Event


def event(number, kind, **data):
    return Event(id=number, time=0.0, run="reach-000001", type=kind, data=data)


def events(cloned=True):
    figures = {"warmup_last_loss": 0.01} if cloned else {}
    yield event(1, "version_restored", figures=figures)
    yield event(2, "evaluated", view={"step": 0, "score": 0.25})
    for step in range(4):
        yield event(3 + step, "step_committed", view={"tokens": 1600})
    yield event(9, "evaluated", view={"step": 4, "score": 0.75})


def test_a_runs_figures_are_its_scores_and_its_actions():
    found = embodied.figures(list(events()))
    assert (found["heldout_before"], found["heldout_after"], found["actions"]) == (0.25, 0.75, 6400)
    assert found["scores"] == [[0, 0.25], [6400, 0.75]]
    for level, actions in ((0.5, 6400), (0.9, None)):
        assert embodied.flat({"reach": {"0": found}}, level)["reach_actions_to_level_seed_0"] == actions
    assert found["cloning_loss"] == 0.01
    assert "cloning_loss" not in embodied.figures(list(events(cloned=False)))


def test_the_curve_is_each_steps_share_of_successes():
    told = [(0, "false"), (1, "true"), (0, "true"), (1, "true")]
    episodes = [SimpleNamespace(step=step, completion=f'{{"success": {success}}}') for step, success in told]
    assert embodied.outcomes(episodes) == [0.5, 1.0]


def test_recorded_runs_are_drawn_and_not_repeated(tmp_path, capsys):
    record, picture, asked = tmp_path / "runs.json", tmp_path / "curves.svg", []
    recorded = embodied.figures(list(events())) | {"curve": [0.0, 0.5]}
    record.write_text(json.dumps({"reach": {"0": recorded}}))

    def made(name, seeds, sets, limit_s):
        asked.append((name, seeds))
        yield from ((seed, recorded) for seed in seeds)

    arguments = ["--recipes", "reach", "--seeds", "0", "1", "--record", str(record), "--draw", str(picture)]
    embodied.main(arguments, made)
    assert asked == [("reach", [1])]
    assert json.loads(capsys.readouterr().out)["figures"]["reach_heldout_after_seed_1"] == 0.75
    assert picture.read_text().count("<polyline") == 2 and "6,400 actions" in picture.read_text()
