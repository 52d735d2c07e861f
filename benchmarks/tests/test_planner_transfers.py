"""The planner's mode transfers: which cases count, and that the predictions hold together."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from _transfers import ASSUMPTIONS, MEASUREMENTS, cases, load, over_range, values_of
from headrace_planner import PlanError
from planner import SEQUENCES, accuracy, scale_profiles


@pytest.fixture(scope="module")
def data():
    return load(MEASUREMENTS)


@pytest.fixture(scope="module")
def assumptions():
    return load(ASSUMPTIONS)


def test_only_transfers_between_modes_are_counted(data):
    made = list(cases(data))
    assert len({case.name for case in made}) == len(made)
    assert sum(case.counted for case in made) == 10
    # ManiSkill's other modes hold a neighbour's memory that the file does not give.
    assert {case.name.partition(" at")[0] for case in made if not case.counted} == {"ManiSkill"}


def test_each_case_depends_on_its_inputs_and_not_on_its_target(data, assumptions):
    changed = json.loads(json.dumps(data))
    changed["moe_32gpu_latency_s"]["RLinf_spatial"]["train_end"] *= 3
    changed["moe_32gpu_latency_s"]["Slime"]["train"] *= 3
    values = values_of(assumptions)
    before, after = ({case.name: case for case in cases(each)} for each in (data, changed))
    target, source = "MoE 30B at 32: RLinf_temporal → RLinf_spatial", "MoE 30B at 32: Slime → RLinf_temporal"
    assert after[target].measured == 3 * before[target].measured
    assert after[target].predict(values) == before[target].predict(values)
    assert after[source].predict(values) > before[source].predict(values)


def test_predictions_lie_within_their_ranges_and_every_assumption_has_one(data, assumptions):
    values = values_of(assumptions)
    for name, value in values.items():
        low, high = assumptions[name]["range"]
        assert low <= value <= high and assumptions[name]["why"]
    for case in cases(data):
        low, high, widest = over_range(case, assumptions)
        assert low * (1 - 1e-9) <= case.predict(values) <= high * (1 + 1e-9), case.name
        assert widest in values


def test_the_fitted_assumptions_are_the_fits_of_the_published_points(data, assumptions):
    values, fitted = values_of(assumptions), scale_profiles(data)
    assert values["decode_knee"] == pytest.approx(
        fitted["rollout"].fixed_s / fitted["rollout"].item_s, rel=0.01
    )
    assert values["learn_scaling_loss"] == fitted["train"].scaling_loss
    assert values["infer_scaling_loss"] == fitted["logprob"].scaling_loss
    assert max(profile.error for profile in fitted.values()) < 0.03
    assert fitted["train"].seconds(SEQUENCES, 256) == pytest.approx(111.5, rel=0.02)


def test_the_figures_are_those_of_the_cases(data, assumptions, capsys):
    found, values = accuracy(data, assumptions), values_of(assumptions)
    errors = [abs(case.error(values)) for case in cases(data) if case.counted]
    assert found["mean_error_transfers"] == pytest.approx(sum(errors) / len(errors))
    assert found["worst_error_transfers"] == max(errors) < 0.2
    assert found["rankings_right"] == 1
    assert "ManiSkill" in capsys.readouterr().err


def test_a_case_whose_tree_breaks_is_refused_and_not_counted_as_right(data, assumptions):
    case = next(iter(cases(data)))
    with pytest.raises(PlanError):
        case.predict({**values_of(assumptions), "decode_knee": -1.0})


def test_the_script_prints_one_line_of_figures(tmp_path):
    script = Path(__file__).parents[1] / "planner.py"
    done = subprocess.run(
        [sys.executable, str(script), "--repetitions", "1"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)["figures"]
    assert set(figures) == {
        *(
            "transfers_counted",
            "mean_error_transfers",
            "worst_error_transfers",
            "rankings_right",
            "rankings_total",
        ),
        *("plan_s_1024", "plan_s_4096"),
    }
