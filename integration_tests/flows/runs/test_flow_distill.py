"""A teacher beside the rollouts' engines: the policy nears it, whoever is killed, and no trainer holds it."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness.ledger import audit
from harness.processes import run_python
from headrace.client import HeadraceError

STEPS = 6
WRITE = """
import sys
from headrace_modelkit.loading import save_model
from headrace_modelkit.presets.tiny import character_tokenizer, tiny_model

model = tiny_model(seed=11)
for parameter in model.parameters():
    parameter.data.mul_(2.0 if parameter.dim() > 1 else 1.0)  # so that it is far from what every model begins with
save_model(model, character_tokenizer(), sys.argv[1])
"""


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "teacher"
    run_python("-c", WRITE, directory)
    return directory


def distilled(spec_of, teacher: Path, **more):
    options = {"top_k": 16, **more.pop("options", {})}
    return spec_of(
        name="distilled",
        steps=STEPS,
        algorithm={"name": "distill", "options": options},
        trainer={"warmup": {"steps": 0}, "reference": {"path": str(teacher), "dtype": "float32"}},
        optimizer={"lr": 3.0e-3},
        **more,
    )


def test_a_policy_nears_the_teacher_of_its_rollouts_over_a_killed_one(fleet, spec_of, teacher):
    run = fleet.submit(distilled(spec_of, teacher))
    fleet.reach(run, 2)
    fleet.replaced("rollout-0", fleet.kill("rollout-0"))
    found = audit(fleet, run := fleet.succeed(run))
    assert len(found.live) == STEPS and found.trained and not found.dropped
    figures = [step.figures for step in fleet.client.metrics(run.id)]
    distances = [each["teacher_kl"] for each in figures]
    assert min(distances) >= 0 and sum(distances[-2:]) < 0.9 * sum(distances[:2]), distances
    assert not any(each.get("reference_bytes") for each in figures)


def test_what_a_teacher_of_words_cannot_do_is_refused_by_its_key(fleet, spec_of, teacher):
    for changes, key in (
        ({"sampling": {"temperature": 0.7}}, "sampling.temperature"),
        ({"options": {"top_k": 300}}, "algorithm.options.top_k"),
        ({"options": {"top_k": 0, "direction": "forward"}}, "algorithm.options.direction"),
    ):
        with pytest.raises(HeadraceError) as raised:
            fleet.submit(distilled(spec_of, teacher, **changes))
        assert [each.key for each in raised.value.problems] == [key]
