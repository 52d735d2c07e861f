"""What OpenRun carries is made of the spec's own sections: no key of theirs is refused by the service."""

from typing import Any

import pytest
from headrace_schema.openings import RolloutConfig, TrainerConfig
from headrace_schema.problems import explain, sentence
from headrace_schema.spec import RunSpec
from pydantic import ValidationError

SPEC: dict[str, Any] = {
    "model": {"path": "org/model", "dtype": "float32"},
    "data": {"source": "copy_digits"},
    "reward": {"scorers": [{"name": "exact"}]},
    "seed": 7,
    "steps": 3,
    "deterministic": True,
    "trainer": {"backend_options": {"shard": "weights"}, "warmup": {"steps": 2}},
    "rollout": {"max_concurrency": 5},
}


def test_each_service_gets_its_sections_with_every_default_filled_in():
    spec = RunSpec.model_validate(SPEC)
    rollout = RolloutConfig.model_validate_json(RolloutConfig.of(spec).model_dump_json())
    assert (rollout.model, rollout.rollout, rollout.seed) == (spec.model, spec.rollout, 7)
    examples = [{"text": "2 + 2 =", "answer": "4"}]
    trainer = TrainerConfig.model_validate_json(
        TrainerConfig.of(spec, warmup_examples=examples).model_dump_json()
    )
    for key in ("model", "algorithm", "optimizer", "trainer", "sampling", "checkpoint", "steps"):
        assert getattr(trainer, key) == getattr(spec, key)
    assert (trainer.seed, trainer.deterministic, trainer.warmup_examples[0].answer) == (7, True, "4")


def problems_of(**sections: Any) -> list[str]:
    with pytest.raises(ValidationError) as caught:
        TrainerConfig.model_validate({"model": SPEC["model"], **sections})
    return [sentence(item) for item in explain(caught.value, TrainerConfig)]


@pytest.mark.parametrize("example", [{"answer": "4"}, {"answer": "4", "text": "a", "chat": []}])
def test_a_warm_up_example_has_one_prompt(example):
    (problem,) = problems_of(warmup_examples=[example])
    assert "exactly one of chat and text" in problem
