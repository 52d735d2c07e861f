"""Every example of an embodied run is a spec that a fleet takes."""

from __future__ import annotations

from pathlib import Path

import pytest
from headrace.client.specs import load_spec
from headrace_coordinator.api.submission.fleet_view import FleetView
from headrace_coordinator.api.submission.rules import problems_of
from headrace_coordinator.api.submission.submission import Submission
from headrace_coordinator.data import Dataset
from headrace_schema.resources.views import KeyProblemView
from headrace_schema.spec import RunSpec
from headrace_trainer.algorithms.episodes import EPISODE_ALGORITHMS

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "embodied"
EXAMPLES = sorted(FOLDER.glob("*.yaml"))
RECIPES = sorted(path for path in FOLDER.parent.glob("reproduce/*.yaml") if not path.name.startswith("qwen"))


def fleet(**simulators: frozenset[str]) -> FleetView:
    return FleetView(
        capabilities={
            "trainer": {
                "backends": frozenset({"fsdp"}),
                "episode_algorithms": frozenset(EPISODE_ALGORITHMS.names()),
                "episode_algorithm_options": frozenset(EPISODE_ALGORITHMS.capabilities(pytest.fail)),
            },
            "rollout": {"engines": frozenset({"transformers"})},
            "reward": {"scorers": frozenset({"episode"})},
            "simulator": simulators,
        },
        instances={"trainer": 1, "rollout": 1, "reward": 1, **({"simulator": 1} if simulators else {})},
        devices=["host/cpu:0"],
    )


def check(spec: RunSpec, fleet: FleetView) -> list[KeyProblemView]:
    return problems_of(Submission(spec, fleet, Dataset.open(spec.data, spec.seed)))


def read(path: Path, policies: Path, **more: object) -> RunSpec:
    """An example; a policy directory that it names is there."""
    given = load_spec(path, more)
    if directory := given["model"].get("path"):
        made = policies / Path(directory).name
        made.mkdir()
        for name in ("policy.json", "model.safetensors"):
            (made / name).touch()
        given["model"]["path"] = str(made)
    return RunSpec.model_validate(given)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_a_fleet_takes_the_example(path: Path, tmp_path: Path):
    spec = read(path, tmp_path)
    backends = frozenset({"gymnasium", "metaworld", "maniskill", "libero"})
    assert check(spec, fleet(backends=backends)) == []


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_lacks_devices_and_instances_alone(path: Path, tmp_path: Path):
    found = check(read(path, tmp_path), fleet(backends=frozenset({"maniskill", "libero"})))
    assert {each.key for each in found} <= {"rollout.instances", "trainer.ranks", "placement.mode"}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_what_it_lacks_is_named(path: Path, tmp_path: Path):
    spec = read(path, tmp_path, **{"algorithm.options.kl_loss_coef": 0.1})
    without = {found.key for found in check(spec, fleet())}
    assert without == {"environment", "algorithm.options.kl_loss_coef"}
    other = check(spec, fleet(backends=frozenset({"corridor"})))
    assert "environment.backend" in {found.key for found in other}
