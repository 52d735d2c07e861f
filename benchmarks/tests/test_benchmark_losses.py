"""The comparison of losses: its arithmetic, that it notices a wrong path, and one small turn of our own path."""

import sys
from pathlib import Path

import losses
import pytest

SMALL = {"sequences": 4, "tokens": 8, "vocabulary": 300, "hidden": 16, "threads": 1}


def turn(wall=1.0, peak=1e6, **other):
    same = {"entropy": 5.0, "of_hidden": 0.5, "norm_hidden": 2.0, "of_weight": -0.1, "norm_weight": 3.0}
    return {"wall_s": wall, "cpu_s": 2 * wall, "peak_bytes": peak, **same, **other}


def test_a_path_takes_its_median_seconds_and_its_largest_peak(capsys):
    found = {
        "headrace": [turn(1.0, 2e6), turn(9.0, 1e6), turn(2.0, 1e6)],
        "verl": [turn(4.0, 5e6), turn(4.0, 3e6), turn(5.0, 4e6)],
    }
    figures = losses.figures(found)
    assert figures["time_vs_verl"] == figures["cpu_vs_verl"] == pytest.approx(0.5)
    assert figures["memory_vs_verl"] == pytest.approx(0.4) and figures["verl_peak_mb"] == 5.0


def test_paths_that_compute_something_else_are_refused():
    losses.agree({"headrace": turn(), "verl": turn(norm_weight=3.0001)})
    with pytest.raises(RuntimeError, match="headrace and trl differ in norm_weight"):
        losses.agree({"headrace": turn(), "verl": turn(), "trl": turn(norm_weight=3.01)})


@pytest.mark.nightly  # test_every_script starts it; test_a_path_that_fails_is_named runs a turn
def test_our_path_runs_and_its_gradient_depends_on_the_seed():
    python = Path(sys.executable)
    first, again, other = (
        losses.measured(python, {**SMALL, "path": "headrace", "seed": seed}) for seed in (0, 0, 1)
    )
    losses.agree({"one": first, "two": again})
    with pytest.raises(RuntimeError, match="differ"):
        losses.agree({"one": first, "two": other})
    # At least the two gradients are there afterwards; the limit is what libraries load late.
    assert 0 <= first["peak_bytes"] < 1e9 and first["cpu_s"] > 0


def test_a_path_that_fails_is_named():
    with pytest.raises(RuntimeError, match="headrace ended with 1"):
        losses.measured(Path(sys.executable), {**SMALL, "path": "headrace", "seed": 0, "sequences": 0})
