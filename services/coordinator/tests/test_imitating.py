"""What a new policy takes from the data set that it imitates, and what of it contradicts the data set."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from headrace_coordinator.api.submission.imitating import imitating
from headrace_schema.problems import Impossible, sentence
from headrace_schema.spec import RunSpec

FEATURES = {
    "action": {"dtype": "float32", "shape": [2]},
    "observation.state": {"dtype": "float32", "shape": [5]},
    "observation.images.top": {"dtype": "video", "shape": [3, 24, 32], "names": ["channels", "height", "width"]},
    "observation.images.wrist": {"dtype": "video", "shape": [24, 32, 3], "names": ["height", "width", "channels"]},
}  # fmt: skip


@pytest.fixture
def shown(tmp_path: Path) -> Path:
    (tmp_path / "meta").mkdir()
    info = {"codebase_version": "v3.0", "features": FEATURES}
    (tmp_path / "meta" / "info.json").write_text(json.dumps(info))
    stats = {"action": {"min": [-1.5, 0.0], "max": [2.0, float("inf")]}}
    (tmp_path / "meta" / "stats.json").write_text(json.dumps(stats))
    return tmp_path


def spec(shown: Path, policy: dict[str, Any], **options: Any) -> RunSpec:
    data = {"source": "lerobot", "options": {"path": str(shown), **options}, "heldout": 1}
    return RunSpec.model_validate(
        {"name": "a", "workflow": "supervised", "model": {"policy": policy}, "data": data}
    )


BOUNDS = {"low": [-1.5, None], "high": [2.0, None]}
SIZE = {"height": 24, "width": 32}


@pytest.mark.parametrize(
    ("policy", "options", "read"),
    [
        ({"kind": "mlp"}, {}, {"bounds": BOUNDS, "state_size": 5}),
        ({"kind": "mlp", "bounds": {"low": [-9, -9], "high": [9, 9]}}, {}, {"state_size": 5}),
        ({"kind": "cnn"}, {}, {"bounds": BOUNDS, "state_size": 5, "cameras": ["top", "wrist"], **SIZE}),
        ({"kind": "cnn", "state_size": 0, "cameras": ["wrist"]}, {}, {"bounds": BOUNDS, **SIZE}),
        (
            {"kind": "cnn"},
            {"cameras": {"front": "top"}},
            {"bounds": BOUNDS, "state_size": 5, "cameras": ["front"], **SIZE},
        ),
        ({"kind": "act"}, {}, {"bounds": BOUNDS, "cameras": ["top", "wrist"]}),
    ],
)
async def test_what_a_new_policy_leaves_out_is_the_data_sets(shown, policy, options, read):
    found = (await imitating(spec(shown, policy, **options))).model.policy
    assert found == {**policy, **read}


@pytest.mark.parametrize(
    ("policy", "options", "said"),
    [
        ({"kind": "mlp", "state_size": 4}, {}, "model.policy.state_size: is 4, and the data set's is 5"),
        ({"kind": "cnn", "width": 8}, {}, "model.policy.width: is 8, and the data set's is 32"),
        ({"kind": "cnn", "cameras": ["side"]}, {}, "model.policy.cameras: 'side' is no camera of the data set"),
        ({"kind": "cnn"}, {"cameras": {"front": "side"}}, "data.options.cameras: 'side' is no camera of the data"),
        (
            {"kind": "mlp", "bounds": {"low": [0], "high": [1]}},
            {},
            "model.policy.bounds: has 1 numbers, and an action of the data set 2",
        ),
    ],
)  # fmt: skip
async def test_a_policy_that_contradicts_the_data_set_is_refused(shown, policy, options, said):
    with pytest.raises(Impossible) as refused:
        await imitating(spec(shown, policy, **options))
    assert said in sentence(refused.value.problems[0])


async def test_bounds_that_no_statistics_state_are_asked_for(shown):
    (shown / "meta" / "stats.json").unlink()
    with pytest.raises(Impossible, match="states no least and greatest action"):
        await imitating(spec(shown, {"kind": "mlp"}))
