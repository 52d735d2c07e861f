"""docs/weights.md shows the planned seconds of new weights, which rest on counted bytes and meet their goals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import weights_at_size
from headrace_fake_world.step import Case as World
from headrace_fake_world.step import published
from weights_at_size import CASES, DATA, bounds, legs, table, total

ROOT = Path(__file__).resolve().parents[2]
FOUND = json.loads(DATA.read_text(encoding="utf-8"))


def test_the_page_has_the_table_of_the_counted_bytes():
    assert table(FOUND) in (ROOT / "docs" / "weights.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_goal_of_each_case_is_met_and_its_bytes_agree(case, monkeypatch):
    assert total(legs(case, FOUND)) <= case.goal
    own = FOUND["cases"][case.name]
    assert own["gathered"] == own["down"] == own["bytes"], "the leader has each byte once"
    assert own["uploaded"] == pytest.approx(own["bytes"] / case.tensor_parallel, rel=1e-3)
    assert own["uploaded"] + own["exchanged"] == pytest.approx(own["bytes"], rel=1e-3)
    stated = bounds(legs(case, FOUND))
    before = total(legs(case, FOUND))
    monkeypatch.setitem(weights_at_size.RATES, "memory", 30.0)
    monkeypatch.setitem(weights_at_size.RATES, "pcie", 5.0)
    assert total(legs(case, FOUND)) > 4 * before, f"{stated} bounds it, and its rate counts"


def test_a_worker_uploads_its_part_and_takes_the_others_from_its_neighbours(monkeypatch):
    names = [(f"layers.{index}.weight", "bfloat16", (4096, 4096)) for index in range(12)]
    monkeypatch.setattr(weights_at_size, "layout_of", lambda model: names)
    case = weights_at_size.Case("small", "small", 1, 4, 1.0)
    found = weights_at_size.workers_bytes(case)
    assert found["bytes"] == 12 * 2 * 4096**2
    assert found["uploaded"] == found["bytes"] / 4 and found["exchanged"] == 3 * found["bytes"] / 4


def test_the_leader_takes_each_byte_down_once_in_the_published_type():
    _, phase = published(World("qwen2.5-0.5b", 8))
    assert phase.moved["all_gather"] == pytest.approx(phase.carried["gpu to cpu"], rel=0.01)
    assert 0.9e9 < phase.carried["gpu to cpu"] < 1.0e9, "494 million weights of two bytes"
