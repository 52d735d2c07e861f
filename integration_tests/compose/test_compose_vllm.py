"""The image rollout-vllm without a GPU: it is built, its instance registers, and vLLM makes a run's answers."""

from __future__ import annotations

from pathlib import Path

import pytest
from compose.fleet import ComposeFleet
from harness.ledger import audit
from harness.specs import BATCH, small_spec

STEPS = 3
MODEL = "/models/tiny-vllm"
MAKE = f"python -m headrace_modelkit.presets.tiny {MODEL} --head-dim 32"  # vLLM's CPU build refuses smaller heads
VLLM = {
    "HEADRACE_ROLLOUT_TARGET": "rollout-vllm",
    "HEADRACE_VLLM_BUILD": "cpu",
    "HEADRACE_TAG": "test-vllm",  # an image of its own: the other tests' rollout goes on under its tag
}


@pytest.mark.nightly
@pytest.mark.timeout(2700, func_only=True)
def test_vllm_in_a_container_makes_the_answers_of_a_run(engine, torch_wheels):
    fleet = ComposeFleet(torch_wheels, "headrace-test-vllm", **VLLM)
    options = {"enforce_eager": True, "kv_cache_gib": 0.25}
    spec = small_spec(Path(MODEL), steps=STEPS, rollout={"engine": "vllm", "engine_options": options})
    try:
        fleet.compose("build", "--quiet", timeout_s=1800)
        fleet.up()
        fleet.compose("run", "--rm", "-T", "models", "sh", "-c", MAKE)
        ended = fleet.succeed(fleet.submit(spec))
        found = audit(fleet, ended)
        assert len(found.trained) == STEPS * BATCH and found.rewinds == 0
    finally:
        fleet.down()
