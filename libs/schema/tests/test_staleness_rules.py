"""`algorithm.max_staleness`: what it cannot be combined with is refused with the reason, and what it implies is set."""

from copy import deepcopy
from typing import Any

import pytest
from headrace_schema.problems import explain, sentence
from headrace_schema.spec import RunSpec
from pydantic import ValidationError

BASE: dict[str, Any] = {
    "model": {"path": "org/model"},
    "data": {"source": "copy_digits"},
    "reward": {"scorers": [{"name": "exact"}]},
}

STALE: dict[str, Any] = {"algorithm.max_staleness": 1}
ROBOT: dict[str, Any] = {
    "workflow": "embodied",
    "model": {"policy": {"kind": "mlp"}},
    "environment.tasks": ["reach-v3"],
    "algorithm.name": "ppo",
    "data.source": "episodes",
}


def with_values(values: dict[str, Any]) -> dict[str, Any]:
    """The base spec with values at dotted paths."""
    spec = deepcopy(BASE)
    for key, value in values.items():
        *parents, last = key.split(".")
        place = spec
        for name in parents:
            place = place.setdefault(name, {})
        place[last] = value
    return spec


def made(values: dict[str, Any]) -> RunSpec:
    return RunSpec.model_validate(with_values(values))


def problems_of(values: dict[str, Any]) -> dict[str, str]:
    with pytest.raises(ValidationError) as caught:
        made(values)
    return {item.key: sentence(item) for item in explain(caught.value, RunSpec)}


@pytest.mark.parametrize("wrong", [-1, 17, 1.5, True, "1"])
def test_staleness_is_a_whole_number_from_0_to_16(wrong: object):
    assert list(problems_of({"algorithm.max_staleness": wrong})) == ["algorithm.max_staleness"]


def test_every_mode_but_turns_stays_as_it_is_given():
    assert made(STALE).placement.mode == "auto"
    assert made({**STALE, "placement.mode": "hybrid"}).placement.mode == "hybrid"
    named = made({**STALE, "placement.rollout": "0", "placement.trainer": "1"}).placement
    assert named.mode == "disaggregated" and named.rollout == ["0"]


def test_answers_live_through_an_install_where_they_can():
    assert made(STALE).install == "in_flight"
    assert made({**STALE, "rollout.install": "abort_and_resume"}).install == "abort_and_resume"
    assert made({**STALE, **ROBOT}).install == "drain"


def test_options_that_act_on_the_ratio_have_an_effect_where_answers_are_older():
    option = {"algorithm.options.clip_high": 0.3}
    assert "has no effect" in problems_of(option)["algorithm.options.clip_high"]
    assert made({**STALE, **option}).algorithm.max_staleness == 1
