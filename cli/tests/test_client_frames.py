"""Tables and curves of runs, for notebooks."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
from headrace.client import Client, HeadraceError, Run, Step, frame, live, plot

STEPS = [
    {"step": 1, "reward_mean": 0.25, "wall_s": 2.0, "stage_s": {"learn": 1.5}, "figures": {"loss": 0.5}},
    {"step": 2, "reward_mean": None, "wall_s": 3.0, "stage_s": {}, "figures": {"loss": 0.25}},
]


@pytest.fixture
def client(coordinator):
    coordinator.routes["GET /v1/runs/r-1/metrics"] = (200, {"steps": STEPS})
    coordinator.routes["GET /v1/runs/r-2/metrics"] = (200, {"steps": []})
    with Client(coordinator.url, "secret", patience_s=0) as made:
        yield made


def test_a_row_for_each_resource_and_a_column_for_each_key(client):
    table = frame(client.metrics("r-1"))
    assert list(table.columns) == ["step", "reward_mean", "wall_s", "stage_s.learn", "figures.loss"]
    assert table["figures.loss"].tolist() == [0.5, 0.25] and table["stage_s.learn"].isna().tolist() == [
        False,
        True,
    ]
    assert frame([]).empty
    assert frame([Run.from_json({"id": "r", "counts": {"trained": 2}})])["counts.trained"].tolist() == [2]


def test_a_library_that_is_missing_is_named(monkeypatch):
    for name in ("pandas", "polars"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(HeadraceError, match=r"pandas or polars is not installed; pip install pandas"):
        frame([Step.from_json(STEPS[0])])
    with pytest.raises(HeadraceError, match="polars is not installed; pip install polars"):
        frame([], "polars")
    monkeypatch.setitem(sys.modules, "polars", SimpleNamespace(DataFrame=dict))
    assert frame([Step.from_json({"step": 1})]) == {"step": [1]}  # the one that is there


def test_a_chart_for_each_key_that_a_run_has(client):
    figure = plot(client, ["r-1", "r-2"], ["reward_mean", "figures.loss", "figures.no_such"])
    assert [axis.get_title() for axis in figure.axes] == ["reward_mean", "figures.loss"]
    assert [line.get_label() for line in figure.axes[0].lines] == ["r-1", "r-2"]
    assert [line.get_xydata().tolist() for line in figure.axes[1].lines] == [[[1, 0.5], [2, 0.25]], []]
    assert next(line.get_xydata().tolist() for line in figure.axes[0].lines) == [[1, 0.25]]
    with pytest.raises(HeadraceError, match=r"no step has figures.lose; name one of: figures.loss, "):
        plot(client, "r-1", ["figures.lose"])
    with pytest.raises(HeadraceError, match="wait for the first step"):
        plot(client, "r-2")


def test_curves_are_drawn_anew_after_each_step(client, coordinator, monkeypatch):
    shown = []
    handle = SimpleNamespace(update=lambda figure: shown.append(len(figure.axes)))
    display = SimpleNamespace(display=lambda what, display_id: handle, HTML=str)
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(display=display))
    kinds = ("run_started", "step_committed", "evaluated", "step_committed")
    events = [SimpleNamespace(type=kind) for kind in kinds]
    monkeypatch.setattr(client, "events", lambda run: iter(events))
    live(client, "r-1", ["reward_mean"])
    assert shown == [1, 1]
